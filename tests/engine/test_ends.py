"""SGLang's admission without a prefix cache, of requests that ignore stop tokens (`add_one_req_ignore_eos`)."""

from __future__ import annotations

import pytest

from kvlab.core import Request, SamplingParams, SequenceStatus
from kvlab.engine.scheduler.ends import End, Ends
from tests.engine.test_new_token_ratio import asked, engine_of
from tests.support.engines import drain


class TestEnds:
    @pytest.mark.parametrize(
        ("ends", "tokens"),
        [
            ([End(3, 10)], 4),
            ([End(3, 10), End(8, 20)], 8),  # (3 + 1) x 2, and then (8 + 1) - 10
            ([End(8, 20), End(3, 1)], 8),
            ([End(3, 1), End(9, 20)], 9),  # (9 + 1) - 1
            ([End(3, 1), End(0, 50), End(9, 20)], 9),  # has ended
            ([End(2.5, 0)], 3.5),
        ],
    )
    def test_memory_is_given_back_at_each_end(self, ends: list[End], tokens: float) -> None:
        assert Ends(ends).most_tokens() == tokens

    @pytest.mark.parametrize(
        ("added", "tokens"),
        [
            (End(1, 6), 6),  # 2 x 3, and then 4 x 2 - 6
            (End(5, 6), 12),  # 4 x 3 and 6 x 2
            (End(20, 6), 42),  # 21 x 2: it goes before the last, which ends before it
            (End(0, 6), 9),
        ],
    )
    def test_one_more(self, added: End, tokens: float) -> None:
        ends = Ends([End(8, 20), End(3, 0)])
        ends.add(added)
        assert ends.most_tokens() == tokens


class TestAdmission:
    """A sequence of 4 tokens runs, which may produce 19 more."""

    @pytest.mark.parametrize(
        ("sharing", "ignore_eos", "ends", "blocks"),
        [
            (False, True, None, 4 + 4 + 2 + (10 + 1) * 2),  # until the candidate ends, and one that stays
            (True, True, None, 4 + 19 + 4 + 10 + 2),
            (False, False, None, 4 + 19 + 4 + 10 + 2),
            (False, True, 8, 4 + 19 + 4 + 10 + 2),  # a recorded length is known to nobody
        ],
    )
    def test_counts_until_each_ends(self, sharing: bool, ignore_eos: bool, ends: int | None, blocks: int) -> None:
        for size, enters in ((blocks, True), (blocks - 1, False)):
            engine = engine_of(size, sharing=sharing)
            engine.add_request(asked(0, 4, 20, ignore_eos=True))
            engine.step()
            second = engine.add_request(asked(1, 4, 10, ignore_eos=ignore_eos, ends=ends))
            engine.step()
            assert (second.status is SequenceStatus.RUNNING) is enters
            drain(engine)

    def test_those_of_the_same_step_have_a_page_of_their_own(self) -> None:
        blocks = 4 + 4 + 2 + (10 + 1) * 2 + 1
        for size, running in ((blocks, 2), (blocks - 1, 1)):
            engine = engine_of(size)
            for request in (asked(0, 4, 20, ignore_eos=True), asked(1, 4, 10, ignore_eos=True)):
                engine.add_request(request)
            record = engine.step()
            assert record is not None
            assert record.running == running
            drain(engine)

    def test_all_that_run_fit_with_the_prompt_of_the_candidate(self) -> None:
        blocks = (30 + 2) + (2 + 19) + 28 + 1  # though 30 come back before the second needs its 19
        for size, enters in ((blocks, True), (blocks - 1, False)):
            engine = engine_of(size)
            for request in (asked(0, 30, 3, ignore_eos=True), asked(1, 2, 20, ignore_eos=True)):
                engine.add_request(request)
            engine.step()
            long = Request("long", tuple(range(28)), SamplingParams(2, ignore_eos=True))
            third = engine.add_request(long)
            engine.step()
            assert (third.status is SequenceStatus.RUNNING) is enters, size
            drain(engine)

    @pytest.mark.parametrize(("blocks", "enters"), [((4 + 30 + 1) + (4 + 20 + 1), False), (61, True)])
    def test_admits_nobody_else_once_all_may_produce_what_is_left(self, blocks: int, enters: bool) -> None:
        engine = engine_of(blocks)
        engine.add_request(asked(0, 4, 30, ignore_eos=True))
        second = engine.add_request(asked(1, 4, 20, ignore_eos=True))
        engine.step()
        third = engine.add_request(asked(2, 1, 1, ignore_eos=True))
        engine.step()
        assert (third.scheduled_s is not None) is enters
        while second.finish_reason is None:
            engine.step()
            assert (third.scheduled_s is not None) is enters
        engine.step()
        assert third.scheduled_s is not None
        drain(engine)

    def test_a_prompt_of_which_a_step_takes_a_part_does_not_count_for_that(self) -> None:
        engine = engine_of(60, max_batched_tokens=8)
        engine.add_request(asked(0, 4, 30, ignore_eos=True))
        second = engine.add_request(asked(1, 8, 20, ignore_eos=True))
        engine.step()
        assert second.num_prefilled == 4
        assert not engine.scheduler.lacks_memory
        drain(engine)
