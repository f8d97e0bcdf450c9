"""The real commands, in this process or another, on a model of a few numbers, with a tracking store for them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

import kvlab.cli.run
from kvlab.config import TrackingConfig
from kvlab.lab.tracking import open_store
from kvlab.lab.tracking.search import TrackedRun, find_runs
from tests.support.forked import Forked
from tests.support.runs import alone
from tests.support.tracking import empty_store

#: A model and a workload that take a fraction of a second.
TINY = (
    "model=qwen3_tiny",
    "model.max_seq_len=256",  # which decides how much memory is set to zero
    "figures=false",  # which take a second
    "executor.threads=1",
    "workload.num_requests=3",
    "workload.prompt_len={min: 17, max: 20}",
    "workload.output_len={min: 4, max: 6}",
)
TIMEOUT_S = 400  # for the share that a busy machine leaves


@dataclass
class Command:
    """A finished command: how it ended, what it printed, where it put its files and its tracked run."""

    code: int
    output: str
    directory: Path = Path()
    uri: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    @property
    def tracked(self) -> Run:
        return MlflowClient(self.uri).get_run(self.summary["run_id"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.directory / name).to_pylist()
        return rows


def call(main: Callable[[], None], *arguments: str) -> Command:
    """A command's main with these arguments, in this process, which has its imports behind it."""
    printed, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, alone(), redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(sys, "argv", [main.__module__, *arguments])
        patch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Command(code, printed.getvalue())


def kvlab_run(arguments: list[str]) -> None:
    """The command, in a process that is its own."""
    sys.argv = ["kvlab run", *arguments]
    sys.orig_argv = [sys.executable, "-m", "src.run", *arguments]  # where a run looks for what started it
    kvlab.cli.run.main()


@dataclass
class Lab:
    """Runs `kvlab run` with `settings`, which those of a call override, in folders under `base`."""

    base: Path
    settings: Sequence[str] = TINY
    uri: str = ""  # by default, of a store in `base`

    def __post_init__(self) -> None:
        self.uri = self.uri or f"sqlite:///{self.base / 'store.db'}"

    @classmethod
    def with_store(cls, base: Path, settings: Sequence[str] = TINY) -> Lab:
        """One whose store is there already, empty."""
        (base / "store.db").write_bytes(empty_store())
        return cls(base, settings)

    def arguments(self, *overrides: str, directory: str = "out") -> list[str]:
        """What follows the command's name; results go to `directory`."""
        folder = self.base / directory
        where = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", f"tracking.uri={self.uri}"]
        flags = [text for text in overrides if text.startswith("-")]
        return [*flags, *self.settings, *where, *(text for text in overrides if text not in flags)]

    def here(self, *overrides: str, directory: str = "out") -> Command:
        """Run it in this process."""
        ended = call(kvlab.cli.run.main, *self.arguments(*overrides, directory=directory))
        return Command(ended.code, ended.output, self.base / directory, self.uri)

    def start(self, *overrides: str, directory: str = "out", **environment: str) -> Forked:
        """Start it in a process of its own."""
        return Forked(kvlab_run, self.arguments(*overrides, directory=directory), **environment)

    def apart(self, *overrides: str, directory: str = "out") -> Command:
        """Run it in a process of its own."""
        process = self.start(*overrides, directory=directory)
        output = process.finish(TIMEOUT_S)
        return Command(process.returncode or 0, output, self.base / directory, self.uri)

    def runs(self, query: str = "") -> list[TrackedRun]:
        """What the store has, the latest first."""
        return find_runs(open_store(TrackingConfig(uri=self.uri), self.base), "kvlab", query)

    def children(self, query: str = "") -> list[TrackedRun]:
        """The runs that are points of a sweep."""
        return [run for run in self.runs(query) if "mlflow.parentRunId" in run.tags]

    def parents(self) -> list[TrackedRun]:
        """The sweeps."""
        return [run for run in self.runs() if run.tags.get("kvlab.kind") == "sweep"]
