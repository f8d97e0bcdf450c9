"""Commands that a signal ends at a named moment, and that are then given again: nothing finished may be lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import killer
from tests.support.commands import TIMEOUT_S, TINY, Lab
from tests.support.forked import ROOT, Forked

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
POINTS_OF_SWEEP = TRIALS = 3


@dataclass(frozen=True)
class KillPoint:
    """A moment in a command: as a function is called for the n-th time."""

    command: str  # run, sweep or tune
    name: str
    target: str
    call: int = 1
    when: str = "before"
    fresh: bool = False  # the store is not there before


_TRACKER = "kvlab.lab.tracking.mlflow_tracker.MlflowTracker"
_CLIENT = "mlflow.tracking.MlflowClient"
#: Moments that every run has, with the call that is that of a sweep's second point.
_OF_A_RUN = (
    ("as it is planned", "kvlab.lab.run.execute.plan_any", 1, "before"),
    ("as its run is in the store, without parameters", f"{_TRACKER}.log_params", 1, "before"),
    ("as its run is open in the store", f"{_TRACKER}.log_input", 1, "after"),
    ("as its engine is built", "kvlab.lab.run.serve.make_engine", 1, "before"),
    ("in the midst of serving", "kvlab.engine.core.EngineCore.step", 5, "before"),
    ("ahead of its files", "kvlab.lab.run.recording.write_artifacts", 1, "before"),
    ("between two of its files", "pyarrow.parquet.write_table", 2, "before"),
    ("behind its files", "kvlab.lab.run.recording.write_artifacts", 1, "after"),
    ("ahead of its series", f"{_TRACKER}.log_series", 1, "before"),
    ("as a file takes its place", "os.replace", 2, "before"),
    ("between two files that the store copies", "shutil.copyfile", 2, "before"),
    ("ahead of its end in the store", f"{_CLIENT}.set_terminated", 1, "before"),
    ("behind its end in the store", f"{_CLIENT}.set_terminated", 1, "after"),
)
_OF_A_STORE = (
    ("ahead of the store's tables", "mlflow.store.db.utils._initialize_tables", 1, "before"),
    ("within a migration of the store", "alembic.ddl.impl.DefaultImpl.rename_table", 1, "before"),
    ("within a later migration", "alembic.ddl.impl.DefaultImpl.add_column", 20, "after"),
    ("behind the store's tables", "mlflow.store.db.utils._initialize_tables", 1, "after"),
    ("as the experiment is made", f"{_CLIENT}.create_experiment", 1, "before"),
)
#: In a sweep these happen to the second point. Its parent run comes first where the store is asked.
_SECOND = {
    "kvlab.lab.run.execute.plan_any": 2,
    f"{_TRACKER}.log_params": 3,
    f"{_TRACKER}.log_input": 2,
    "kvlab.lab.run.serve.make_engine": 2,
    "kvlab.engine.core.EngineCore.step": 20,
    "kvlab.lab.run.recording.write_artifacts": 2,
    "pyarrow.parquet.write_table": 4,
    f"{_TRACKER}.log_series": 2,
    "os.replace": 9,
    "shutil.copyfile": 6,
    f"{_CLIENT}.set_terminated": 2,
}
KILL_POINTS = [
    *(KillPoint("run", name, target, call, when, fresh=True) for name, target, call, when in _OF_A_STORE),
    *(KillPoint("run", name, target, call, when) for name, target, call, when in _OF_A_RUN),
    KillPoint("sweep", "ahead of its plan", "kvlab.lab.campaigns.sweep.plan.SweepPlan.write"),
    KillPoint("sweep", "behind its plan", "kvlab.lab.campaigns.sweep.plan.SweepPlan.write", when="after"),
    KillPoint("sweep", "between two points", "kvlab.lab.campaigns.sweep.status.SweepProgress.report"),
    KillPoint("sweep", "ahead of its table", "kvlab.lab.campaigns.sweep.sweep.write_csv"),
    KillPoint("sweep", "ahead of its end in the store", "kvlab.lab.campaigns.sweep.sweep.close_parent"),
    *(
        KillPoint("sweep", f"second point: {name}", target, _SECOND[target], when)
        for name, target, _, when in _OF_A_RUN
    ),
    KillPoint("tune", "ahead of its study", "kvlab.lab.campaigns.tune.search.open_study"),
    KillPoint("tune", "behind its study", "kvlab.lab.campaigns.tune.search.open_study", when="after"),
    KillPoint("tune", "as a trial is asked for", "optuna.study.Study.ask", 2, "after"),
    KillPoint("tune", "as its second engine is built", "kvlab.lab.run.serve.make_engine", 2),
    KillPoint("tune", "in the midst of serving", "kvlab.engine.core.EngineCore.step", 20),
    KillPoint("tune", "ahead of a trial's value", "optuna.study.Study.tell", 2),
    KillPoint("tune", "behind a trial's value", "optuna.study.Study.tell", 2, "after"),
    KillPoint("tune", "ahead of its pictures", "kvlab.lab.campaigns.tune.search.write_csv"),
    KillPoint("tune", "ahead of its end in the store", "kvlab.lab.campaigns.tune.trials.close_parent"),
]


class KillFailure(AssertionError):
    """What was lost or left behind, with the way to see it again."""


@dataclass
class Kept:
    """What a store has: runs by id with their state and configuration, parents apart, and the trials' values."""

    runs: dict[str, tuple[str, str]]
    parents: list[str]
    trials: dict[int, float]

    @property
    def finished(self) -> dict[str, str]:
        """Finished runs, and the digest of what they ran."""
        return {run: digest for run, (state, digest) in self.runs.items() if state == "FINISHED"}


