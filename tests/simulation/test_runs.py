"""Runs of steps at once: every record, block event and token is that of the steps one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from kvlab.config import KVConfig, SchedulerConfig
from kvlab.config.scheduler import PreemptionConfig
from kvlab.core import Request, SamplingParams, StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.kv.journal import BlockJournal
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.registry import registry
from tests.simulation.test_executor import POOLS, config, events


def traffic(seed: int = 0, *, spread_s: float = 0.3) -> list[Request]:
    """Requests with common beginnings, short and long, in bursts and after pauses. A third of them ask for more
    tokens than they produce.
    """
    rng = np.random.default_rng(seed)
    shared = tuple(rng.integers(1, 60, 24).tolist())
    arrivals = np.cumsum(rng.choice([0.0, 0.001, spread_s], 10))
    requests = [
        Request(
            f"r{index}",
            (*shared[: 8 * (index % 4)], *rng.integers(1, 60, int(rng.integers(3, 40))).tolist()),
            SamplingParams(max_tokens=int(rng.integers(1, 33)), ignore_eos=True, n=1 + (index == 3)),
            arrival_s=float(arrival),
            priority=index % 3,
            deadline_s=float(rng.integers(1, 9)),
        )
        for index, arrival in enumerate(arrivals)
    ]
    return [
        replace(each, output_tokens=each.sampling.max_tokens // 2 + 1) if index % 3 == 1 else each
        for index, each in enumerate(requests)
    ]


def served(requests: list[Request], settings: dict[str, Any], *, at_once: bool) -> tuple[RunLog, int]:
    """What happened, and how many steps were taken at once."""
    engine = build_engine(plan_engine(config("simulated", **settings)), journal=BlockJournal())
    calls = 0
    step = engine.step

    def counted() -> StepRecord | None:
        nonlocal calls
        record = step()
        calls += record is not None
        return record

    engine.step = counted  # type: ignore[method-assign]
    log = drive(engine, requests, at_once=at_once)
    assert engine.journal is not None
    log.blocks = engine.journal.columns(record.key for record in log.records)
    assert engine.audit() == []
    return log, len(log.steps) - calls


def check(requests: list[Request], settings: dict[str, Any]) -> tuple[int, RunLog]:
    """Both ways are the same; returns the number of steps at once, and the log."""
    (plain, none), (log, count) = (served(requests, settings, at_once=at_once) for at_once in (False, True))
    assert none == 0
    assert log.steps == plain.steps
    assert log.records == plain.records
    assert events(log) == events(plain)
    assert log.duration_s == plain.duration_s
    return count, log


VICTIMS = registry("scheduler.preemption.victim").names()


@pytest.mark.parametrize("order", registry("scheduler.order").names())
def test_steps_at_once_are_those_one_by_one(order: str) -> None:
    taken = preempted = evicted = hits = 0
    first = registry("scheduler.order").names().index(order)  # so that each order has each pool, and each victim
    for number, (pool, victim) in enumerate(zip(POOLS, islice(cycle(VICTIMS), first, None), strict=False)):
        settings = {
            "kv": KVConfig(num_blocks=16 if pool["backend"] == "paged" else 48, block_size=8, **pool),
            "scheduler": SchedulerConfig(
                order=order,
                max_batch_size=6,
                max_batched_tokens=12,
                admission_reserve=0,
                reserve_prompt=number % 2 == 0,
                ahead=number % 3 == 1,
                preemption=PreemptionConfig(victim=victim),
            ),
        }
        count, log = check(traffic(number), settings)
        taken += count
        counters = [step.counters for step in log.steps if step.counters is not None]
        preempted += sum(step.preempted for step in log.steps)
        evicted += sum(each.evicted_blocks for each in counters)
        hits += sum(each.hit_tokens for each in counters)
    assert min(preempted, evicted, hits) > 0
    # Who decodes in turn, or after prompts, is decided in each step.
    assert taken > 10 or order == "decode_round_robin"


def test_what_is_kept_expires_in_the_same_step() -> None:
    requests = [
        replace(each, salt=index % 2, pin_tokens=min(8, len(each.prompt_token_ids)) * (index % 3 == 0))
        for index, each in enumerate(traffic(1, spread_s=0.02))
    ]
    kept = {"ttl_s": 0.004, "pinned_share": 0.1, "pin_ttl_s": 0.01, "quota": 0.3}
    pool = KVConfig(num_blocks=24, block_size=8, **POOLS[-1], **kept)  # type: ignore[arg-type]
    count, log = check(requests, {"kv": pool, "scheduler": SchedulerConfig(max_batch_size=4)})
    assert count > 10
    expired = [step for step in log.steps if step.counters is not None and step.counters.expired_blocks]
    assert any(step.batch_seqs and not step.prefill_tokens for step in expired), "none in the middle of a run"
    assert max(step.pool.blocks_pinned for step in log.steps if step.pool is not None) == 2
    assert {record.salt for record in log.records} == {"0", "1"}


def test_what_waits_for_memory_is_admitted_when_the_prefix_that_it_waits_with_expires() -> None:
    """Its cached blocks are free for a first chunk then."""

    def asked(name: str, prompt: range, output: int, arrival_s: float = 0.0) -> Request:
        return Request(name, tuple(prompt), SamplingParams(max_tokens=output, ignore_eos=True), arrival_s)

    requests = [asked("first", range(1, 33), 1), asked("long", range(21, 61), 40)]
    requests.append(asked("again", range(1, 60), 2, arrival_s=0.001))
    scheduler = SchedulerConfig(
        max_batched_tokens=16, reserve_prompt=False, admission_reserve=0, watermark=0, max_batch_size=2
    )
    pool = KVConfig(num_blocks=11, block_size=8, ttl_s=0.004)
    count, log = check(requests, {"kv": pool, "scheduler": scheduler})
    expired = next(step for step in log.steps if step.counters is not None and step.counters.expired_blocks)
    assert (log.records[-1].scheduled_s, log.records[-1].cached_tokens) == (expired.start_s, 0)
    assert count > 10


@pytest.mark.parametrize("seed", range(3))
def test_a_chunk_gets_its_blocks_when_those_that_decode_have_filled_theirs(seed: int) -> None:
    """What they fill counts for their tenants' quotas, which decide whose blocks go."""
    requests = [
        replace(each, salt=index % 3, sampling=replace(each.sampling, n=1))
        for index, each in enumerate(traffic(seed, spread_s=0.002))
    ]
    scheduler = SchedulerConfig(
        max_batch_size=4, max_batched_tokens=12, admission_reserve=0, long_prefill_threshold=4
    )
    count, log = check(requests, {"kv": KVConfig(num_blocks=120, block_size=1, quota=0.3), "scheduler": scheduler})
    assert count > 10
    assert sum(step.counters.quota_evictions for step in log.steps if step.counters is not None)


