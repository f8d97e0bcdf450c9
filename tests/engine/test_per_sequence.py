"""executor.batching=per_sequence: the same decisions and tokens as one pass for all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvlab.core import Sequence, StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.per_sequence import PerSequenceExecutor
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.pool import BlockPool
from kvlab.kv.view import CacheView
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from tests.support.engines import drain, make_engine, request
from tests.support.executors import RecordingExecutor
from tests.support.plans import composed
from tests.support.pools import paged_pool, sharing_pool, slotted_pool

REQUESTS = [
    request("chunked", 40, 6),
    request("penalized", 14, 9, prompt_of="common", repetition_penalty=1.3),
    request("samples", 15, 7, prompt_of="common", n=3, temperature=4.0, seed=5),
    request("logprobs", 17, 8, prompt_of="common", logprobs=2),
    request("short", 3, 12),
]


def serve(
    pool: BlockPool, *, alone: bool, order: str, mixed: bool = True
) -> tuple[list[Sequence], list[StepRecord], RecordingExecutor]:
    recording = RecordingExecutor()
    engine = make_engine(
        pool,
        PerSequenceExecutor(recording) if alone else recording,
        max_batched_tokens=16,
        admission_reserve=0.0,
        order=order,
        mixed=mixed,
    )
    first = [engine.add_request(each) for each in REQUESTS]
    records = drain(engine)
    return [each for sequence in first for each in (sequence, *sequence.siblings)], records, recording


@pytest.mark.parametrize("order", ["fcfs", "prefill_first"])
@pytest.mark.parametrize("make_pool", [lambda: sharing_pool(16), lambda: paged_pool(16), slotted_pool])
def test_decisions_and_tokens_are_the_same(make_pool: Callable[[], BlockPool], order: str) -> None:
    for mixed in (True, False):
        apart, apart_records, recording = serve(make_pool(), alone=True, order=order, mixed=mixed)
        flat, flat_records, _ = serve(make_pool(), alone=False, order=order, mixed=mixed)
        assert {len(each) for each in recording.passes} == {1}
        assert [each.output_token_ids for each in apart] == [each.output_token_ids for each in flat]
        assert [each.preemptions for each in apart] == [each.preemptions for each in flat]
        assert any(each.preemptions for each in flat) == (make_pool is not slotted_pool)
        logprobs = [[[entry.logprob for entry in each.logprobs] for each in side] for side in (apart, flat)]
        assert any(logprobs[0])
        for ours, theirs in zip(*logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert [(r.batch_seqs, r.prefill_tokens, r.counters) for r in apart_records] == [
            (r.batch_seqs, r.prefill_tokens, r.counters) for r in flat_records
        ]


def test_a_failure_ends_its_own_sequence_alone() -> None:
    class Failing(RecordingExecutor):
        def execute(self, step: StepInput, view: CacheView) -> StepResult:
            if step.sequences[0].request_id == "short" and step.num_outputs[0] == 3:
                raise ArithmeticError("the device fell over")
            return super().execute(step, view)

    engine = make_engine(sharing_pool(24), PerSequenceExecutor(Failing()))
    first = [engine.add_request(each) for each in REQUESTS]
    drain(engine)
    expected, _, _ = serve(sharing_pool(24), alone=False, order="fcfs")
    assert [each.error is not None for each in first] == [False, False, False, False, True]
    tokens = {(each.request.request_id, each.index): each.output_token_ids for each in expected}
    assert all(each.output_token_ids == tokens[each.request.request_id, 0] for each in first[:-1])


def simulated(batching: str) -> RunLog:
    device = ["executor=simulated", "hardware=l4", "framework.step_us=0", "framework.sequence_us=0"]
    config = composed(*device, "framework.token_us=0", "workload=burst16", f"executor.batching={batching}")
    return drive(
        build_engine(plan_engine(config)), [request(f"r{number}", 100, 20, ignore_eos=True) for number in range(16)]
    )


def test_a_modelled_device_reads_the_weights_for_each_sequence() -> None:
    flat, apart = simulated("ragged"), simulated("per_sequence")
    assert [each.output_token_ids for each in apart.records] == [each.output_token_ids for each in flat.records]
    assert len(apart.steps) == len(flat.steps)
    assert 10 < apart.duration_s / flat.duration_s < 16  # 16 sequences; a pass of all takes longer than one of one
