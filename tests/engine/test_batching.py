"""What each stage of a step is given of its budget, and what is reserved for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.batching import BatchBuilder, Stop
from kvlab.engine.scheduler.orders import Stage
from kvlab.engine.step_plan import Chunk, DecodeBatch

BUDGET = 12


def running(name: str, slot: int, output: int) -> Sequence:
    sequence = Sequence(Request(name, (1, 2, 3, 4), SamplingParams(9)))
    sequence.token_ids += [7] * output
    sequence.slot = slot
    return sequence


class Stages:
    """A scheduler of two sequences that decode, one of them with two proposed tokens, and one in prefill; `asked`
    says which budget each stage was given.
    """

    lacks_memory = False
    is_late = staticmethod(lambda sequence: False)

    def __init__(self, *stages: Stage) -> None:
        self.asked: list[tuple[str, int]] = []
        self.order = SimpleNamespace(stages=stages, decodes_beside_prefill=True)
        self.config = SchedulerConfig(max_batched_tokens=BUDGET, max_batch_size=4)
        self.waiting = ["one"]
        self._decoding = DecodeBatch([running("a", 0, 1), running("b", 1, 1)])
        self._prefill = [Chunk(running("c", 2, 0), 3)]

    def begin_step(self, now: float, cached_tokens: Any) -> None: ...

    def plan_decode(self, budget: int) -> DecodeBatch:
        self.asked.append(("decode", budget))
        return self._decoding

    def propose(self, decoding: DecodeBatch, budget: int) -> dict[int, list[int]]:
        self.asked.append(("propose", budget))
        return {1: [8, 9]}

    def plan_prefill(self, budget: int) -> list[Chunk]:
        self.asked.append(("prefill", budget))
        return self._prefill

    def num_decoding(self) -> int:
        return 2

    def candidate(self) -> None: ...

    def decoded(self, steps: int) -> None: ...

    def has_room(self) -> bool:
        return True


def build(*stages: Stage) -> tuple[Stages, list[Any], Any]:
    """The scheduler, what was reserved and the batch of a step of these stages."""
    scheduler, reserved = Stages(*stages), list[Any]()
    pool: Any = SimpleNamespace(
        reserve=lambda slots, tokens, proposed: reserved.append(
            (list(slots), list(tokens), proposed if proposed is None else list(proposed))
        )
    )
    own: Any = scheduler
    return scheduler, reserved, BatchBuilder(pool, own, lambda sequence, reason: None).build(0.0)


DECODE, PREFILL = ([0, 1], [1, 3], [0, 2]), ([2], [3], None)


@pytest.mark.parametrize(
    ("stages", "asked", "reserved"),
    [
        (
            (Stage.DECODE, Stage.PREFILL, Stage.ADMIT),
            [("decode", BUDGET), ("propose", BUDGET - 2), ("prefill", BUDGET - 4)],
            [DECODE, PREFILL],
        ),
        (
            (Stage.PREFILL, Stage.ADMIT, Stage.DECODE),
            [("prefill", BUDGET), ("decode", BUDGET - 3), ("propose", BUDGET - 5)],
            [PREFILL, DECODE],
        ),
    ],
)
def test_each_stage_has_what_those_before_it_leave(
    stages: tuple[Stage, ...], asked: list[tuple[str, int]], reserved: list[Any]
) -> None:
    scheduler, found, batch = build(*stages)
    assert (scheduler.asked, found, batch.stop) == (asked, reserved, Stop.POLICY)
    first, second = batch.plans(mixed=False)
    assert [len(plan.slots) for plan in (first, second)] == ([2, 1] if stages[0] is Stage.DECODE else [1, 2])


def test_nothing_is_left_for_an_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BUDGET", 7)
    _, _, batch = build(Stage.DECODE, Stage.PREFILL, Stage.ADMIT)
    assert batch.stop is Stop.TOKENS
