"""Sharing saves memory and work, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest

from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.engine.step import StepInput
from kvlab.kv.view import CacheView
from tests.support.engines import drain, make_engine, request, run
from tests.support.executors import FailingExecutor, RecordingExecutor
from tests.support.model import expected_tokens, prompt_for
from tests.support.pools import paged_pool, sharing_pool
from tests.support.records import counted, memory


def family(size: int, *, common: int = 17, own: int = 5, max_tokens: int = 10) -> list[Request]:
    """Requests whose prompts begin with the same tokens."""
    system = prompt_for("system", common)
    return [
        Request(f"r{index}", (*system, *prompt_for(f"own {index}", own)), SamplingParams(max_tokens))
        for index in range(size)
    ]


@pytest.mark.parametrize("budget", [10, 64, 512])
@pytest.mark.parametrize("num_blocks", [24, 12])
def test_sharing_on_or_off_or_preempted_gives_the_same_tokens(num_blocks: int, budget: int) -> None:
    asked = family(6)
    preempted, hits = 0, list[int]()
    for pool in (paged_pool(num_blocks, parts=True), sharing_pool(num_blocks), paged_pool(num_blocks)):
        engine = make_engine(pool, max_batched_tokens=budget, admission_reserve=0)
        sequences = run(engine, *asked)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in asked]
        preempted += sum(s.preemptions for s in sequences)
        hits.append(pool.counters().hit_tokens)
    assert hits[0] >= hits[1] > hits[2] == 0
    assert preempted or num_blocks > 12


@pytest.mark.parametrize(("parts", "found"), [(True, [0, 18, 31, 24]), (False, [0, 16, 28, 24])])
def test_parts_of_blocks_are_found_and_change_no_token(parts: bool, found: list[int]) -> None:
    """One after the other, so that the last block of each is let go: of another's prompt and of a next turn."""
    engine = make_engine(paged_pool(sharing=True, parts=parts))
    system, own = prompt_for("system", 18), prompt_for("own", 8)
    first, other = (
        Request("a", (*system, *own), SamplingParams(6)),
        Request("b", (*system, 1, 2, 3), SamplingParams(6)),
    )
    sequences = run(engine, first) + run(engine, other)
    said = (*first.prompt_token_ids, *sequences[0].output_token_ids)
    sequences += run(engine, Request("c", (*said, 1, 2), SamplingParams(6)))
    sequences += run(engine, Request("d", (*said[:24], 1), SamplingParams(6)))
    assert [s.output_token_ids for s in sequences] == [expected_tokens(s.request) for s in sequences]
    assert [s.cached_tokens for s in sequences] == found


def test_more_run_at_once_in_the_same_memory() -> None:
    peaks = []
    for pool in (sharing_pool(), paged_pool()):
        engine = make_engine(pool, max_batched_tokens=512, admission_reserve=0)
        for each in family(8, common=32, own=3, max_tokens=4):
            engine.add_request(each)
        peaks.append(max(record.running for record in drain(engine)))
    assert peaks == [8, 2]


def test_a_prompt_that_was_served_before_costs_one_token() -> None:
    executor = RecordingExecutor()
    engine = make_engine(sharing_pool(), executor)
    run(engine, request("first", 20, 4, prompt_of="x"))
    (again,) = run(engine, request("again", 20, 4, prompt_of="x"))
    assert [step["again"] for step in executor.steps if "again" in step] == [1, 1, 1, 1]
    assert again.cached_tokens == 19
    assert again.output_token_ids == expected_tokens(again.request)


def test_the_next_in_the_same_step_shares_what_the_first_computes() -> None:
    executor = RecordingExecutor()
    engine = make_engine(sharing_pool(), executor)
    sequences = [engine.add_request(each) for each in family(3, common=16, own=3)]
    records = drain(engine)
    assert executor.steps[0] == {"r0": 19, "r1": 3, "r2": 3}
    done = counted(records[0])
    assert (done.prompt_tokens, done.hit_tokens, done.same_step_hit_tokens) == (57, 32, 32)
    assert memory(records[0]).shared_blocks == 8
    assert [s.output_token_ids for s in sequences] == [expected_tokens(s.request) for s in sequences]


