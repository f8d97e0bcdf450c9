"""Sweeps for tests: the real command, in this process or in its own, on a model of a few numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvlab.config import TrackingConfig
from kvlab.lab.tracking import open_store
from kvlab.lab.tracking.search import TrackedRun, find_runs

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "model=qwen3_tiny",
    "figures=false",
    "executor.threads=1",
    "workload.num_requests=3",
    "workload.prompt_len={min: 17, max: 20}",
    "workload.output_len={min: 4, max: 6}",
]
MOST_S = 400  # a busy machine's share


@dataclass
class Ended:
    """How a command ended."""

    code: int
    output: str


@dataclass
class SweepLab:
    """Runs commands against a store of its own."""

    base: Path
    capture: Callable[[], Any] | None = None
    uri: str = field(init=False)

    def __post_init__(self) -> None:
        self.uri = f"sqlite:///{self.base / 'store.db'}"

    def arguments(self, *overrides: str, directory: str = "out") -> list[str]:
        """The tiny model's settings and these; results go to `directory`."""
        place = self.base / directory
        where = [f"hydra.run.dir={place}", f"hydra.sweep.dir={place}", f"tracking.uri={self.uri}"]
        flags = [text for text in overrides if text.startswith("-")]
        return [*flags, *TINY, *where, *(text for text in overrides if text not in flags)]

    def here(self, *overrides: str, directory: str = "out") -> Ended:
        """Run it in this process, which has its imports behind it."""
        import kvlab.cli.run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["src/run.py", *self.arguments(*overrides, directory=directory)])
            patch.setenv("COLUMNS", "200")
            code: Any = 0
            try:
                kvlab.cli.run.main()
            except SystemExit as ended:
                code = ended.code
        shown = self.capture() if self.capture else None
        return Ended(int(code or 0), shown.out + shown.err if shown else "")

    def start(self, *overrides: str, directory: str = "out") -> subprocess.Popen[str]:
        """Start it in a process of its own."""
        arguments = [sys.executable, "-m", "src.run", *self.arguments(*overrides, directory=directory)]
        return subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def apart(self, *overrides: str, directory: str = "out") -> Ended:
        """Run it in a process of its own."""
        process = self.start(*overrides, directory=directory)
        output, _ = process.communicate(timeout=MOST_S)
        return Ended(process.returncode, output)

    def runs(self, query: str = "") -> list[TrackedRun]:
        """What the store has, the latest first."""
        return find_runs(open_store(TrackingConfig(uri=self.uri), self.base), "kvlab", query)

    def children(self, query: str = "") -> list[TrackedRun]:
        """The runs that are points of a sweep."""
        return [run for run in self.runs(query) if "mlflow.parentRunId" in run.tags]

    def parents(self) -> list[TrackedRun]:
        """The sweeps."""
        return [run for run in self.runs() if run.tags.get("kvlab.kind") == "sweep"]
