"""SGLang's admission: a share of what running sequences may still produce (`scheduler.conservativeness`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.core import FinishReason, Request, SamplingParams, SequenceStatus, StepOutput
from kvlab.engine.batching import Stop
from kvlab.engine.core import EngineCore
from kvlab.engine.scheduler.new_token_ratio import NewTokenRatio, RatioScheduler
from tests.support.engines import drain
from tests.support.table import TableExecutor, table_engine, table_pool, undisturbed


def asked(number: int, prompt: int, most: int, *, ignore_eos: bool = False, ends: int | None = None) -> Request:
    first = 1000 * number
    sampling = SamplingParams(most, ignore_eos=ignore_eos)
    return Request(f"r{number}", tuple(range(first, first + prompt)), sampling, output_tokens=ends)


def engine_of(blocks: int, *, sharing: bool = False, **settings: Any) -> EngineCore:
    """Blocks of one token, as SGLang's pages."""
    pool = table_pool(blocks, 1, sharing=sharing)
    common: dict[str, Any] = {
        "order": "prefill_alone",
        "reserve_output": True,
        "conservativeness": 1.0,
        "admission_reserve": 0.0,
    }
    return table_engine(pool, TableExecutor(1.0), max_batch_size=8, **common | settings)


def ratio_of(engine: EngineCore) -> NewTokenRatio:
    assert isinstance(engine.scheduler, RatioScheduler)
    return engine.scheduler.ratio


class TestRatio:
    """Figures of SGLang 0.5.23's NewTokenRatioTracker."""

    @pytest.mark.parametrize(
        ("conservativeness", "steps", "share"),
        [(1.0, 0, 0.7), (1.0, 300, 0.399), (1.0, 600, 0.098), (1.0, 900, 0.098), (2.0, 0, 1.0), (0.3, 0, 0.21)],
    )
    def test_falls_from_step_to_step(self, conservativeness: float, steps: int, share: float) -> None:
        ratio = NewTokenRatio(conservativeness)
        ratio.decay(steps)
        assert ratio.current == pytest.approx(share)

    def test_counts_steps_one_by_one_and_at_once(self) -> None:
        one, many = NewTokenRatio(1.0), NewTokenRatio(1.0)
        for _ in range(17):
            one.decay(1)
        many.decay(17)
        assert one.current == pytest.approx(many.current)

    def test_begins_anew_when_nothing_is_left(self) -> None:
        engine = engine_of(60)
        engine.add_request(asked(0, 4, 20))
        drain(engine)
        assert ratio_of(engine).current == pytest.approx(0.7 - 19 * (0.7 - 0.098) / 600)
        engine.add_request(asked(1, 4, 1))
        assert ratio_of(engine).current == 0.7
        drain(engine)


