"""Holds a run that is played back against its recording, step by step, and block event by block event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.core import StepRecord
from kvlab.engine.clock import Clock, LogicalClock
from kvlab.engine.plan import EnginePlan
from kvlab.errors import PlaybackError, shown
from kvlab.lab.results.columns import request_row, step_row
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.records import read_run
from kvlab.lab.settings import flatten
from kvlab.simulation.recording import Recording

_MEASURED = ("end_s", "schedule_ms", "execute_ms")  # of a step: what the host took is in no playback
_MOST_SHOWN = 4
_ELSEWHERE = ("executor", "hardware", "framework", "tracking", "tags", "debug", "attention", "slo")
_OWN = ("run_name", "repeat", "repeats", "resume", "figures", "verbose", "dry_run", "optimize", "plugins")


def _short(value: object) -> str:
    return shown(value, most=40)


class Playback:
    """Compares what an engine decides with what the recording has, and moves the `clock` on.

    `settings` are those of this run, by dotted key: an error names those that differ.
    """

    def __init__(self, recording: Recording, clock: LogicalClock, settings: Mapping[str, Any]) -> None:
        self._recording, self._clock, self._settings = recording, clock, settings
        self._steps = 0

    @classmethod
    def of(cls, plan: EnginePlan, clock: Clock) -> Playback | None:
        """That of a plan's engine on its clock; None for a run that is not played back."""
        if plan.recording is None or not isinstance(clock, LogicalClock):
            return None
        return cls(plan.recording, clock, flatten(asdict(plan.config)))

    def after(self, record: StepRecord) -> None:
        """Raise PlaybackError, naming the step, unless it is that of the recording; then let it be the time at
        which the next one started.
        """
        steps, number = self._recording.steps, self._steps
        if number == len(steps):
            raise self._error(f"step {number}: the recording ended after {number} steps")
        self._compare(f"step {number}", steps[number], step_row(record), _MEASURED)
        self._steps += 1
        if self._steps < len(steps):
            self._clock.wait_until(steps[self._steps]["start_s"])

    def finish(self, log: RunLog) -> str:
        """Compare the requests and, where both were journaled, the block events. Returns what was found identical.
        Raises PlaybackError.
        """
        for step in log.steps[self._steps :]:
            self.after(step)
        if self._steps < len(self._recording.steps):
            raise self._error(f"step {self._steps}: the recording goes on, to {len(self._recording.steps)} steps")
        kept, served = read_run(Path(self._recording.source)), {record.key: record for record in log.records}
        for request in kept.requests():
            if request.key not in served:
                raise self._error(f"request {request.name}: is not there")
            self._compare(f"request {request.name}", request_row(request), request_row(served[request.key]))
        said = f"{self._steps:,} steps, {len(log.records):,} requests"
        events = kept.blocks()
        if events is not None and log.blocks is not None:
            for name in ("step", "event", "block", "sequence"):
                ours, theirs = getattr(log.blocks, name), getattr(events, name)
                if not np.array_equal(ours, theirs):
                    raise self._error(f"block events: another {name}")
            said += f", {len(events.step):,} block events"
        return f"played back {said}: every decision is that of the recording"

    def _compare(
        self, what: str, wanted: Mapping[str, Any], own: Mapping[str, Any], measured: Sequence[str] = ()
    ) -> None:
        """Raise PlaybackError unless both rows have the same in all columns that the recording has."""
        names = [name for name in wanted if name in own and name not in measured and own[name] != wanted[name]]
        if names:
            texts = (f"{name} {_short(own[name])} instead of {_short(wanted[name])}" for name in names)
            raise self._error(f"{what}: {', '.join(islice(texts, _MOST_SHOWN))}")

    def _error(self, what: str) -> PlaybackError:
        """With the settings that differ from the recording's."""
        recorded = read_run(Path(self._recording.source)).config
        names = [
            name
            for name, value in self._settings.items()
            if name in recorded and value != recorded[name] and name.split(".")[0] not in (*_ELSEWHERE, *_OWN)
        ]
        reason = ", ".join(
            f"{name}={self._settings[name]} instead of {recorded[name]}" for name in names[:_MOST_SHOWN]
        )
        reason = f"settings differ: {reason}" if names else "the settings are the same, so that a version differs"
        return PlaybackError(f"{what}; {reason} (recording: {self._recording.source})")
