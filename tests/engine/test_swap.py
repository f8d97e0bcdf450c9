"""Preemption that copies blocks to a tier and back: nothing is computed again, and tokens are those by the book."""

from __future__ import annotations

import pytest

from kvlab.config import PreemptionConfig
from kvlab.core import Sequence
from kvlab.engine.build import build_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import ConfigError
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.tiers.swap import Swaps
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run
from tests.support.engines import drain, make_engine, request, step_until
from tests.support.model import expected_tokens
from tests.support.plans import composed
from tests.support.tiers import SlowStore, tier_of, tiered_pool


def crowded(pool: PagedKVCachePool) -> tuple[EngineCore, list[Sequence]]:
    """Six sequences that grow until they do not fit."""
    engine = make_engine(pool, admission_reserve=0.0, preemption=PreemptionConfig(mode="swap"))
    return engine, [engine.add_request(request(f"r{number}", 9 + number, 26)) for number in range(6)]


def finished(engine: EngineCore, sequences: list[Sequence]) -> int:
    """Run to the end, auditing each step, and return how many tokens were computed again."""
    while engine.has_work():
        engine.step()
        assert engine.audit() == []
    for sequence in sequences:
        assert sequence.output_token_ids == expected_tokens(sequence.request)
        assert sequence.swapped is None
    assert engine.pool.audit() == []
    assert not tier_of(engine).held()
    assert sum(sequence.preemptions for sequence in sequences)
    return sum(sequence.recomputed_tokens for sequence in sequences)


def swaps_of(engine: EngineCore) -> Swaps:
    assert isinstance(engine.pool, PagedKVCachePool)
    assert engine.pool.offload is not None
    return engine.pool.offload.swaps


def test_a_sequence_returns_with_all_that_it_had_computed() -> None:
    engine, sequences = crowded(tiered_pool(24, 64))
    assert finished(engine, sequences) == 0
    counters = engine.pool.counters()
    assert counters.swapped_out_blocks >= counters.swapped_in_blocks > 0


def test_from_a_store_behind_a_thread_too() -> None:
    engine, sequences = crowded(tiered_pool(24, 0, SlowStore()))
    assert finished(engine, sequences) == 0
    assert engine.pool.counters().swapped_in_blocks


def test_what_the_tier_has_lost_is_computed_again() -> None:
    store = SlowStore()
    engine, sequences = crowded(tiered_pool(24, 0, store))
    step_until(engine, lambda: any(sequence.swapped is not None for sequence in sequences))
    store.broken.update(key for swapped in swaps_of(engine).by_ticket.values() for _, key in swapped.held[1:])
    assert finished(engine, sequences) > 0
    assert engine.pool.counters().failed_pages > 0


def test_what_is_held_for_a_sequence_is_let_go_when_it_is_aborted() -> None:
    engine, sequences = crowded(tiered_pool(24, 64))
    step_until(engine, lambda: any(sequence.swapped is not None for sequence in sequences))
    (victim,) = [sequence for sequence in sequences if sequence.swapped is not None]
    assert tier_of(engine).held()
    engine.abort(victim.request.request_id)
    assert not tier_of(engine).held()
    assert engine.audit() == []
    drain(engine)


@pytest.mark.parametrize(("link_gb_s", "swaps"), [(64, True), (0.001, False)])
def test_auto_takes_what_is_faster(link_gb_s: float, swaps: bool) -> None:
    crowd = ("workload=burst48", "kv.num_blocks=400", "kv.offload=8GiB", "scheduler.admission_reserve=0")
    device = ("executor=simulated", "model=qwen3_8b", "hardware=h100_sxm", f"hardware.host_link_gb_s={link_gb_s}")
    plan = plan_run(composed(*crowd, *device, "tracking=off", "scheduler.preemption.mode=auto"))
    engine = build_engine(plan)
    log = drive(engine, plan.requests)
    assert sum(record.preemptions for record in log.records)
    assert bool(engine.pool.counters().swapped_out_blocks) == swaps


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["scheduler.preemption.mode=swap"],
            "scheduler.preemption.mode=swap: copies blocks to host memory, and kv.offload=null has none; set it, "
            "as kv.offload=4GiB",
        ),
        (
            ["scheduler.preemption.mode=swap", "kv.offload=1MiB", "scheduler.on_exhaustion=fail"],
            "scheduler.preemption.mode=swap: scheduler.on_exhaustion=fail never preempts; leave it recompute, or "
            "set on_exhaustion=preempt",
        ),
        (
            ["scheduler.preemption.mode=auto", "kv.offload=1MiB", "scheduler=static"],
            "scheduler.preemption.mode=auto: each sequence of a static batch gets all its memory at once, so that "
            "none is preempted; leave it recompute, or take scheduler.policy=continuous",
        ),
        (
            ["scheduler.preemption.mode=copy"],
            "scheduler.preemption.mode=copy: unknown; known: recompute, swap, auto",
        ),
    ],
)
def test_modes_that_cannot_work_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("workload=burst16", *overrides)
    assert str(caught.value) == sentence


def test_swapping_beside_windows_is_refused() -> None:
    settings = (
        "model=gemma3_27b",
        "executor=simulated",
        "hardware=h200_sxm",
        "kv.offload=1GiB",
        "workload=burst16",
    )
    with pytest.raises(ConfigError) as caught:
        plan_run(composed(*settings, "model.max_seq_len=8192", "scheduler.preemption.mode=swap"))
    assert str(caught.value) == (
        "scheduler.preemption.mode=swap: copies whole sequences, and layers of gemma3_27b keep the last 1,024 "
        "tokens; use kv.windows=false, or recompute"
    )
