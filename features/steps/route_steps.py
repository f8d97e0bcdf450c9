"""Steps about the proxy before several servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx2 as httpx
import pytest
from aiohttp import web
from pytest_bdd import given, parsers, then, when

from features.steps.recorder_steps import Recorded
from features.steps.upstream import Upstream, listening
from kvlab.cli import route
from kvlab.cli.compose import compose_run
from kvlab.cli.settings import read_settings
from kvlab.config.server import ServerConfig
from kvlab.server import lookout
from kvlab.server.lookout import RouteSettings
from kvlab.server.route import Proxy
from tests.support.commands import Command, call
from tests.support.endpoint import FakeServer, endpoint
from tests.support.serving import Served, running, wait_until

_WHOLE = b"data: [DONE]"


@dataclass
class Routed:
    """A proxy, its servers, and what clients got."""

    url: str
    servers: Sequence[FakeServer]
    record: Path | None = None
    polls: bool = False  # the servers' metrics, again and again
    got: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        return [len(server.script.bodies) for server in self.servers]

    def ask(self, prompt: str) -> None:
        """Ask as a client; a stream that breaks off has status 0."""
        body = {"prompt": prompt, "max_tokens": 3, "stream": True, "user": "somebody"}
        got = b""
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
                for part in answer.iter_bytes():
                    got += part
            self.got.append((answer.status_code, got))
        except httpx.HTTPError:
            self.got.append((0, got))

    def hear(self) -> None:
        """Wait until it knows what the servers say now: the poll behind the next began later, and one more came."""
        enough = {server: server.polls + 3 for server in self.servers}
        wait_until(lambda: all(server.polls >= polls for server, polls in enough.items()))

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health").json()
        return found


def prompt(letter: str) -> str:
    """Of a few blocks, which no other letter's begins like."""
    return letter * 300


def proxy_before(stack: ExitStack, urls: Sequence[str], text: str = "", record: Path | None = None) -> str:
    """The address of a proxy with these settings of the command."""
    given_settings = [f"upstreams=[{','.join(urls)}]", "health_s=0.05", *text.split()]
    command, _ = read_settings(route.RouteCommandSettings, given_settings)
    values = {own.name: getattr(command, own.name) for own in fields(RouteSettings)}
    proxy = Proxy(RouteSettings(**values | {"record": str(record) if record else None}))
    asyncio.run(proxy.start())
    return stack.enter_context(listening(proxy.app()))


@given(
    parsers.parse("3 servers, of which the first says that {running:d} requests run there"),
    target_fixture="fake_servers",
)
def three_servers(standing: ExitStack, running: int) -> list[FakeServer]:
    servers = [standing.enter_context(endpoint(usage="none")) for _ in range(3)]
    servers[0].running = running
    return servers


@given(parsers.re(r"3 servers, of which the first (?P<how>dies|breaks off) when it is asked"),
       target_fixture="fake_servers")  # fmt: skip
def failing_servers(standing: ExitStack, how: str) -> list[FakeServer]:
    servers = three_servers(standing, 0)
    servers[0].script.after, servers[0].script.then = 0, {"dies": "end", "breaks off": "break"}[how]
    return servers


@given("3 servers, of which the first hangs when it is asked, and is given up after 0.2 s",
       target_fixture="fake_servers")  # fmt: skip
def hanging_servers(standing: ExitStack) -> list[FakeServer]:
    patch = standing.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(lookout, "ANSWER_S", aiohttp.ClientTimeout(total=0.1))
    servers = three_servers(standing, 0)
    servers[0].script.then = "stall"
    return servers


@given(parsers.parse('a proxy before them with "{text}"'), target_fixture="routed")
def proxy_of(standing: ExitStack, fake_servers: list[FakeServer], text: str) -> Routed:
    url = proxy_before(standing, [server.url for server in fake_servers], text)
    return Routed(url, fake_servers, polls="router=vllm" in text)


@given(parsers.parse('a proxy before them with "{text}", which records'), target_fixture="routed")
def recording_proxy(standing: ExitStack, tmp_path: Path, fake_servers: list[FakeServer], text: str) -> Routed:
    record = tmp_path / "decisions.jsonl"
    url = proxy_before(standing, [server.url for server in fake_servers], text, record)
    return Routed(url, fake_servers, record)


@given(parsers.parse("a proxy before a server that answers {kind}"), target_fixture="recorded")
def proxy_of_one(standing: ExitStack, kind: str) -> Recorded:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    upstream, app = Upstream(kind), web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/{path:.*}", upstream.answer)
    url = proxy_before(standing, [standing.enter_context(listening(app))])
    return Recorded(url, upstream, cast(Any, None))


@given("2 kvlab servers that publish KV events, and a proxy that hears them", target_fixture="heard")
def hearing_proxy(standing: ExitStack) -> tuple[str, list[Served]]:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    from kvlab.server.build import build_serving

    config = compose_run(["model=qwen3_tiny", "kv.num_blocks=40", "executor=simulated", "hardware=h100_sxm",
                          "executor.timing=roofline"]).config  # fmt: skip
    served = [
        standing.enter_context(running(build_serving(config, ServerConfig(port=0, kv_events="tcp://127.0.0.1:0"))))
        for _ in range(2)
    ]
    events = ",".join(each.serving.events.endpoint for each in served if each.serving.events)
    text = f"fleet.router=sticky tokenizer=upstream events=[{events}]"
    return proxy_before(standing, [each.url for each in served], text), served