def test_ends_and_what_they_give_back_are_part_of_steps_at_once() -> None:
    requests = [
        Request(f"r{index}", tuple(range(1, 8 + index)), SamplingParams(max_tokens=4 * index + 2, ignore_eos=True))
        for index in range(4)
    ]
    pool = KVConfig(num_blocks=48, block_size=8, **POOLS[-1])
    count, log = check(requests, {"kv": pool, "scheduler": SchedulerConfig(max_batch_size=4)})
    assert len({record.finished_s for record in log.records}) == 4
    assert count == sum(step.batch_seqs > 0 and not step.prefill_tokens for step in log.steps)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_token_ends_a_run_of_steps(ahead: bool) -> None:
    """Most such runs end so, some in the last of the steps that were planned at first."""
    requests = [
        replace(each, sampling=replace(each.sampling, max_tokens=32, stop_token_ids=(index, 2 * index, 3 * index)))
        for seed in range(4)
        for index, each in enumerate(traffic(seed, spread_s=0.01), 10 * seed + 1)
    ]
    requests = [replace(each, request_id=f"r{number}") for number, each in enumerate(requests)]
    scheduler = SchedulerConfig(max_batch_size=4, ahead=ahead)
    count, log = check(requests, {"kv": KVConfig(num_blocks=40, block_size=8), "scheduler": scheduler})
    assert count > 100
    assert sum(record.finish_reason == "stop" for record in log.records) > 10


