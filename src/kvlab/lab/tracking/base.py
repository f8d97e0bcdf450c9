"""What can be recorded of a run: the contract, and the tracker that records nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

Point = tuple[int, float, float]  # step, seconds since the run started, value


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    OUT_OF_MEMORY = "out_of_memory"


class Tracker:
    """One run's record: the contract, each call of which does nothing here.

    A store that does not take what it is given raises TrackingError, and nothing else.
    """

    run_id: str | None = None  # in the store; None where nothing is recorded

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record final figures, each name once; values that are not finite are left out."""

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        """Record each sequence of points as `series/<name>`; values that are not finite are left out.

        More than SERIES_POINTS points are sampled evenly, first and last included.
        """

    def watch_system(self) -> None:
        """Sample the machine's load until `finish`, where `tracking.system_metrics` asks for it."""

    def log_artifacts(self, directory: Path) -> None:
        """Store what is in a directory with the run, hidden files and folders left out."""

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Close the run: MLflow's own status, ours as tag `kvlab.status`, `error` as tag `kvlab.error`."""

    def where(self) -> str:
        """How to look at the run: the command that opens the store and a URL, on two lines; the URL alone for a
        tracking server.
        """
        return "not tracked (tracking=off)"


class NullTracker(Tracker):
    """Records nothing."""
