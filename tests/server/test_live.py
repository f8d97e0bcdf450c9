"""What /live says, and the headers of the page that shows it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from kvlab.config.server import ServerConfig
from kvlab.core import PoolCounters, PoolStats, Request, SamplingParams, StepRecord
from kvlab.engine.core import EngineCore
from kvlab.engine.service import Engine
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.eviction import LruEviction
from kvlab.kv.journal import BlockState
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.retention import Limits, Retention
from kvlab.kv.view import CacheView
from kvlab.server import live
from kvlab.server.live import History, LiveView
from kvlab.server.page import PAGE
from tests.support.engines import drain, make_engine, request, step_until
from tests.support.pools import BLOCK_SIZE, NUM_BLOCKS, sharing_pool
from tests.support.serving import Served, served


def view_of(core: EngineCore) -> LiveView:
    return LiveView(Engine(core), History(), {"version": "1"}, lambda: "ready")


def look(core: EngineCore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asyncio.run(view_of(core).body()))
    return found


def states_of(found: dict[str, Any]) -> list[int]:
    return list(b64decode(found["pool"]["map"]))


def test_requests_are_in_queue_prefill_or_decode_and_their_blocks_are_theirs() -> None:
    core = make_engine(sharing_pool(), max_batch_size=2, max_batched_tokens=16)
    core.add_request(request("decodes", 8, 20))
    step_until(core, lambda: bool(core.scheduler.running) and core.scheduler.running[0].is_decoding)
    core.add_request(request("fills", 40, 4))
    core.add_request(request("waits", 9, 4))
    core.step()
    found = look(core)
    rows = {row["id"]: row for row in found["requests"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "decodes": "decode",
        "fills": "prefill",
        "waits": "queue",
    }
    assert (found["queue"], found["prefill"], found["decode"]) == (1, 1, 1)
    assert rows["fills"]["computed_tokens"] == 15  # the budget of a step but for the one that decodes
    assert rows["decodes"]["output_tokens"] == 2
    assert rows["waits"]["blocks"] == 0
    states = states_of(found)
    first = len(BlockState)
    for number, name in enumerate(["decodes", "fills"], first):
        assert states.count(number) == rows[name]["blocks"] > 0
    assert states.count(BlockState.FREE) == found["pool"]["free"]
    assert len(states) == NUM_BLOCKS == sum(found["pool"][state.name.lower()] for state in BlockState)


def test_cached_and_shared_blocks_are_told_apart() -> None:
    core = make_engine(sharing_pool())
    prompt = 4 * BLOCK_SIZE + 1
    core.add_request(request("first", prompt, 1))
    drain(core)
    assert states_of(look(core)).count(BlockState.CACHED) == 4
    for name in ("second", "third"):
        core.add_request(request(name, prompt, 8, prompt_of="first"))
    core.step()
    found = look(core)
    assert (found["pool"]["shared"], found["pool"]["cached"]) == (4, 0)
    assert states_of(found).count(BlockState.SHARED) == 4


def test_pinned_blocks_are_told_from_cached_ones() -> None:
    retention = Retention(LruEviction, Limits(pinned=2))
    pool = PagedKVCachePool(
        NUM_BLOCKS, BLOCK_SIZE, 96, sharing_pool().storage, prefix_sharing=True, eviction=retention
    )
    core = make_engine(pool)
    core.add_request(replace(request("first", 4 * BLOCK_SIZE + 1, 1), pin_tokens=2 * BLOCK_SIZE))
    drain(core)
    found = look(core)
    assert (found["pool"]["pinned"], found["pool"]["cached"]) == (2, 2)
    assert states_of(found).count(BlockState.PINNED) == 2


def test_a_request_that_has_ended_is_not_listed_while_its_blocks_are_still_in_use() -> None:
    core = make_engine()
    core.add_request(request("ends", 8, 1))
    core.step()
    found = look(core)
    assert (found["requests"], found["prefill"], found["decode"]) == ([], 0, 0)
    assert states_of(found).count(BlockState.IN_USE) == found["pool"]["in_use"] == 2


def test_only_the_first_of_many_requests_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_ROWS", 3)
    core = make_engine(max_batch_size=2)
    for number in range(6):
        core.add_request(request(f"r{number}", 4, 8))
    core.step()
    found = look(core)
    assert [row["id"] for row in found["requests"]] == ["r0", "r1", "r2"]
    assert found["queue"] + found["prefill"] + found["decode"] == 6


def test_many_pages_look_at_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view, looks = view_of(make_engine()), []
    history = view._history
    monkeypatch.setattr(history, "minute", lambda now: looks.append(now))
    now = 0.0
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now))

    async def ask() -> None:
        nonlocal now
        bodies = await asyncio.gather(*(view.body() for _ in range(20)))
        assert len(set(bodies)) == len(looks) == 1
        now = 0.2
        assert await view.body() is bodies[0]
        now = 0.3
        await view.body()
        assert len(looks) == 2

    asyncio.run(ask())


def test_a_page_that_leaves_takes_the_view_from_no_other() -> None:
    view = view_of(make_engine())

    async def ask() -> None:
        leaves, stays = asyncio.create_task(view.body()), asyncio.create_task(view.body())
        await asyncio.sleep(0)
        leaves.cancel()
        assert json.loads(await stays)["queue"] == 0

    asyncio.run(ask())


class Instant:
    """An executor that computes nothing."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        return StepResult([7] * len(step.sampled))


