"""Which sequences are admitted, and when."""

from __future__ import annotations

import pytest

from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence, SequenceStatus
from kvlab.engine.scheduler import build_scheduler
from kvlab.kv.pools.paged import PagedKVCachePool
from tests.support.engines import drain, make_engine, request
from tests.support.executors import RecordingExecutor
from tests.support.model import expected_tokens, prompt_for
from tests.support.pools import paged_pool, slotted_pool


class TestFirstComeFirstServed:
    def test_sequences_enter_in_the_order_they_were_submitted(self) -> None:
        executor = RecordingExecutor()
        engine = make_engine(executor=executor, max_batch_size=2)
        for name in "dbca":
            engine.add_request(request(name, 6, 3))
        drain(engine)
        assert [list(step) for step in executor.steps] == [["d", "b"]] * 3 + [["c", "a"]] * 3


class TestBatchLimit:
    @pytest.mark.parametrize("limit", [1, 3, 8])
    def test_no_more_run_at_once(self, limit: int) -> None:
        engine = make_engine(max_batch_size=limit)
        for index in range(10):
            engine.add_request(request(f"r{index}", 4, 4))
        records = drain(engine)
        assert max(record.running for record in records) == limit
        assert records[0].running == limit
        assert records[0].waiting == 10 - limit


class TestMemoryBudget:
    """24 blocks of 4 tokens."""

    def test_the_reserve_is_a_share_of_what_is_free(self) -> None:
        engine = make_engine(max_batched_tokens=512)
        for index in range(8):
            engine.add_request(request(f"r{index}", 15, 8))  # the first decode step stays in the fourth block
        running = [record.running for record in (engine.step() for _ in range(2)) if record is not None]
        assert running == [4, 5]  # 32 of 96 tokens are free after the first step, 25.6 less the reserve
        drain(engine)

    @pytest.mark.parametrize(("prompt_len", "reserve"), [(90, 0.2), (95, 0.99)])
    def test_the_reserve_is_waived_for_a_sequence_that_would_run_alone(
        self, prompt_len: int, reserve: float
    ) -> None:
        engine = make_engine(admission_reserve=reserve, max_batched_tokens=512)
        alone = request("alone", prompt_len, 96 - prompt_len)
        sequence = engine.add_request(alone)
        record = engine.step()
        assert record is not None
        assert (record.running, record.waiting) == (1, 0)
        drain(engine)
        assert sequence.output_token_ids == expected_tokens(alone)

    def test_the_reserve_is_not_waived_while_another_runs(self) -> None:
        engine = make_engine(max_batched_tokens=512)
        engine.add_request(request("small", 4, 20))
        large = engine.add_request(request("large", 76, 2))  # 92 tokens are free, 73.6 less the reserve
        engine.step()
        assert large.status is SequenceStatus.WAITING
        drain(engine)

    def test_samples_reserve_what_each_has_of_its_own(self) -> None:
        """A request holds 6 blocks at its end, and its second sample shares the 4 that the prompt fills."""
        executor = RecordingExecutor()
        engine = make_engine(executor=executor, max_batched_tokens=512, admission_reserve=0, reserve_output=True)
        for index in range(4):
            sampling = SamplingParams(max_tokens=7, n=2)
            engine.add_request(Request(f"r{index}", prompt_for(f"r{index}", 17), sampling))
        records = drain(engine)
        assert list(executor.steps[0]) == ["r0", "r1", "r2"]
        assert not any(record.preempted for record in records)

    def test_contiguous_slots_are_the_budget_where_there_are_no_pages(self) -> None:
        engine = make_engine(slotted_pool(3))
        for index in range(5):
            engine.add_request(request(f"r{index}", 4, 3))
        records = drain(engine)
        assert (records[0].running, records[0].waiting) == (3, 2)


