"""Executors that record what they are given, take a second a pass, or fail."""

from __future__ import annotations

from dataclasses import replace

from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from kvlab.models.decoder import Decoder
from tests.support.model import tiny_decoder

Pass = list[tuple[str, int]]  # who took part in a forward pass, with how many tokens


def took_part(step: StepInput) -> Pass:
    names = [sequence.request_id for sequence in step.sequences]
    return list(zip(names, step.num_tokens.tolist(), strict=True))


class RecordingExecutor(TorchExecutor):
    """Runs a decoder, by default the tiny one, and records each pass; one takes `step_s` of a LogicalClock."""

    def __init__(self, decoder: Decoder | None = None, step_s: float | None = None) -> None:
        super().__init__(decoder or tiny_decoder(), Sampler())
        self._step_s = step_s
        self.passes: list[Pass] = []
        self.sampled: list[int] = []  # tokens that each pass returned

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        self.passes.append(took_part(step))
        result = super().execute(step, view)
        self.sampled.append(len(result.token_ids))
        return result if self._step_s is None else replace(result, elapsed_s=self._step_s)

    @property
    def steps(self) -> list[dict[str, int]]:
        """Of each pass, the tokens of each request."""
        return [dict(each) for each in self.passes]

    def first_step_of(self, request_id: str) -> int:
        return next(index for index, step in enumerate(self.steps) if request_id in step)


class FailingExecutor(RecordingExecutor):
    """Fails in each step that `victim` takes part in, once the model has written its K and V."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.victim: str | None = victim
        self.view: CacheView | None = None  # that of the last step

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        self.view = view
        result = super().execute(step, view)
        if self.victim in self.steps[-1]:
            raise ArithmeticError("the device fell over")
        return result