def _rows(database: Path, query: str) -> list[tuple]:
    """Rows of a copy, so that looking repairs nothing; none where the table is not there."""
    with tempfile.TemporaryDirectory() as folder:
        for file in database.parent.glob(f"{database.name}*"):
            if not file.name.endswith(".lock"):
                shutil.copy(file, folder)
        if not (copy := Path(folder, database.name)).exists():
            return []
        with closing(sqlite3.connect(copy)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []


def look(base: Path) -> Kept:
    """What the store and the study in `base` have."""
    tag = "(SELECT value FROM tags WHERE tags.run_uuid = runs.run_uuid AND key = '{}')"
    columns = ", ".join(["run_uuid", "status", tag.format("kvlab.kind"), tag.format("kvlab.config_digest")])
    rows = _rows(base / "store.db", f"SELECT {columns} FROM runs")
    values = "SELECT number, value FROM trials JOIN trial_values USING (trial_id) WHERE state = 'COMPLETE'"
    return Kept(
        {run: (state, digest) for run, state, kind, digest in rows if not kind},
        [state for _, state, kind, _ in rows if kind],
        {int(number): value for number, value in _rows(base / "tune" / "tune.db", values)},
    )


def arguments(lab: Lab, command: str, *, again: bool) -> list[str]:
    """The command line, the same each time; sweeps and runs are asked to resume the second time."""
    if command == "tune":
        where = [f"output={lab.base / 'tune'}", f"tracking.uri={lab.uri}", "memory=68MiB", f"trials={TRIALS}"]
        return ["tune", "optimize=throughput/output_tokens_per_s", *where, *TINY]
    swept = ["-m", "kv.num_blocks=8,9,10"] if command == "sweep" else []
    return ["run", *lab.arguments(*swept, *(["resume=true"] if again else []))]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its code, what it printed, and what processes of its session are left."""

    code: int
    output: str
    left: tuple[str, ...]


Launcher = Callable[[Callable[[list[str]], None], list[str]], Ended]


def spawned(main: Callable[[list[str]], None], arguments: list[str]) -> Ended:
    """Call a function of `tests.support.killer` in a new interpreter, as a user does."""
    code = f"import sys; from tests.support.killer import {main.__name__} as main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return Ended(process.returncode, output, _session(process.pid))


def forked(main: Callable[[list[str]], None], arguments: list[str]) -> Ended:
    """Call it in a fork of a process that has its imports behind it: several times as fast, for long lists."""
    process = Forked(main, arguments)
    output = process.finish(TIMEOUT_S)
    return Ended(process.returncode or 0, output, _session(process.pid))


def _session(leader: int) -> tuple[str, ...]:
    """The processes that are left of a session, after a moment; those that init has yet to reap are not."""
    deadline = time.monotonic() + 30
    while True:
        left = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == leader and (process.ppid(), process.status()) != (1, "zombie"):
                    left.append(f"{process.pid} {process.name()} {process.status()}")
        if not left or time.monotonic() > deadline:
            return tuple(left)
        time.sleep(0.1)


def check(point: KillPoint, sign: str, base: Path, launch: Launcher = spawned) -> None:
    """Kill the command at that point, give it again, and look for what is lost or left. Raises KillFailure."""
    lab = Lab(base) if point.fresh else Lab.with_store(base)
    strike = [point.target, str(point.call), point.when, sign]
    first = launch(killer.main, [*strike, *arguments(lab, point.command, again=False)])
    before = look(base)
    second = launch(killer.run, arguments(lab, point.command, again=True))
    after = look(base)
    problems = [
        *_of_the_first(sign, first),
        *(f"process left behind: {each}" for each in first.left + second.left),
        *_of_the_second(point, second, before, after),
        *_of_the_files(base, at_once=first.code < 0),
    ]
    if problems:
        shown = "\n  ".join(problems)
        raise KillFailure(
            f"{point.command}, {point.name}, {sign}: {len(problems)} problems\n"
            f"python -m experiments.soak.run kills --only {KILL_POINTS.index(point)} --signal {sign}\n  {shown}\n"
            f"-- killed, exit {first.code}:\n{first.output[-1500:]}\n"
            f"-- again, exit {second.code}:\n{second.output[-2500:]}"
        )


def _of_the_first(sign: str, ended: Ended) -> list[str]:
    number = getattr(signal, sign)
    problems = [] if killer.STRUCK in ended.output else ["that moment never came"]
    if "Traceback" in ended.output:
        problems.append("the killed command ended with a traceback")
    allowed = {-number} if sign in ("SIGKILL", "SIGHUP") else {-number, 128 + number, 130, 0}
    if ended.code not in allowed:
        problems.append(f"the killed command ended with {ended.code}, none of {sorted(allowed)}")
    return problems


def _of_the_second(point: KillPoint, ended: Ended, before: Kept, after: Kept) -> list[str]:
    problems = []
    if ended.code or "Traceback" in ended.output:
        problems.append(f"the same command again ended with {ended.code}")
    if lost := before.finished.keys() - after.finished.keys():
        problems.append(f"finished runs that are gone: {lost}")
    if changed := {number for number, value in before.trials.items() if after.trials.get(number) != value}:
        problems.append(f"trials whose values are gone: {changed}")
    done = Counter(after.finished.values())
    if point.command == "tune":
        if len(after.trials) < TRIALS:
            problems.append(f"{len(after.trials)} trials have a value, not {TRIALS}")
    else:
        wanted = POINTS_OF_SWEEP if point.command == "sweep" else 1
        if sorted(done.values()) != [1] * wanted:
            problems.append(f"of {wanted} points, finished runs of each: {sorted(done.values())}")
    if point.command != "run":
        if still := [run for run, (state, _) in after.runs.items() if state == "RUNNING"]:
            problems.append(f"runs that are still open: {still}")
        if set(after.parents) != {"FINISHED"}:
            problems.append(f"parent runs: {after.parents}")
    return problems


def _of_the_files(base: Path, *, at_once: bool) -> list[str]:
    problems = []
    passing = re.compile(r"-journal$|-wal$|-shm$|~$|tmp|partial|\.making-")
    hidden = re.compile(
        r"^\.\d+\."
    )  # a file that has not taken its place; a process that is gone at once leaves it
    for file in base.rglob("*"):
        if passing.search(file.name) or (hidden.search(file.name) and not at_once):
            problems.append(f"left behind: {file.relative_to(base)}")
        if file.name == "summary.json":
            try:
                json.loads(file.read_text())
            except ValueError as error:
                problems.append(f"{file.relative_to(base)}: {error}")
    if _rows(base / "store.db", "PRAGMA integrity_check") != [("ok",)]:
        problems.append("the store is not sound")
    return problems
