"""Where a run lives and what it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where a run lives: its output directory, the folder of the default store, its name, its sweep."""

    directory: Path
    root: Path
    config_yaml: str
    choices: Mapping[str, str]
    console: Console
    name: str
    in_sweep: bool = False
    parent_run_id: str | None = None
    heading: str | None = None  # of a run in a sweep: which of how many it is; None: its name