def test_steps_at_once_end_when_content_has_come() -> None:
    def request(name: str, first: int, prompt: int, output: int, arrival_s: float) -> Request:
        tokens = tuple(first + n % 20 for n in range(prompt))
        return Request(name, tokens, SamplingParams(max_tokens=output, ignore_eos=True), arrival_s=arrival_s)

    fillers = [request(f"filler {n}", 21 + n, 90, 6, 1 + n) for n in range(2)]
    longest, again = request("long", 41, 8, 80, 9), request("again", 1, 16, 4, 9.001)
    pool = KVConfig(num_blocks=24, block_size=8, offload="1MiB", **POOLS[-1])
    count, log = check([request("first", 1, 16, 4, 0), *fillers, longest, again], {"kv": pool})
    assert count > 10
    steps = [step for step in log.steps if step.pool is not None and step.pool.loading_sequences]
    assert len(steps) > 5
    assert {(step.batch_seqs, step.prefill_tokens) for step in steps[1:]} == {(1, 0)}, "one decodes, one waits"
    assert log.records[-1].cached_tokens


def test_content_that_leaves_and_comes_back_does_so_in_the_same_steps() -> None:
    requests = [replace(each, arrival_s=3 * each.arrival_s) for each in traffic(2)]
    repeated = [replace(each, request_id=f"{each.request_id} again") for each in requests]
    pool = KVConfig(num_blocks=16, block_size=8, offload="1MiB", **POOLS[-1])
    scheduler = SchedulerConfig(max_batch_size=6, max_batched_tokens=12, admission_reserve=0)
    later = [replace(each, arrival_s=each.arrival_s + 2) for each in repeated]
    count, log = check([*requests, *later], {"kv": pool, "scheduler": scheduler})
    assert count > 10
    counters = [step.counters for step in log.steps if step.counters is not None]
    assert sum(each.host_hit_tokens for each in counters)
    assert sum(each.host_stored_blocks for each in counters)
    waited = [step for step in log.steps if step.pool is not None and step.pool.loading_sequences]
    assert any(step.decode_tokens for step in waited), "nobody ran while others waited"


@pytest.mark.parametrize(("shared", "blocks"), [(0, 32), (24, 20)])
def test_steps_are_taken_at_once_while_a_request_waits_for_memory(shared: int, blocks: int) -> None:
    """Equal prompts too, whose next blocks lie behind the same one."""
    rng = np.random.default_rng(5)
    common = rng.integers(1, 60, shared).tolist()
    requests = [
        Request(
            f"r{index}",
            (*common, *([] if index % 3 else rng.integers(1, 60, 30).tolist())) or (1,) * (8 + index % 2),
            SamplingParams(max_tokens=60, ignore_eos=True),
            arrival_s=0.001 * index,
        )
        for index in range(12)
    ]
    settings = {
        "kv": KVConfig(num_blocks=blocks, block_size=8, **POOLS[-1]),
        "scheduler": SchedulerConfig(max_batch_size=12, admission_reserve=0.1),
    }
    count, log = check(requests, settings)
    kept = sum(step.waiting > 0 and not step.prefill_tokens for step in log.steps)
    assert kept > 0.3 * len(log.steps)
    assert count > 0.6 * len(log.steps)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_waits_until_another_has_left_is_tried_in_the_same_step(ahead: bool) -> None:
    requests = [
        Request(f"r{index}", (index + 1,) * 8, SamplingParams(max_tokens=output, ignore_eos=True))
        for index, output in enumerate((8, 40, 16))  # 2, 6 and 3 blocks
    ]
    scheduler = SchedulerConfig(reserve_output=True, conservativeness=1.0, admission_reserve=0, ahead=ahead)
    count, log = check(requests, {"kv": KVConfig(num_blocks=12, block_size=8, **POOLS[-1]), "scheduler": scheduler})
    first, longest, last = log.records
    assert count > 10
    assert last.scheduled_s is not None
    assert first.finished_s <= last.scheduled_s < longest.finished_s