class TestAdmission:
    """A sequence of 4 tokens runs, which may produce 19 more; 100 x 0.19 of them, 0.7 of that, are kept."""

    @pytest.mark.parametrize(
        ("ignore_eos", "ends", "blocks"),
        [
            (False, None, 4 + 13 + 4 + 10 + 2),  # int(19 x 0.7)
            (True, None, 4 + 19 + 4 + 10 + 2),  # all of it
            (True, 15, 4 + 13 + 4 + 10 + 2),  # its length is what a trace recorded, and nobody knows it
        ],
    )
    def test_counts_a_share_of_those_that_run_and_all_of_the_candidate(
        self, ignore_eos: bool, ends: int | None, blocks: int
    ) -> None:
        for size, enters in ((blocks, True), (blocks - 1, False)):
            engine = engine_of(size, sharing=True)
            engine.add_request(asked(0, 4, 20, ignore_eos=ignore_eos, ends=ends))
            engine.step()
            second = engine.add_request(asked(1, 4, 10))
            engine.step()
            assert (second.status is SequenceStatus.RUNNING) is enters
            drain(engine)

    def test_counts_those_of_the_same_step_in_full(self) -> None:
        blocks = (4 + 20 + 1) + (4 + 10 + 1) + 1  # each with a page of its own, and one that stays free
        for size, running in ((blocks, 2), (blocks - 1, 1)):
            engine = engine_of(size)
            for request in (asked(0, 4, 20), asked(1, 4, 10)):
                engine.add_request(request)
            record = engine.step()
            assert record is not None
            assert record.running == running
            drain(engine)

    def test_a_prompt_that_the_step_goes_on_with_has_a_page_of_its_own(self) -> None:
        blocks = (12 + 20 + 1) + (4 + 10 + 1) + 1
        for size, enters in ((blocks, True), (blocks - 1, False)):
            engine = engine_of(size, max_batched_tokens=8)
            engine.add_request(asked(0, 12, 20))
            engine.step()
            second = engine.add_request(asked(1, 4, 10))
            engine.step()
            assert (second.scheduled_s is not None) is enters
            drain(engine)

    @pytest.mark.parametrize(("conservativeness", "cached"), [(1.0, 0), (None, 8)])
    def test_prompts_of_one_step_do_not_share(self, conservativeness: float | None, cached: int) -> None:
        pool = table_pool(60, 1, sharing=True)
        engine = table_engine(pool, reserve_output=True, conservativeness=conservativeness)
        engine.add_request(asked(0, 8, 4))
        other = engine.add_request(Request("other", (*range(8), 99), SamplingParams(4)))
        engine.step()
        assert other.cached_tokens == cached
        later = engine.add_request(Request("later", (*range(8), 98), SamplingParams(4)))
        engine.step()
        assert later.cached_tokens == 8
        drain(engine)

    def test_looks_4096_tokens_ahead(self) -> None:
        engine = table_engine(
            table_pool(5000, 1, max_seq_len=50_000),
            order="prefill_alone",
            reserve_output=True,
            conservativeness=1.0,
            admission_reserve=0.0,
        )
        with pytest.raises(Exception, match="can never fit"):
            engine.add_request(asked(0, 4, 6000))
        first = engine.add_request(asked(0, 4, 6000, ends=3))  # as servers do, it is asked for what fits
        assert first.max_total_tokens == 5000
        engine.step()
        second = engine.add_request(asked(1, 4, 1800))
        engine.step()  # 0.7 x 4096 are kept, where 0.7 x 4995 would leave 1,500
        assert second.status is SequenceStatus.RUNNING
        drain(engine)

    def test_tries_none_again_until_one_has_left(self) -> None:
        engine = engine_of(40)
        first = engine.add_request(asked(0, 4, 20, ends=12))
        engine.step()
        other = engine.add_request(asked(1, 4, 30))
        tried: list[int] = []
        allocate = engine.pool.allocate_slot

        def noted(*arguments: Any, **settings: Any) -> int:
            tried.append(first.num_output_tokens)
            return allocate(*arguments, **settings)

        engine.pool.allocate_slot = noted  # type: ignore[method-assign]
        for _ in range(3):
            engine.step()
            assert engine._batch.stop is Stop.BLOCKS
        drain(engine)
        assert tried == [1, 12]  # at once, and when the first had ended
        assert [first.finish_reason, other.finish_reason] == [FinishReason.STOP, FinishReason.LENGTH]

    def test_tries_again_when_one_of_two_has_left(self) -> None:
        engine = engine_of(60)
        first = engine.add_request(asked(0, 4, 20, ends=3))
        engine.add_request(asked(1, 4, 20))
        engine.step()
        other = engine.add_request(asked(2, 16, 12))
        while first.finish_reason is None:
            engine.step()
            assert other.slot is None
        engine.step()
        assert other in engine.scheduler.running
        drain(engine)

    def test_tries_again_when_memory_that_another_reads_is_given_back(self) -> None:
        engine = engine_of(60)
        engine.keep("r0")
        engine.add_request(asked(0, 20, 1))
        engine.add_request(asked(1, 4, 20))
        engine.step()
        second = engine.add_request(asked(2, 14, 10))
        for _ in range(3):
            engine.step()
        assert second.slot is None
        engine.release("r0")
        engine.step()
        assert second in engine.scheduler.running
        drain(engine)

    def test_does_not_know_the_token_of_a_step_that_runs(self) -> None:
        """19 more may come of a sequence that has one token: 20 where steps are decided ahead."""
        for ahead, blocks in ((False, 4 + 13 + 4 + 10 + 2), (True, 4 + 14 + 4 + 10 + 2)):
            for size, enters in ((blocks, True), (blocks - 1, False)):
                engine = engine_of(size, ahead=ahead)
                engine.add_request(asked(0, 4, 20))
                engine.step()
                second = engine.add_request(asked(1, 4, 10))
                engine.step()
                assert (second.status is SequenceStatus.RUNNING) is enters
                drain(engine)


