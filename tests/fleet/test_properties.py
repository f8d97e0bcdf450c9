"""Fleets of all kinds, drawn at random: every request ends once, and no memory is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config.fleet import FleetConfig, LinkConfig, ScaleConfig
from kvlab.core import FinishReason, RequestRecord
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.routers import ROUTERS
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import key_of
from tests.fleet.test_fleet import POOL, WINDOWED, fleet_of, small_pool, traffic


def check_holdings(fleet: Fleet) -> None:
    """Who is said to have a content has it, in that block: it can be pulled. Copies are counted."""
    holdings = fleet.holdings
    assert holdings is not None
    pools = [replica.core.pool for replica in fleet.replicas]
    for key, holders in holdings.holders.items():
        for index, (block, _) in holders.items():
            pool = pools[index]
            assert isinstance(pool, BlockPool)
            content = pool.allocator.content(block)
            assert content is not None
            assert key_of(content) == key
    for neighbour in fleet.neighbours:
        for key, pull in neighbour._under_way.items():
            if pull.slot is not None:  # its source keeps it
                groups = pools[pull.source].groups  # type: ignore[attr-defined]
                kept = [block for group in groups for block in group.tables.blocks(pull.slot)]
                assert holdings.of(key)[pull.source].block in kept
    tokens = [[place.tokens for place in holders.values()] for holders in holdings.holders.values()]
    assert holdings.duplicates.held == sum(map(sum, tokens))
    assert holdings.duplicates.duplicate == sum(sum(copies[1:]) for copies in tokens)


def _lives(draw: random.Random, replicas: int, prefill: int) -> list[str]:
    lives, stay = [], {0, prefill}  # of each stage one is always there
    for number in range(draw.randrange(4) if replicas > len(stay) else 0):
        index = draw.choice([each for each in range(replicas) if each not in stay])
        lives.append(f"{0.01 * number + 0.001:.4f}:{draw.choice(('die', 'drain', 'return'))}:{index}")
    return lives


def _rule(draw: random.Random, most: int) -> ScaleConfig:
    least, down_s = draw.randrange(1, most + 1), draw.choice((0.0, 0.02))
    return ScaleConfig("queue", 1.0, least=least, warm_up_s=0.005, every_s=0.01, down_s=down_s)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), is_split=st.booleans())
def test_every_request_ends_once_and_no_memory_is_lost(seed: int, is_split: bool) -> None:
    """Random routers, links, lives, stores, tiers, pulls, preemptions and aborts."""
    draw = random.Random(seed)
    replicas = draw.randrange(2, 5)
    is_decode_first = is_split and draw.random() < 0.6
    link = LinkConfig(
        gb_s=draw.choice((0.0001, 1.0)),
        piece_us=draw.choice((0.0, 50.0)),
        setup_us=draw.choice((0.0, 400.0)),
        send=draw.choice(("prompt", "chunk", "layer")) if is_decode_first else "prompt",
    )
    prefill = draw.randrange(1, replicas) if is_split else 0
    scale = _rule(draw, replicas - prefill) if is_split and draw.random() < 0.3 else ScaleConfig()
    prefill_scale = _rule(draw, prefill) if is_split and draw.random() < 0.3 else ScaleConfig()
    has_windows = draw.random() < 0.3
    settings = FleetConfig(
        replicas=replicas,
        router=draw.choice(ROUTERS.names()),
        prefixes=draw.choice(("auto", "exact", "events", "memory")),
        events_lost=draw.choice((0.0, 0.5)),
        prefill=prefill,
        split_tokens=draw.choice((0, 20)),
        scale=scale,
        prefill_scale=prefill_scale,
        handshake="decode_first" if is_decode_first else "prefill_first",
        link=link,
        life=[] if scale.on or prefill_scale.on else _lives(draw, replicas, prefill),
        store=draw.choice((None, "10", "100")),
        store_weight=draw.choice((0.0, 0.8)),
        neighbours=draw.random() < 0.5,
        pull=draw.choice(("auto", "always", "cheaper")),
    )
    offload = draw.choice((None, "8KiB", "32KiB", "1MiB"))
    mode = "recompute" if offload is None or has_windows else draw.choice(("recompute", "swap", "swap", "auto"))
    own = (small_pool(offload, mode) if draw.random() < 0.6 else POOL) | (WINDOWED if has_windows else {})
    fleet, requests = fleet_of(settings, own=own), traffic(draw.randrange(1, 40), seed=seed)
    ended: dict[str, RequestRecord] = {}
    aborted = {f"r{draw.randrange(len(requests))}" for _ in range(draw.randrange(4))}

    def on_finish(record: RequestRecord) -> None:
        assert record.request_id not in ended
        ended[record.request_id] = record

    for request in requests:
        fleet.submit(request, on_finish=on_finish)
    steps = 0
    while fleet.has_work():
        if steps in (3, 9, 20) and aborted:
            fleet.abort(aborted.pop())
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        steps += 1
        assert fleet.audit() == []
        assert steps < 5000
        check_holdings(fleet)
    assert sorted(ended) == sorted(request.request_id for request in requests)
    assert all(record.finish_reason in (FinishReason.LENGTH, FinishReason.ABORTED) for record in ended.values())
    for replica in fleet.replicas:
        assert replica.core.pool.stats().blocks_in_use == 0
        assert replica.in_flight(1e9) == 0
