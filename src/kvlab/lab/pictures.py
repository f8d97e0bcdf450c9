"""A run's pictures, drawn behind its time. A picture that cannot be drawn costs a warning, never a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def draw_run(directory: Path, console: Console, *, hover: bool) -> None:
    """Draw the run whose files are in `directory` into `directory/figures`; with `hover` its HTML page too."""
    try:
        # Imported this late: it takes half a second, and nobody else needs it.
        from kvlab.lab.figures import save_run_figures
        from kvlab.lab.records import read_run

        save_run_figures(read_run(directory), hover=hover)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        console.print(
            f"[yellow]warning:[/] the run's figures could not be drawn, its results are complete: {reason}",
            highlight=False,
            soft_wrap=True,
        )
