"""A sweep's pictures: what its runs show together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import RecordError


def draw_sweep(directories: Sequence[Path], folder: Path) -> str | None:
    """Draw the finished runs in `directories` into `folder` as PNG. Returns why that could not be done, if so: a
    picture that fails costs no result.
    """
    try:
        from kvlab.lab.figures import sweep_figures
        from kvlab.lab.records import read_run

        records = [read_run(directory) for directory in directories if (directory / "summary.json").is_file()]
        for name, figure in sweep_figures([record for record in records if record.finished]).items():
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.png")
    except (RecordError, OSError, ValueError, KeyError, ArithmeticError) as error:
        return f"the sweep's pictures could not be drawn: {error}"
    return None
