"""The answers of a timing that is not kvlab's, which may be anything: a wrong one would be a wrong figure."""

from collections.abc import Callable, Sized
from numbers import Real
from typing import TypeVar

from kvlab.errors import EngineStoppedError, shown
from kvlab.kv.view import CacheView
from kvlab.plugins import reason_of
from kvlab.simulation.timings.base import Counts, StepTiming

T = TypeVar("T")


class CheckedTiming:
    """A plugin's `timing`, as far as an executor asks it. What is no time stops the engine, and so does what it
    raises: run again in parts, as a pass that failed is, it would fail again.
    """

    def __init__(self, timing: StepTiming) -> None:
        self._timing, self.includes_host = timing, timing.includes_host

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        """See StepTiming. Raises EngineStoppedError."""
        return self._seconds("device_s", self._asked(lambda: self._timing.device_s(new_tokens, lengths, sampled)))

    def step_s(self, new_tokens: Counts, view: CacheView, sampled: int) -> float:
        """See StepTiming. Raises EngineStoppedError."""
        return self._seconds("step_s", self._asked(lambda: self._timing.step_s(new_tokens, view, sampled)))

    def run_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> list[float] | None:
        """See StepTiming. Raises EngineStoppedError."""
        answer = self._asked(lambda: self._timing.run_s(new_tokens, lengths, sampled))
        if answer is None:
            return None
        if not isinstance(answer, Sized) or len(answer) != len(lengths):
            raise self._wrong(f"run_s returned {shown(answer, repr)}; must be {len(lengths)} times, one a step")
        return [self._seconds("run_s", seconds) for seconds in answer]

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:
            raise self._wrong(reason_of(error)) from error

    def _seconds(self, method: str, value: object) -> float:
        seconds = float(value) if isinstance(value, Real) else -1.0
        if not 0 <= seconds < float("inf"):
            raise self._wrong(f"{method} returned {shown(value, repr)}; must be seconds, at least 0")
        return seconds

    def _wrong(self, text: str) -> EngineStoppedError:
        return EngineStoppedError(f"executor.timing: {type(self._timing).__name__}: {text}")
