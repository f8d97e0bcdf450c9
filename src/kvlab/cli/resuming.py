"""Runs of before: what the store knows of them, and what resume=true need not do again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvlab.cli.points import Composed
from kvlab.config import RunConfig, TrackingConfig
from kvlab.errors import ConfigError, TrackingError

if TYPE_CHECKING:
    from kvlab.lab.sweep.earlier import Earlier
    from kvlab.lab.tracking.search import TrackedRun


def earlier_runs(tracking: TrackingConfig, *, resume: bool) -> tuple[Earlier | None, str | None]:
    """The runs that the store has, or None and, where it cannot be asked, why not.

    Raises ConfigError or TrackingError where `resume` depends on them.
    """
    from kvlab.lab.sweep.earlier import look_up

    if tracking.backend == "off":
        if resume:
            raise ConfigError(
                "resume", "true", "with tracking=off nothing is known of earlier runs; track them, or leave it out"
            )
        return None, None
    try:
        return look_up(tracking), None
    except TrackingError as error:
        if resume:
            raise
        return None, str(error)


def done_before(
    earlier: Earlier, parent: TrackedRun | None, points: list[Composed], console: Any
) -> list[TrackedRun | None]:
    """Each point's finished run, if any; what the earlier sweep left open is closed. Raises a KvlabError."""
    if parent is not None:
        closed = earlier.close_abandoned(parent)
        if closed:
            console.print(f"{closed} unfinished run(s) of the earlier sweep marked as interrupted", highlight=False)
    for warning in earlier.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return earlier.finished([point.digest for point in points], parent)


def was_done(config: RunConfig) -> bool:
    """Whether a single run has finished before; if so, its figures are shown. Raises a KvlabError."""
    from rich.console import Console

    from kvlab.lab.sweep.digest import config_digest
    from kvlab.lab.tables import summary_table

    earlier, _ = earlier_runs(config.tracking, resume=True)
    run = earlier.finished([config_digest(config)], None)[0] if earlier else None
    if run is None:
        return False
    console = Console()
    console.print(summary_table(run.name, run.metrics))
    console.print(f"done before: run {run.run_id}", highlight=False)
    return True