@given(parsers.parse('servers of "{models}"'), target_fixture="upstream_setting")
@given('servers of ""', target_fixture="upstream_setting")
def servers_of(standing: ExitStack, models: str = "") -> list[str]:
    urls = [standing.enter_context(endpoint(models=[model])).url for model in models.split()]
    return [f"upstreams=[{','.join(urls)}]"] if urls else []


@when(parsers.parse("clients ask for {letters} through it"))
def ask_all(routed: Routed, letters: str) -> None:
    for letter in letters.split():
        routed.ask(prompt(letter))
        if routed.polls:
            routed.hear()


@when(parsers.parse("{count:d} requests of {prompts:d} prompts go through it, {at_once:d} at a time"))
def ask_at_once(routed: Routed, count: int, prompts: int, at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda number: routed.ask(prompt("ABCDEFGH"[number % prompts])), range(count)))


@when("the first server begins again")
def begin_again(routed: Routed) -> None:
    first = routed.servers[0]
    first.script.after = 10**9
    first.script.bodies.clear()
    asyncio.run_coroutine_threadsafe(first.start(), first.loop).result(30)
    wait_until(lambda: routed.health()["upstreams"][0]["up"])


@when("the proxy has found the first one down")
def found_down(routed: Routed) -> None:
    # Until it was asked for its health, the reason is that of the request; asked while it was still closing, none.
    wait_until(lambda: "Cannot connect" in routed.health()["upstreams"][0].get("reason", ""))


@when(parsers.re(r"the first one is drained(?P<no_more> no more)?"))
def drain(routed: Routed, no_more: str | None) -> None:
    answer = httpx.post(f"{routed.url}/{'undrain' if no_more else 'drain'}?upstream=0")
    assert answer.status_code == 200
    assert answer.json() == routed.health()["upstreams"][0]
    assert answer.json()["draining"] is not bool(no_more)


@when("the second server has completed a prompt, for somebody else")
def fill_second(heard: tuple[str, list[Served]]) -> None:
    httpx.post(f"{heard[1][1].url}/v1/completions", json={"prompt": "the water " * 40, "max_tokens": 2}, timeout=60)


@when("a client asks for that prompt through the proxy", target_fixture="answer")
def ask_routed_again(heard: tuple[str, list[Served]]) -> dict[str, Any]:
    """Until its events are there."""
    body = {"prompt": "the water " * 40, "max_tokens": 2}
    events = heard[1][1].serving.events
    assert events is not None
    wait_until(lambda: events.published == events._number)
    found: dict[str, Any] = httpx.post(f"{heard[0]}/v1/completions", json=body, timeout=60).json()
    return found


@when(parsers.parse('I route with "{settings}"'))
def route_with(commands: list[Command], upstream_setting: list[str], settings: str) -> None:
    commands.append(call(route.main, *upstream_setting, *settings.split(), "server.port=0"))


@then(parsers.parse("the servers were asked {counts} times"))
def asked(routed: Routed, counts: str) -> None:
    """One count: one server was asked that often."""
    expected = [int(count) for count in counts.split()]
    assert routed.counts == expected or sorted(routed.counts) == [0, 0, *expected]


@then("the second server found what it had")
def found_it(answer: dict[str, Any]) -> None:
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@then("all have their whole answers")
def all_whole(routed: Routed) -> None:
    assert all(status == 200 and _WHOLE in got for status, got in routed.got)


@then("the last client saw that its answer broke off")
def saw_cut(routed: Routed) -> None:
    status, got = routed.got[-1]
    assert (status, got.count(b"data:")) == (0, 1)


@then("the proxy says of the first that it is down, and of 1 request that it went to another")
def says_down(routed: Routed) -> None:
    assert [each["up"] for each in routed.health()["upstreams"]] == [False, True, True]
    metrics = httpx.get(f"{routed.url}/metrics").text
    assert f'kvlab:route_retries_total{{upstream="{routed.servers[0].url}"}} 1.0' in metrics
    assert f'kvlab:route_up{{upstream="{routed.servers[0].url}"}} 0.0' in metrics


@then("the first one saw that its client left")
def first_was_left(routed: Routed) -> None:
    wait_until(lambda: routed.servers[0].was_left)


@then("the first server was asked again")
def answered_when_routed_again(routed: Routed) -> None:
    assert routed.counts[0] > 0
    assert all(status == 200 for status, _ in routed.got)


@then(parsers.parse('"kvlab route" makes the {count:d} decisions of {router} again'))
def made_again(routed: Routed, commands: list[Command], count: int, router: str) -> None:
    commands.append(call(route.main, f"replay={routed.record}"))
    text = f"{count} of {count} decisions of {router} come out as they were recorded\n"
    assert (commands[-1].code, commands[-1].output) == (0, text)


@then("it says so where one was another")
def says_differs(routed: Routed) -> None:
    assert routed.record is not None
    head, *lines = routed.record.read_text().splitlines()
    row = json.loads(lines[4])
    row["choice"] = (row["choice"] + 1) % 3
    lines[4] = json.dumps(row)
    routed.record.write_text("\n".join([head, *lines]) + "\n")
    found = call(route.main, f"replay={routed.record}")
    assert found.code == 1
    assert f"the first that does not is in line 6 of {routed.record}" in found.output