class TestCandidates:
    """What a scheduler says, without the pool that has the last word."""

    @pytest.mark.parametrize(("max_batch_size", "entered"), [(1, 1), (2, 2), (8, 5)])
    def test_no_more_enter_than_may_run(self, max_batch_size: int, entered: int) -> None:
        scheduler = build_scheduler(SchedulerConfig(max_batch_size=max_batch_size))
        waiting = [Sequence(request(f"r{index}", 4, 1)) for index in range(5)]
        for sequence in waiting:
            scheduler.waiting.add(sequence)
        assert scheduler.candidate() is None  # admission is not open yet
        scheduler.begin_step(0.0)
        while (candidate := scheduler.candidate()) is not None:
            assert scheduler.candidate() is candidate  # asking changes nothing
            scheduler.admit(candidate)
        assert scheduler.running == waiting[:entered]
        assert list(scheduler.waiting) == waiting[entered:]
        assert [s.status for s in waiting] == [SequenceStatus.RUNNING] * entered + [SequenceStatus.WAITING] * (
            5 - entered
        )

    def test_only_the_candidate_is_admitted(self) -> None:
        scheduler = build_scheduler(SchedulerConfig())
        waiting = [Sequence(request(name, 4, 1)) for name in "ab"]
        for sequence in waiting:
            scheduler.waiting.add(sequence)
        scheduler.begin_step(0.0)
        with pytest.raises(RuntimeError, match="'b' is not the candidate"):
            scheduler.admit(waiting[1])
        assert (scheduler.running, list(scheduler.waiting)) == ([], waiting)


class TestTokenBudget:
    def test_an_admitted_sequence_takes_part_in_that_step(self) -> None:
        """40 tokens a step: `a` and a part of `b` use them up, so `c` waits though there is memory."""
        executor = RecordingExecutor()
        engine = make_engine(executor=executor, max_batched_tokens=40)
        sequences = [engine.add_request(request(name, 24, 2)) for name in "abc"]
        records = [engine.step(), engine.step()]
        assert executor.steps == [{"a": 24, "b": 16}, {"a": 1, "b": 8, "c": 24}]
        assert [(r.running, r.waiting) for r in records if r is not None] == [(2, 1), (3, 0)]
        drain(engine)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(s.request) for s in sequences]

    def test_with_none_left_no_sequence_is_admitted(self) -> None:
        engine = make_engine(max_batched_tokens=8, max_batch_size=8)
        engine.add_request(request("a", 20, 2))
        waiting = engine.add_request(request("b", 4, 2))
        for _ in range(2):
            engine.step()
            assert (waiting.status, waiting.slot) == (SequenceStatus.WAITING, None)
        engine.step()  # the last four tokens of `a` leave room for four
        assert waiting.status is SequenceStatus.RUNNING
        drain(engine)


def test_after_a_preemption_no_sequence_is_admitted_in_that_step() -> None:
    """An admission would take the blocks that the running sequences have just given up."""
    engine = make_engine(admission_reserve=0)
    sequences = [engine.add_request(request(name, 20, 30)) for name in "abc"]
    small = engine.add_request(request("small", 1, 1))
    seen = 0
    before = 0
    while not sequences[2].finish_reason:
        record = engine.step()
        assert record is not None
        if record.preempted:
            seen += 1
            assert record.running == before - record.preempted
        before = record.running - sum(s.finish_reason is not None for s in engine.scheduler.running)
    assert seen
    drain(engine)
    assert small.output_token_ids == expected_tokens(small.request)


class Optimist(PagedKVCachePool):
    """Promises more than it has."""

    def free_token_capacity(self) -> int | None:
        return 10_000

    def free_slot_count(self) -> int:
        return 10_000


def test_a_sequence_that_the_pool_refuses_keeps_its_position_in_the_queue() -> None:
    pool = paged_pool()
    optimist = Optimist(24, 4, 96, pool.storage)
    executor = RecordingExecutor()
    engine = make_engine(optimist, executor, max_batched_tokens=512, admission_reserve=0)
    asked = [request(f"r{index}", 30, 3) for index in range(7)]  # 8 blocks each: three fit
    sequences = [engine.add_request(each) for each in asked]
    records = drain(engine)
    assert records[0].running == 3
    assert [executor.first_step_of(each.request_id) for each in asked] == [0, 0, 0, 3, 3, 3, 6]
    assert [sequence.output_token_ids for sequence in sequences] == [expected_tokens(each) for each in asked]
    assert [sequence.preemptions for sequence in sequences] == [0] * 7
