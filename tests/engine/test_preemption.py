"""Which sequence is preempted, what becomes of it, and what happens where preemption is off."""

from __future__ import annotations

import pytest

from kvlab.config import PreemptionConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence
from kvlab.engine.scheduler.victims import VICTIMS
from tests.support.engines import Stream, drain, step_until
from tests.support.records import counted
from tests.support.table import TableExecutor, table_engine, table_pool, undisturbed


def asked(number: int, prompt_len: int = 20, max_tokens: int = 30, priority: int = 0) -> Request:
    first = 1000 * number
    prompt = tuple(range(first, first + prompt_len))
    return Request(f"r{number}", prompt, SamplingParams(max_tokens), priority=priority)


def assert_served(*sequences: Sequence) -> None:
    for sequence in sequences:
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.output_token_ids == undisturbed(sequence.request)


class TestVictim:
    def first_victim(self, victim: str | None, *requests: Request, gap: int = 0) -> str:
        engine = table_engine(table_pool(24), preemption=PreemptionConfig(victim), admission_reserve=0.0)
        sequences = []
        for request in requests:
            sequences.append(engine.add_request(request))
            for _ in range(gap):
                engine.step()
        step_until(engine, lambda: any(sequence.preemptions for sequence in sequences))
        (first,) = [sequence.request.request_id for sequence in sequences if sequence.preemptions]
        drain(engine)
        assert_served(*sequences)
        return first

    @pytest.mark.parametrize("victim", [None, "last_admitted"])
    def test_the_last_admitted(self, victim: str | None) -> None:
        assert self.first_victim(victim, *map(asked, range(3)), gap=2) == "r2"

    def test_the_times_of_preemption_and_return_are_recorded(self) -> None:
        engine = table_engine(table_pool(24), admission_reserve=0.0)
        sequences = [engine.add_request(asked(number)) for number in range(3)]
        drain(engine)
        assert sum(sequence.preemptions for sequence in sequences) > 0
        for sequence in sequences:
            assert len(sequence.preempted_s) == len(sequence.resumed_s) == sequence.preemptions
            moments = [sequence.scheduled_s or 0.0]
            for gone, back in zip(sequence.preempted_s, sequence.resumed_s, strict=True):
                moments += [gone, back]
            assert moments == sorted(moments)
            assert moments[-1] <= (sequence.finished_s or 0.0)

    def test_of_equals_the_last_admitted(self) -> None:
        assert self.first_victim("fewest_generated", *map(asked, range(3))) == "r2"
        assert self.first_victim("priority", *map(asked, range(3))) == "r2"


@pytest.mark.parametrize(("least_urgent", "blocks"), [(0, 15), (1, 15), (1, 16), (2, 17)])
def test_those_behind_the_least_urgent_decode_though_it_lacks_memory(least_urgent: int, blocks: int) -> None:
    """Of three, each needs a sixth block in the second step. vLLM goes on behind it since 0.33."""
    engine = table_engine(table_pool(blocks), preemption=PreemptionConfig("priority"), admission_reserve=0.0)
    sequences = [engine.add_request(asked(number, priority=int(number == least_urgent))) for number in range(3)]
    records = drain(engine)
    assert [record.batch_seqs for record in records[:3]] == [3, 2, 2]
    assert sequences[least_urgent].preempted_s[0] == records[1].start_s
    assert_served(*sequences)


@pytest.mark.parametrize("victim", VICTIMS.names())
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("blocks", [14, 20, 40])
def test_everything_completes_whichever_is_preempted(victim: str, sharing: bool, blocks: int) -> None:
    executor = TableExecutor()
    engine = table_engine(
        table_pool(blocks, sharing=sharing), executor, preemption=PreemptionConfig(victim), admission_reserve=0.0
    )
    sequences = [engine.add_request(asked(number, 5 + 3 * number, 30, number % 3)) for number in range(8)]
    records = drain(engine)
    assert_served(*sequences)
    assert executor.errors == []
    assert sum(r.preempted for r in records) == sum(s.preemptions for s in sequences) > 0


class TestReturn:
    def test_finds_its_own_blocks_and_they_are_no_hits(self) -> None:
        engine = table_engine(table_pool(15, sharing=True), admission_reserve=0.0)
        sequences = [engine.add_request(asked(number)) for number in range(3)]
        records = drain(engine)
        assert_served(*sequences)
        assert sum(counted(record).recompute_hit_tokens for record in records) > 0
        assert sum(counted(record).hit_tokens for record in records) == 0
        assert sum(counted(record).prompt_tokens for record in records) == 60
        assert [sequence.cached_tokens for sequence in sequences] == [0, 0, 0]

    def test_with_its_own_blocks_there_is_less_to_compute_again(self) -> None:
        again = []
        for sharing in (False, True):
            engine = table_engine(table_pool(15, sharing=sharing), admission_reserve=0.0)
            sequences = [engine.add_request(asked(number)) for number in range(3)]
            drain(engine)
            assert_served(*sequences)
            again.append(sum(sequence.recomputed_tokens for sequence in sequences))
        assert 0 < again[1] < again[0]


class TestFail:
    """on_exhaustion=fail"""

    def test_fails_those_that_do_not_fit_by_name_and_no_other(self) -> None:
        """Three fill 15 of 17 blocks and each needs another in the same step."""
        engine = table_engine(table_pool(17), on_exhaustion="fail", admission_reserve=0.0)
        streams = [Stream() for _ in range(3)]
        sequences = [engine.add_request(asked(number, 20, 8), stream) for number, stream in enumerate(streams)]
        records = drain(engine)
        assert [s.finish_reason for s in sequences] == [FinishReason.LENGTH] * 2 + [FinishReason.FAILED]
        assert_served(*sequences[:2])
        error = sequences[2].error or ""
        assert "out of KV blocks: 3 wanted" in error
        assert error.endswith("did not fit: 'r2'")
        assert streams[2].tokens == undisturbed(sequences[2].request)[:1]
        assert sum(record.preempted for record in records) == 0

    def test_the_blocks_of_the_failed_serve_the_next_step(self) -> None:
        engine = table_engine(table_pool(21), on_exhaustion="fail", admission_reserve=0.0)
        for number in range(4):
            engine.add_request(asked(number, 20, 8))
        after = engine.add_request(asked(4, 20, 8))
        drain(engine)
        assert_served(after)
