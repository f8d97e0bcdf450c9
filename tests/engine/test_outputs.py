"""Whatever the schedule, a request gets the tokens it would have got alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core import FinishReason
from kvlab.kv.pool import BlockPool
from tests.support.engines import drain, make_engine, request, run, step_until
from tests.support.executors import RecordingExecutor
from tests.support.model import expected_tokens
from tests.support.pools import paged_pool, slotted_pool

ASKED = [request("a", 21, 9), request("b", 3, 14), request("c", 16, 4), request("d", 17, 7), request("e", 1, 12)]


def test_the_requests_of_these_tests_get_different_tokens() -> None:
    """The oracle itself: outputs that did not depend on the prompt would make every comparison below empty."""
    outputs = [expected_tokens(each) for each in ASKED]
    assert len({tuple(output[:4]) for output in outputs}) == len(ASKED)
    assert all(len(set(output)) > 2 for output in outputs)
    first, *others = ASKED[0].prompt_token_ids
    changed = replace(ASKED[0], prompt_token_ids=(first ^ 1, *others))
    assert expected_tokens(changed) != outputs[0]


@pytest.mark.parametrize("make_pool", [paged_pool, slotted_pool])
@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("max_batch_size", [1, 2, 8])
def test_pool_policy_and_batch_change_no_token(
    make_pool: Callable[[], BlockPool], policy: str, max_batch_size: int
) -> None:
    engine = make_engine(make_pool(), policy=policy, max_batch_size=max_batch_size, max_wait_ms=0)
    sequences = run(engine, *ASKED)
    for asked, sequence in zip(ASKED, sequences, strict=True):
        assert sequence.output_token_ids == expected_tokens(asked)
        assert sequence.finish_reason is FinishReason.LENGTH
        assert len(sequence.token_times_s) == asked.sampling.max_tokens


class TestTokenBudget:
    @pytest.mark.parametrize("budget", [5, 6])
    def test_a_budget_of_about_the_batch_size_gives_the_same_tokens_within_it(self, budget: int) -> None:
        executor = RecordingExecutor()
        engine = make_engine(executor=executor, max_batch_size=5, max_batched_tokens=budget)
        sequences = run(engine, *ASKED)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(asked) for asked in ASKED]
        assert max(sum(step.values()) for step in executor.steps) <= budget

    def test_a_budget_of_one_token(self) -> None:
        engine = make_engine(max_batch_size=1, max_batched_tokens=1)
        sequences = run(engine, *ASKED)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(asked) for asked in ASKED]

    def test_a_prompt_is_cut_into_chunks_of_the_budget(self) -> None:
        executor = RecordingExecutor()
        run(make_engine(executor=executor, max_batched_tokens=8), request("a", 21, 2))
        assert [step["a"] for step in executor.steps] == [8, 8, 5, 1]
        assert executor.sampled == [0, 0, 1, 1]

    def test_decode_goes_before_prefill(self) -> None:
        executor = RecordingExecutor()
        engine = make_engine(executor=executor, max_batched_tokens=8)
        engine.add_request(request("decodes", 4, 10))
        engine.step()
        engine.add_request(request("first", 10, 2))
        engine.add_request(request("second", 10, 2))
        records = drain(engine)
        assert executor.steps[1:4] == [
            {"decodes": 1, "first": 7},
            {"decodes": 1, "first": 3, "second": 4},
            {"decodes": 1, "first": 1, "second": 6},
        ]
        assert [(record.decode_tokens, record.prefill_tokens) for record in records[:3]] == [(1, 7), (1, 7), (2, 6)]
        assert all(next(iter(step)) == "decodes" for step in executor.steps[:10])


class TestPreemption:
    """Three sequences that all grow to 50 tokens in a pool of 96."""

    ASKED = tuple(request(name, 20, 30) for name in "abc")

    def test_takes_the_last_admitted_and_never_the_first(self) -> None:
        engine = make_engine(admission_reserve=0)
        sequences = [engine.add_request(each) for each in self.ASKED]
        step_until(engine, lambda: any(sequence.preemptions for sequence in sequences))
        assert [sequence.preemptions for sequence in sequences] == [0, 0, 1]
        drain(engine)
        assert sequences[0].preemptions == 0

    def test_with_chunks_smaller_than_what_is_recomputed(self) -> None:
        engine = make_engine(admission_reserve=0, max_batched_tokens=8)
        sequences = run(engine, *self.ASKED)
        assert any(sequence.preemptions for sequence in sequences)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in self.ASKED]

    def test_never_under_static_batching(self) -> None:
        """Each member of the batch has its whole memory from the start."""
        engine = make_engine(policy="static", max_batch_size=3, max_wait_ms=0, admission_reserve=0)
        sequences = run(engine, *self.ASKED)
        assert not any(sequence.preemptions for sequence in sequences)
        assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in self.ASKED]


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=7),
    num_blocks=st.integers(9, 24),
    max_batch_size=st.integers(1, 6),
    extra_tokens=st.integers(0, 30),
    reserve=st.sampled_from([0.0, 0.2, 0.9]),
    policy=st.sampled_from(["continuous", "static"]),
    gaps=st.lists(st.integers(0, 9), min_size=7, max_size=7),
)
def test_any_load_completes_with_its_tokens_and_leaves_no_block(
    shapes: list[tuple[int, int]],
    num_blocks: int,
    max_batch_size: int,
    extra_tokens: int,
    reserve: float,
    policy: str,
    gaps: list[int],
) -> None:
    engine = make_engine(
        paged_pool(num_blocks),
        policy=policy,
        max_wait_ms=0,
        max_batch_size=max_batch_size,
        max_batched_tokens=max_batch_size + extra_tokens,
        admission_reserve=reserve,
    )
    asked = [request(f"r{index}", *shape) for index, shape in enumerate(shapes)]
    sequences = []
    for each, steps_before in zip(asked, gaps, strict=False):
        for _ in range(steps_before):
            engine.step()
            assert engine.pool.audit() == []
        sequences.append(engine.add_request(each))
    drain(engine)
    assert [s.output_token_ids for s in sequences] == [expected_tokens(each) for each in asked]