def test_a_look_at_a_hundred_thousand_blocks_is_cheap() -> None:
    blocks, sequences = 100_000, 256
    core = make_engine(
        PagedKVCachePool(blocks, 1, 1000),
        Instant(),
        max_batch_size=sequences,
        max_batched_tokens=blocks,
        admission_reserve=0.0,
    )
    prompt = tuple(range(blocks // sequences - 1))
    for number in range(sequences):
        core.add_request(Request(f"r{number}", prompt, SamplingParams(9)))
    core.step()
    view, times = view_of(core), []
    for _ in range(5):
        begun = time.thread_time()
        found = view._look(core)
        times.append(time.thread_time() - begun)
    assert found["pool"]["in_use"] > 0.98 * blocks
    assert min(times) < 0.02  # 3 ms on a Xeon of 2023


def record(end_s: float, sampled: int, *, prompt: int = 0, hits: int = 0, in_use: int = 0) -> StepRecord:
    return StepRecord(
        index=0,
        start_s=end_s,
        end_s=end_s,
        running=1,
        waiting=0,
        batch_seqs=1,
        prefill_tokens=0,
        decode_tokens=1,
        sampled_tokens=sampled,
        pool=PoolStats(block_size=4, blocks_total=10, blocks_in_use=in_use, tokens_stored=0),
        counters=PoolCounters(
            prompt_tokens=prompt, hit_tokens=hits, blocks_allocated=in_use, blocks_freed=1, evicted_blocks=hits
        ),
    )


def test_the_last_minute_has_a_number_for_each_second() -> None:
    history = History()
    assert history.minute(0.5)["output_tokens"] == []
    for each in (
        record(0.2, 3, prompt=9, hits=4, in_use=5),
        record(0.9, 2, in_use=7),
        record(2.1, 1, in_use=6),
        record(4.0, 9),
    ):
        history.step(each)
    assert history.minute(4.9) == {
        "output_tokens": [5, 0, 1, 0],
        "prompt_tokens": [9, 0, 0, 0],
        "hit_tokens": [4, 0, 0, 0],
        "blocks_allocated": [12, 0, 6, 0],
        "blocks_freed": [2, 0, 1, 0],
        "evicted_blocks": [4, 0, 0, 0],
        "blocks_in_use": [7, 7, 6, 6],  # memory stays in use while nothing steps
    }
    later = history.minute(62.5)
    assert later["output_tokens"] == [1, 0, 9] + [0] * 57
    assert history.rates(4.0)["blocks_allocated_per_s"] == 18 / 4
    assert history.rates(62.0)["blocks_allocated_per_s"] == 6 / 60  # of the last minute
    assert history.rates(0.1)["output_tokens_per_s"] == 15  # an engine that is younger than a second
    assert later["blocks_in_use"] == [6, 6] + [0] * 58
    history.step(record(500, 1, in_use=3))
    assert history.minute(530)["blocks_in_use"] == [0] * 30 + [3] * 30
    assert history.minute(900)["blocks_in_use"] == [3] * 60


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(config=ServerConfig(port=0, api_key="secret")) as found:
        yield found


def test_the_page_needs_no_key_and_what_it_shows_does(server: Served) -> None:
    assert httpx.get(f"{server.url}/").content == PAGE
    assert httpx.get(f"{server.url}/live").status_code == 401
    answer = httpx.get(f"{server.url}/live", headers={"Authorization": "Bearer secret"})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["model"] | {"created": 0} == {
        "id": "tiny",
        "object": "model",
        "created": 0,
        "owned_by": "kvlab",
        "max_model_len": 96,
        "takes": "messages",
    }


def test_the_page_may_run_its_own_script_alone_and_ask_its_own_server_alone(server: Served) -> None:
    headers = httpx.get(f"{server.url}/").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE.decode(), re.DOTALL)
        assert policy.pop(f"{tag}-src") == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_makes_no_elements_of_text() -> None:
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", PAGE)
    assert not re.search(rb"""(?:src|href|action)=["'](?:https?:)?//""", PAGE)
