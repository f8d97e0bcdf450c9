"""Continuous batching: sequences are admitted and leave in every step (Orca, OSDI 2022)."""

from __future__ import annotations

from kvlab.engine.scheduler.base import POLICIES, Scheduler


@POLICIES.register("continuous")
class ContinuousScheduler(Scheduler):
    """The sequence that the order puts first is admitted as soon as there is room."""

    def may_admit(self, now: float) -> bool:
        """Always."""
        return True

    def next_wakeup(self) -> float | None:
        """Never: a waiting sequence that may be admitted has been."""
        return None