def test_what_a_preempted_request_loses_is_sampled_again() -> None:
    requests = [
        Request(f"r{index}", (index + 1,) * 4, SamplingParams(max_tokens=60), index * 1e-3, output_tokens=output)
        for index, output in enumerate((32, 27, 31))
    ]
    scheduler = SchedulerConfig(
        order="prefill_alone", reserve_output=True, conservativeness=0.02, admission_reserve=0, ahead=True
    )
    count, log = check(requests, {"kv": KVConfig(num_blocks=88, block_size=1, **POOLS[-1]), "scheduler": scheduler})
    assert count > 10
    (victim,) = (record for record in log.records if record.preempted_s)
    assert len(victim.output_token_ids) == len(victim.token_times_s) == 31
    assert victim.preempted_s[0] not in victim.token_times_s  # when the step ended that ran as it was preempted
    assert sum(step.output_tokens for step in log.steps) == 32 + 27 + 31


def test_steps_that_a_prompt_has_waited_for_others_are_counted_alike() -> None:
    """The count of those that ended with the first request is given up in a step with a full batch."""
    requests = [
        Request(
            f"r{index}", (index + 1,) * 8, SamplingParams(max_tokens=output, ignore_eos=True), arrival_s=arrival_s
        )
        for index, (output, arrival_s) in enumerate(((4, 0.0), (12, 3e-4), (40, 3e-4), (8, 3e-4)))
    ]
    scheduler = SchedulerConfig(max_batch_size=2, prefill_wait_steps=4, admission_reserve=0)
    count, log = check(requests, {"kv": KVConfig(num_blocks=48, block_size=8, **POOLS[-1]), "scheduler": scheduler})
    _, second, _, last = log.records
    assert count > 10
    assert last.scheduled_s is not None
    assert sum(second.finished_s <= step.start_s < last.scheduled_s for step in log.steps) == 4


@pytest.mark.parametrize(("reserve_output", "unit"), [(True, 8), (False, 8), (True, 64)])
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_whole_blocks_are_those_one_by_one(reserve_output: bool, unit: int, ahead: bool) -> None:
    """Chunks beside those that decode, prompts that wait for equal ones, preemption (`scheduler.chunk_unit`)."""
    taken = preempted = hits = 0
    for number, pool in enumerate(POOLS):
        blocks = 16 if pool["backend"] == "paged" else 48
        settings = {
            "kv": KVConfig(num_blocks=blocks, block_size=8, **pool),
            "scheduler": SchedulerConfig(
                max_batch_size=6,
                max_batched_tokens=20 if unit == 8 else 63,
                admission_reserve=0,
                reserve_output=reserve_output,
                chunk_unit=unit,
                ahead=ahead,
            ),
        }
        count, log = check(traffic(number), settings)
        taken += count
        preempted += sum(step.preempted for step in log.steps)
        hits += sum(step.counters.hit_tokens for step in log.steps if step.counters is not None)
        partial = [step for step in log.steps if step.batch_seqs > step.sampled_tokens]
        assert bool(partial) is (unit == 8)
        assert all(step.prefill_tokens % unit == 0 for step in partial if step.batch_seqs == step.decode_tokens + 1)
    assert min(taken, hits) > 10
    assert (preempted > 0) is not reserve_output
