"""Steps about servers that are watched by their KV events."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.smollm2 import Client
from features.steps.upstream import listening
from kvlab.cli import watch
from kvlab.kv.pool import BlockPool
from kvlab.server.recorder import Recorder
from kvlab.server.tracing import TraceSettings
from tests.support.commands import Command, call
from tests.support.content_listener import findable
from tests.support.serving import wait_until, wait_until_empty

_KEY = b"the key of a scenario"


def complete(url: str, model: str, count: int) -> None:
    """Ask one after another for completions of prompts that begin alike, and go on in several ways."""
    draws = random.Random(3)
    for number in range(count):
        prompt = [draws.randrange(2) + 5] * 48 + [number + 20] * 40
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def model_of(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return name


def settle(client: Client) -> None:
    """Wait until all events are sent."""
    wait_until_empty(client.served.serving)
    events = client.served.serving.events
    assert events is not None
    wait_until(lambda: events.published == events._number)


@given(parsers.parse("{count:d} prompts that begin alike were completed in a cache that has no room for all"))
def completed(client: Client, count: int) -> None:
    complete(client.served.url, model_of(client.served.url), count)
    settle(client)


@given(
    parsers.parse("{count:d} prompts that begin alike were completed through a recorder"), target_fixture="trace"
)
def completed_recorded(client: Client, tmp_path: Path, count: int) -> Path:
    (tmp_path / "key").write_bytes(_KEY)
    settings = TraceSettings(str(tmp_path / "trace.jsonl"), _KEY, "upstream", client.served.url)
    recorder = Recorder(settings)
    with listening(recorder.app()) as url:
        complete(url, model_of(client.served.url), count)
        wait_until(lambda: recorder.trace.progress.written == count)
    settle(client)
    return tmp_path / "trace.jsonl"


@given("the recorder's trace does not say what was found")
def unsaid(trace: Path) -> None:
    trace.write_text(re.sub(r'"cached_tokens":\d+,?', "", trace.read_text()))


@given("the recorder's trace is gone")
def gone(trace: Path) -> None:
    trace.unlink()


@given(parsers.re(r"a publisher that sends (?P<what>.*)"), target_fixture="events_at")
def publisher(standing: ExitStack, what: str) -> str:
    zmq, msgspec = pytest.importorskip("zmq"), pytest.importorskip("msgspec")
    stored: dict[str, Any] = {"type": "BlockStored", "parent_block_hash": None, "block_size": 4}
    batches: Iterator[tuple[int, Any]] = (
        (number, [1.0, [stored | {"block_hashes": [number], "token_ids": [1, 2, 3, number]}]])
        for number in (0, 1, 4)
    )
    sent = list(batches) if "batches" in what else [(0, {"hello": 1})]
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def send() -> None:
        if socket.poll(30_000):  # somebody has subscribed
            for number, batch in sent:
                socket.send_multipart((b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)))

    sending = threading.Thread(target=send)
    sending.start()
    standing.callback(context.destroy, linger=0)
    standing.callback(sending.join)
    return f"tcp://127.0.0.1:{port}"


def watch_settings(request: pytest.FixtureRequest) -> list[str]:
    if "events_at" in request.fixturenames:
        return [f"events={request.getfixturevalue('events_at')}", "seconds=4"]
    served = request.getfixturevalue("client").served
    events = served.serving.events
    return [f"events={events.endpoint}", f"replay={events.replay_endpoint}", f"url={served.url}", "seconds=0.5"]


@when("I watch it")
def watch_it(request: pytest.FixtureRequest, commands: list[Command]) -> None:
    commands.append(call(watch.main, *watch_settings(request)))


@when(parsers.re(r'I watch it with "(?P<text>.*)"'))
def watch_it_with(request: pytest.FixtureRequest, commands: list[Command], text: str) -> None:
    commands.append(call(watch.main, *watch_settings(request), *text.split()))


@when("I watch it with the recorder's trace")
def watch_with_trace(request: pytest.FixtureRequest, commands: list[Command], trace: Path, tmp_path: Path) -> None:
    commands.append(call(watch.main, *watch_settings(request), f"trace={trace}", f"hash_with={tmp_path / 'key'}"))


@when("I watch it at /v1 with the recorder's trace")
def watch_at_v1(request: pytest.FixtureRequest, commands: list[Command], trace: Path, tmp_path: Path) -> None:
    settings = [f"{word}/v1" if word.startswith("url=") else word for word in watch_settings(request)]
    commands.append(call(watch.main, *settings, f"trace={trace}", f"hash_with={tmp_path / 'key'}"))


@when(parsers.parse('I watch with "{text}"'))
def watch_with(commands: list[Command], text: str) -> None:
    commands.append(call(watch.main, *text.split()))


def figures(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return found


@then("it knows as many blocks as the server's index has, and saw some evicted")
def knows_blocks(request: pytest.FixtureRequest, client: Client) -> None:
    found = figures(call(watch.main, *watch_settings(request), "--json").output)
    pool = client.served.serving.engine.core.pool
    assert isinstance(pool, BlockPool)
    assert found["blocks"] == len(findable(pool)) > 0
    assert found["removed"] > 0
    assert found["unknown"] == found["missed"] == 0


@then("what the server found is what the ledger finds under lru, and no more than belady")
def as_the_ledger(request: pytest.FixtureRequest, trace: Path, tmp_path: Path) -> None:
    settings = [*watch_settings(request), f"trace={trace}", f"hash_with={tmp_path / 'key'}", "--json"]
    found = figures(call(watch.main, *settings).output)
    verdict, rates = found["verdict"], found["replay"]["hit_rates"]
    share = verdict["said_tokens"] / verdict["prompt_tokens"]
    assert 0 < share == pytest.approx(rates["lru"][0])
    assert share <= rates["belady"][0] + 1e-9