def test_a_salt_keeps_equal_prompts_apart() -> None:
    engine = make_engine(sharing_pool())
    asked = [replace(request(name, 20, 4, prompt_of="x"), salt=salt) for name, salt in (("a", "a"), ("b", "b"))]
    sequences = run(engine, *asked)
    assert engine.pool.counters().hit_tokens == 0
    assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in asked]
    (again,) = run(engine, replace(request("c", 20, 4, prompt_of="x"), salt="a"))
    assert again.cached_tokens == 19


def test_random_prompts_are_no_hits_whatever_is_preempted() -> None:
    engine = make_engine(sharing_pool(), admission_reserve=0, max_batched_tokens=16)
    asked = [request(f"r{index}", 9 + index, 25) for index in range(8)]
    sequences = run(engine, *asked)
    assert sum(s.preemptions for s in sequences)
    assert engine.pool.counters().hit_tokens == 0
    assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in asked]


class TestFailedStep:
    def test_of_the_one_that_others_share_with_leaks_nothing_and_leaves_nothing_to_hit(self) -> None:
        """All of `r0`'s blocks were counted on by the others, who compute them themselves."""
        executor = FailingExecutor("r0")
        engine = make_engine(sharing_pool(), executor, max_batch_size=3, max_batched_tokens=64)
        sequences = [engine.add_request(each) for each in family(3)]
        drain(engine)
        assert [s.finish_reason for s in sequences] == [FinishReason.FAILED, *[FinishReason.LENGTH] * 2]
        assert [s.output_token_ids for s in sequences[1:]] == [expected_tokens(s.request) for s in sequences[1:]]
        counters = engine.pool.counters()
        assert (counters.hit_tokens, counters.same_step_hit_tokens) == (0, 0)  # they were taken back
        (after,) = run(engine, Request("after", sequences[0].request.prompt_token_ids, SamplingParams(6)))
        assert after.cached_tokens == 16  # what the others computed; nothing of r0's own five
        assert after.output_token_ids == expected_tokens(after.request)

    def test_of_all_that_share_leaves_nothing_to_hit(self) -> None:
        class Dead(RecordingExecutor):
            def execute(self, step: StepInput, view: CacheView) -> NoReturn:
                super().execute(step, view)
                raise ArithmeticError("the device fell over")

        engine = make_engine(sharing_pool(), Dead(), max_batch_size=3)
        sequences = [engine.add_request(each) for each in family(3)]
        drain(engine)
        assert {s.finish_reason for s in sequences} == {FinishReason.FAILED}
        assert engine.pool.stats().blocks_cached == 0

    def test_keeps_what_steps_before_it_computed(self) -> None:
        executor = FailingExecutor("r0")
        executor.victim = None
        engine = make_engine(sharing_pool(), executor)
        (bad,) = family(1)
        engine.add_request(bad)
        engine.step()
        executor.victim = "r0"
        drain(engine)
        (after,) = run(engine, Request("after", bad.prompt_token_ids, SamplingParams(6)))
        assert after.cached_tokens == 20
        assert after.output_token_ids == expected_tokens(after.request)


@pytest.mark.parametrize("steps_before", [1, 2, 4])
def test_abort_of_one_that_shares_leaves_the_others_theirs(steps_before: int) -> None:
    engine = make_engine(sharing_pool(), max_batched_tokens=12)
    sequences = [engine.add_request(each) for each in family(4)]
    for _ in range(steps_before):
        engine.step()
    engine.abort("r0")
    drain(engine)
    for sequence in sequences[1:]:
        assert sequence.output_token_ids == expected_tokens(sequence.request)
