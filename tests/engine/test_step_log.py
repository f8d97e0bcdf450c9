"""What a step says about itself is what happened."""

from __future__ import annotations

import pytest

from kvlab.core import StepRecord
from kvlab.engine.clock import LogicalClock, WallClock
from tests.support.engines import drain, make_engine, request, steps
from tests.support.executors import RecordingExecutor
from tests.support.pools import slotted_pool
from tests.support.records import counted, memory


def test_times_are_those_of_the_engines_clock() -> None:
    clock = LogicalClock()
    engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=clock, max_batch_size=1)
    first, second = (engine.add_request(request(name, 4, 3)) for name in "ab")
    clock.wait_until(10.0)
    records = drain(engine)
    assert (first.scheduled_s, first.token_times_s, first.finished_s) == (10.0, [11.0, 12.0, 13.0], 13.0)
    assert (second.scheduled_s, second.token_times_s, second.finished_s) == (13.0, [14.0, 15.0, 16.0], 16.0)
    *computing, last = records
    assert [(record.start_s, record.end_s) for record in computing] == [(at, at + 1) for at in range(10, 16)]
    assert {record.execute_ms for record in computing} == {1000.0}
    assert (last.start_s, last.end_s, last.batch_seqs, last.execute_ms) == (16.0, 16.0, 0, 0.0)
    assert {record.schedule_ms for record in records} == {0.0}


def test_the_first_admission_is_when_a_preempted_sequence_was_scheduled() -> None:
    clock = LogicalClock()
    engine = make_engine(executor=RecordingExecutor(step_s=1.0), clock=clock, admission_reserve=0)
    sequences = [engine.add_request(request(name, 20, 30)) for name in "abc"]
    drain(engine)
    assert sequences[2].preemptions
    assert sequences[2].scheduled_s == 0.0


def test_the_last_token_of_a_prompt_is_prefill() -> None:
    """A prompt of one token, and a chunk that leaves one."""
    engine = make_engine(max_batched_tokens=8)
    for each in (request("one", 1, 2), request("nine", 8, 2)):
        engine.add_request(each)
    records = drain(engine)
    computed = [(record.prefill_tokens, record.decode_tokens) for record in records if record.batch_seqs]
    assert computed == [(8, 0), (1, 1), (0, 1)]


def test_a_step_says_what_attention_had_to_read_and_to_compute() -> None:
    engine = make_engine(max_batched_tokens=8)
    for each in (request("five", 5, 3), request("six", 6, 1)):
        engine.add_request(each)
    records = [record for record in drain(engine) if record.batch_seqs]
    assert [(r.prefill_tokens, r.decode_tokens) for r in records] == [(8, 0), (3, 1), (0, 1)]
    assert [r.sampled_tokens for r in records] == [1, 2, 1]
    assert [r.context_tokens for r in records] == [5 + 3, 6 + 6, 7]
    assert [r.attended_tokens for r in records] == [(1 + 2 + 3 + 4 + 5) + (1 + 2 + 3), 6 + (4 + 5 + 6), 7]


@pytest.mark.parametrize("contiguous", [False, True])
def test_counts_add_up(contiguous: bool) -> None:
    engine = make_engine(slotted_pool(2) if contiguous else None, max_batched_tokens=16, admission_reserve=0)
    sequences = [engine.add_request(request(f"r{index}", 11 + index, 20)) for index in range(5)]
    records: list[StepRecord] = []
    for record in steps(engine):
        if record is None:
            continue
        records.append(record)
        stats = engine.pool.stats()
        assert (memory(record).blocks_in_use, memory(record).tokens_stored) == (
            stats.blocks_in_use,
            stats.tokens_stored,
        )
        assert (memory(record).blocks_total, memory(record).block_size) == (stats.blocks_total, stats.block_size)
        assert record.batch_seqs <= record.running
        assert record.batch_seqs or counted(record).blocks_freed
    assert [record.index for record in records] == list(range(len(records)))
    total = engine.pool.counters()
    assert sum(counted(record).blocks_allocated for record in records) == total.blocks_allocated
    assert sum(counted(record).blocks_freed for record in records) == total.blocks_freed == total.blocks_allocated
    assert [record.index for record in records if not record.batch_seqs] == [len(records) - 1]  # only gave back
    decode = sum(record.decode_tokens for record in records)
    prefill = sum(record.prefill_tokens for record in records)
    computed = sum(len(sequence.token_ids) - 1 + sequence.recomputed_tokens for sequence in sequences)
    assert decode + prefill == computed
    assert sum(record.recomputed_tokens for record in records) == sum(s.recomputed_tokens for s in sequences)


def test_wall_clock_counts_seconds_from_its_restart() -> None:
    clock = WallClock()
    clock.wait_until(0.1)
    before = clock.now()
    assert before >= 0.1
    clock.restart()
    assert clock.now() < before
    clock.wait_until(-1.0)  # has passed
