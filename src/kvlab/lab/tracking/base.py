"""What can be recorded of a run: the contract, and the tracker that records nothing."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from kvlab.errors import TrackingError

Point = tuple[int, float, float]  # step, seconds since the run started, value


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    OUT_OF_MEMORY = "out_of_memory"


class Tracker:
    """One run's record; each call does nothing here. A store that fails raises TrackingError, and nothing else."""

    run_id: str | None = None  # in the store; None where nothing is recorded

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record final figures, each name once; values that are not finite are left out."""

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        """Record each sequence of points as `series/<name>`, without values that are not finite; of more than
        SERIES_POINTS as many are kept, evenly spread, first and last included.
        """

    def watch_system(self) -> None:
        """Sample the machine's load until `finish`, where `tracking.system_metrics` asks for it."""

    def log_artifacts(self, directory: Path) -> None:
        """Store what is in a directory with the run, hidden files and folders left out."""

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Close the run: MLflow's own status, ours as tag `kvlab.status`, `error` as tag `kvlab.error`."""

    def where(self) -> str:
        """How to look at the run: a line with the command that opens the store, except for a server, and a URL."""
        return "not tracked (tracking=off)"


def send_all(*calls: Callable[[], None]) -> str | None:
    """Make each of these calls of a store, whatever became of those before. Returns the first failure."""
    problems = []
    for call in calls:
        try:
            call()
        except TrackingError as error:
            problems.append(str(error))
    return problems[0] if problems else None
