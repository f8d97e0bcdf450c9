"""A recorded run in the place of a device: its tokens, when they were there."""

from __future__ import annotations

from kvlab.engine.clock import LogicalClock
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import RecordError
from kvlab.kv.view import CacheView
from kvlab.simulation.recording import Recording


class ReplayClock(LogicalClock):
    """Starts when the first step of the recording did."""

    def __init__(self, recording: Recording) -> None:
        self._first_s: float = recording.steps[0]["start_s"]
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self._now = self._first_s


class ReplayedExecutor(Executor):
    """Answers each pass with the recorded tokens, and lets the clock be where it was when they were there; after a
    pass without any, where it was at the end of the step.

    A token that was never recorded fails the pass: the engine has decided otherwise, which shows in the step.
    """

    def __init__(self, recording: Recording, clock: LogicalClock) -> None:
        self._recording, self._clock = recording, clock

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        recording, tokens = self._recording, list[int]()
        when = recording.ends_s.get(self._clock.now(), 0.0)
        for row in step.sampled.tolist():
            spec, position = step.sequences[row], int(step.num_outputs[row])
            outputs = recording.outputs.get((spec.request_id, spec.index))
            if outputs is None or position >= len(outputs.token_ids):
                raise RecordError(f"{recording.source} has no token {position} of request {spec.request_id!r}")
            tokens.append(outputs.token_ids[position])
            when = outputs.times_s[position]
        self._clock.wait_until(when)
        return StepResult(tokens)
