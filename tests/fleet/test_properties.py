"""Fleets of all kinds, drawn at random: every request ends once, and no memory is lost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import FrameworkConfig
from kvlab.config.fleet import FleetConfig, LinkConfig, ScaleConfig
from kvlab.core import FinishReason, Request, RequestRecord, SequenceStatus
from kvlab.fleet.decode_first import DecodeFirst
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.routers import ROUTERS
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import key_of
from tests.fleet.test_fleet import POOL, SLOW, WINDOWED, fleet_of, small_pool, traffic


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


def check_tokens_to_come(fleet: Fleet) -> None:
    """What routers see of prompts and outputs to come is what all sequences have left."""
    for view, replica in zip(fleet.views, fleet.replicas, strict=True):
        scheduler = replica.core.scheduler
        left = [each for each in (*scheduler.waiting, *scheduler.running) if each.finish_reason is None]
        prompts = [max(each.num_prompt_tokens - each.num_prefilled, 0) for each in left if not each.is_decoding]
        outputs = [each.request.expected_tokens - each.num_output_tokens for each in left]
        assert (view.prefill_tokens, view.work_tokens) == (sum(prompts), sum(prompts) + sum(outputs))


def check_nothing_is_left(fleet: Fleet) -> None:
    """All has ended: nothing is held or offered, and no link is taken for what broke off."""
    died_s = {event.replica: event.at_s for event in fleet.router.config.events if event.event == "die"}
    for replica in fleet.replicas:
        assert replica.core.pool.stats().blocks_in_use == 0
        assert replica.in_flight(1e9) == 0
        assert not replica.core.is_keeping
        assert not replica.loading
    split, transfers = fleet.split, [pull for neighbour in fleet.neighbours for pull in neighbour.pulls]
    ends = [(index, neighbour._link.own) for index, neighbour in enumerate(fleet.neighbours)]
    if split is not None:
        transfers += split.transfers
        ends += [*enumerate(split._sending), *enumerate(split._receiving)]
        assert not split._sources
        assert not split._computed
        assert not isinstance(split, DecodeFirst) or not split._requests
        assert not any(map(len, split.tiers.values()))
    for index, end in ends:
        if end.free_s > died_s.get(index, math.inf):
            behind = [
                sent for sent in transfers if index in (sent.source, sent.target) and sent.end_s >= end.free_s
            ]
            assert any(sent.ready_s >= died_s[index] for sent in behind)


def _lives(draw: random.Random, replicas: int, prefill: int) -> list[str]:
    lives, stay = [], {0, prefill}  # of each stage one is always there
    for number in range(draw.randrange(4) if replicas > len(stay) else 0):
        index = draw.choice([each for each in range(replicas) if each not in stay])
        lives.append(f"{0.01 * number + 0.001:.4f}:{draw.choice(('die', 'drain', 'return'))}:{index}")
    return lives


def _rule(draw: random.Random, most: int) -> ScaleConfig:
    least, down_s = draw.randrange(1, most + 1), draw.choice((0.0, 0.02))
    return ScaleConfig("queue", 1.0, least=least, warm_up_s=0.005, every_s=0.01, down_s=down_s)


def _varied(request: Request, draw: random.Random) -> Request:
    """With one or two samples, and perhaps an output that ends before its longest."""
    samples, most = draw.choice((1, 1, 1, 2)), request.sampling.max_tokens
    sampling = replace(request.sampling, n=samples, temperature=float(samples > 1))
    return replace(request, sampling=sampling, output_tokens=draw.choice((None, None, draw.randint(1, most))))


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
    own: dict[str, Any] = (small_pool(offload, mode) if draw.random() < 0.6 else POOL) | (
        WINDOWED if has_windows else {}
    )
    tokens, ahead = draw.choice((6, 512)), draw.random() < 0.5
    own["scheduler"] = replace(own["scheduler"], max_batched_tokens=tokens, ahead=ahead)
    fleet = fleet_of(settings, own=own, framework=draw.choice((FrameworkConfig(), SLOW)))
    requests = [_varied(each, draw) for each in traffic(draw.randrange(1, 40), seed=seed)]
    ended: dict[tuple[str, int], RequestRecord] = {}
    aborted = [f"r{draw.randrange(len(requests))}" for _ in range(draw.choice((0, 3, 10)))]

    def on_finish(record: RequestRecord) -> None:
        assert (record.request_id, record.sample) not in ended
        ended[record.request_id, record.sample] = record
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert max(record.token_times_s, default=0.0) <= record.finished_s

    for request in requests:
        fleet.submit(request, on_finish=on_finish)
    steps, start_s = 0, 0.0
    while fleet.has_work():
        if aborted and draw.random() < 0.2:
            name, running = aborted.pop(), [each for one in fleet.replicas for each in one.core.scheduler.running]
            loading = (each.request.request_id for each in running if each.status is SequenceStatus.LOADING)
            fleet.abort(next(loading, name))  # whose transfers are under way, if there is one
        record = fleet.step()
        if record is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        if record is not None:
            assert start_s <= record.start_s <= record.end_s
            start_s = record.start_s
        steps += 1
        assert fleet.audit() == []
        assert steps < 5000
        check_holdings(fleet)
        check_tokens_to_come(fleet)
    assert sorted(ended) == sorted((each.request_id, n) for each in requests for n in range(each.sampling.n))
    assert FinishReason.FAILED not in {record.finish_reason for record in ended.values()}
    check_nothing_is_left(fleet)