def waiting_behind(late_before: int | None, *, ahead: bool = True) -> tuple[int, list[str]]:
    """How many steps it takes until the second of two is preempted, and who waits then: a third came before, and a
    fourth as a step begins.
    """
    engine = engine_of(84, conservativeness=0.1, ahead=ahead)
    engine.add_request(asked(0, 4, 60, ends=39))
    engine.step()
    second = engine.add_request(asked(1, 8, 60, ends=40))
    for _ in range(3):
        engine.step()
    engine.add_request(asked(2, 4, 60))
    steps = 0
    while not second.preemptions:
        if steps == late_before:
            engine.add_request(replace(asked(3, 4, 60), arrival_s=engine.clock.now()))
        assert engine.step() is not None
        steps += 1
    waiting = [each.request.request_id for each in engine.scheduler.waiting]
    drain(engine)
    return steps, waiting


class TestPreemption:
    def test_what_is_not_known_yet_when_a_step_is_decided_comes_behind(self) -> None:
        last = waiting_behind(None)[0] - 1
        assert waiting_behind(last)[1] == ["r2", "r1", "r3"]
        assert waiting_behind(last - 2)[1] == ["r2", "r3", "r1"]
        last = waiting_behind(None, ahead=False)[0] - 1
        assert waiting_behind(last, ahead=False)[1] == ["r2", "r3", "r1"]

    def test_the_one_with_least_output_goes_to_the_end_of_the_queue(self) -> None:
        """Two that ask for more than they are expected to produce, and a third behind them."""
        engine = engine_of(84, conservativeness=0.1)
        first = engine.add_request(asked(0, 4, 60, ends=39))
        engine.step()
        second = engine.add_request(asked(1, 8, 60, ends=40))
        for _ in range(3):
            engine.step()
        third = engine.add_request(asked(2, 4, 60))
        before = 0.07
        while not second.preemptions:
            before = ratio_of(engine).current
            assert engine.step() is not None
        assert before < 0.07
        produced, most = first.num_output_tokens, first.request.sampling.max_tokens
        assert ratio_of(engine).current == pytest.approx((produced - 1 + 20) / (most + 1))
        assert list(engine.scheduler.waiting) == [third, second]
        drain(engine)
        for sequence in (first, second, third):
            request = sequence.request
            assert sequence.output_token_ids == undisturbed(request)[: request.expected_tokens]

    @pytest.mark.parametrize(("ahead", "is_read"), [(True, False), (True, True), (False, False)])
    def test_the_token_of_the_step_that_runs_is_dropped_unless_somebody_has_it(
        self, ahead: bool, is_read: bool
    ) -> None:
        engine = engine_of(84, conservativeness=0.1, ahead=ahead)
        outputs: list[StepOutput] = []
        first = engine.add_request(asked(0, 4, 60, ends=39), outputs.append if is_read else None)
        engine.step()
        second = engine.add_request(asked(1, 8, 60, ends=40))
        steps, before = [], 0
        while not second.preemptions:
            before = second.num_output_tokens
            steps.append(engine.step())
        dropped = ahead and not is_read
        assert second.num_output_tokens == len(second.token_times_s) == before - dropped
        assert engine.stats().output_tokens == first.num_output_tokens + second.num_output_tokens
        steps += drain(engine)
        for sequence in (first, second):
            request = sequence.request
            assert sequence.output_token_ids == undisturbed(request)[: request.expected_tokens]
            assert len(sequence.token_times_s) == request.expected_tokens
        assert second.recomputed_tokens == 8 + before - 1
        assert [each.token_id for each in outputs] == (first.output_token_ids if is_read else [])
        assert engine.stats().output_tokens == 39 + 40
        assert 1 + sum(step.output_tokens for step in steps if step is not None) == 39 + 40
        assert sum(step.vain_tokens for step in steps if step is not None) >= dropped

    @pytest.mark.parametrize(("most", "preemptions"), [(27, 0), (60, 1)])
    def test_nobody_is_preempted_while_one_gets_the_last_token_that_it_asked_for(
        self, most: int, preemptions: int
    ) -> None:
        """Its memory is enough for the others. That of one which a stop token ends is not known to come back."""
        engine = engine_of(91, conservativeness=0.02, ahead=True)
        sequences = []
        for request in (asked(0, 4, 60, ends=32), asked(1, 4, most, ends=27), asked(2, 4, 60, ends=31)):
            sequences.append(engine.add_request(request))
            engine.step()
        while sequences[1].finish_reason is None:
            engine.step()
        before = ratio_of(engine).current
        engine.step()
        assert [sequence.preemptions for sequence in sequences] == [0, 0, preemptions]
        if preemptions:  # the second counts among those that go on, both with 26 tokens that are known
            assert ratio_of(engine).current == pytest.approx((26 + 26 + 2 * 20) / (60 + 60 + 1))
        else:
            assert ratio_of(engine).current < before
        drain(engine)
        assert [sequence.num_output_tokens for sequence in sequences] == [32, 27, 31]
