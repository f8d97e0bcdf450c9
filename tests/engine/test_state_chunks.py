"""Chunks of prompts where layers have states (vLLM's `_mamba_block_aligned_split`), blocks of four tokens."""

from __future__ import annotations

import pytest

from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.scheduler import StateKeeping, build_scheduler
from kvlab.engine.scheduler.state_chunks import StateScheduler


def scheduler_of(budget: int = 64, *, within: bool = False, common: int = 0) -> StateScheduler:
    config = SchedulerConfig(max_batched_tokens=budget, max_batch_size=2)
    scheduler = build_scheduler(config, keeping=StateKeeping(4, within_steps=within))
    assert isinstance(scheduler, StateScheduler)
    scheduler.common_tokens = lambda sequence: common
    return scheduler


def chunks(scheduler: StateScheduler, prompt: int, *, found: int = 0, budgets: tuple[int, ...] = ()) -> list[int]:
    """What steps with these budgets left, and then with all of it, take of a prompt."""
    request = Request("a", tuple(range(prompt)), SamplingParams(2, ignore_eos=True))
    sequence = Sequence(request, 0, [])
    scheduler.add(sequence)
    scheduler.begin_step(0.0, lambda waiting: found)
    left, taken, most = list(budgets), list[int](), scheduler.config.max_batched_tokens
    if not scheduler.fits_step(sequence, left[0] if left else most):
        return []
    scheduler.admit(sequence)
    sequence.num_prefilled = found
    while sequence.num_uncomputed:
        taken.append(scheduler.chunk(sequence, left.pop(0) if left else most).num_tokens)
        sequence.num_prefilled += taken[-1]
        scheduler.begin_step(0.0)
    return taken


@pytest.mark.parametrize(
    ("prompt", "found", "budgets", "within", "expected"),
    [
        (3, 0, (), False, [3]),
        (4, 0, (), False, [4]),
        (10, 0, (), False, [8, 2]),  # to the last whole block before the last token, then the rest
        (12, 0, (), False, [8, 4]),
        (10, 0, (), True, [10]),  # kernels keep that state in the middle of the step
        (12, 0, (), True, [12]),
        (7, 0, (), True, [7]),
        (10, 8, (), True, [2]),
        (
            11,
            0,
            (6,),
            True,
            [4, 7],
        ),  # a step that does not end the prompt ends with a block
        (23, 0, (10, 3, 9), False, [8, 0, 8, 4, 3]),  # of three tokens none is taken
        (10, 4, (), False, [4, 2]),
    ],
)
def test_end_where_a_state_is_kept(
    prompt: int, found: int, budgets: tuple[int, ...], within: bool, expected: list[int]
) -> None:
    assert chunks(scheduler_of(within=within), prompt, found=found, budgets=budgets) == expected


def test_are_not_begun_with_less_than_a_block() -> None:
    assert chunks(scheduler_of(), 10, budgets=(3,)) == []
    assert chunks(scheduler_of(), 3, budgets=(3,)) == [3]


def test_of_steps_shorter_than_a_block_end_anywhere_and_then_with_the_block() -> None:
    assert chunks(scheduler_of(3), 10) == [3, 1, 3, 1, 2]


@pytest.mark.parametrize(("common", "expected"), [(8, [8, 12, 2]), (4, [4, 16, 2]), (0, [20, 2])])
def test_end_where_others_went_on_differently(common: int, expected: list[int]) -> None:
    assert chunks(scheduler_of(common=common), 22) == expected


def test_of_what_is_found_of_others_are_no_forks() -> None:
    assert chunks(scheduler_of(common=8), 22, found=8) == [12, 2]


def test_other_schedulers_cut_nothing() -> None:
    config = SchedulerConfig(policy="static", max_batched_tokens=64)
    assert not isinstance(build_scheduler(config, keeping=StateKeeping(4)), StateScheduler)
    alone = build_scheduler(SchedulerConfig(), shares_prefixes=False, keeping=StateKeeping(4))
    assert not isinstance(alone, StateScheduler)
