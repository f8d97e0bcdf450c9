"""The runs that a report is about: from directories, ids, sweeps and filters to records."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from kvlab.errors import KvlabError, RecordError, TrackingError
from kvlab.lab.compare.groups import RunSet
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.results.records import RunRecord, read_run, read_summary, read_sweep
from kvlab.lab.tracking import Store, open_store
from kvlab.lab.tracking.search import TrackedRun, done_before, fetch_files, find_runs
from kvlab.run_files import SUMMARY

_ID = re.compile(r"[0-9a-f]{6,32}")
_FOLDERS = ("outputs", "multirun")
_PARENT, _KIND = "mlflow.parentRunId", "kvlab.kind"


class Sources:
    """Finds runs in directories below `root` and in the tracking store, which is opened when it is needed.

    Files of tracked runs are copied below `folder`.
    """

    def __init__(self, options: ReportOptions, root: Path, folder: Path) -> None:
        self._options, self._root, self._folder = options, root, folder
        self._experiment = options.tracking.experiment

    def resolve(self, arguments: Sequence[str]) -> list[RunSet]:
        """A set of runs for each argument and filter, in order. Raises RecordError or TrackingError."""
        names = [_name(text) for text in arguments]
        sets = [
            RunSet(name if names.count(name) == 1 else text, tuple(self._argument(text)))
            for name, text in zip(names, arguments, strict=True)
        ]
        for query in self._options.filter:
            runs = self._stored(query)
            if not runs:
                experiment = f"experiment {self._experiment} in {self._store.shown}"
                raise RecordError(f"filter={query}: no run of {experiment} matches")
            sets.append(RunSet(query, tuple(runs)))
        if not sets:
            raise RecordError("name runs: directories, run ids, a sweep, or filter=; --help has examples")
        return sets

    @cached_property
    def _store(self) -> Store:
        return open_store(self._options.tracking, self._root)

    def _argument(self, text: str) -> list[RunRecord]:
        """One argument: runs joined by commas are repeats of each other, or a set of points."""
        runs = [run for part in text.split(",") for run in self._one(part.strip())]
        seen: dict[object, RunRecord] = {run.run_id or run.directory.resolve(): run for run in runs}
        return list(seen.values())

    def _one(self, text: str) -> list[RunRecord]:
        if not text:
            raise RecordError(
                "a run's directory or id is missing: an argument, or what stands beside a comma, is empty"
            )
        directory = Path(text)
        if directory.is_file() and directory.name == SUMMARY:
            directory = directory.parent
        if directory.is_dir():
            return [read_run(directory)] if (directory / SUMMARY).is_file() else read_sweep(directory)
        if _ID.fullmatch(text):
            return self._by_id(text)
        raise RecordError(f"{text}: there is no such directory, and it is no run's id (6 to 32 of 0-9 and a-f)")

    def _by_id(self, text: str) -> list[RunRecord]:
        """The run whose id this is or begins with: in the output directories, else in the store."""
        runs_here = [file.parent for folder in _FOLDERS for file in sorted((self._root / folder).rglob(SUMMARY))]
        known = {folder: (read_summary(folder) or {}).get("run_id") for folder in runs_here}
        local = [read_run(folder) for folder, run_id in known.items() if str(run_id).startswith(text)]
        candidates = {record.run_id: [record] for record in local}
        problem = f"nor does {self._experiment} in the tracking store have it"
        if not candidates:
            try:
                runs = self._stored(f"attributes.run_id LIKE '{text}%'")
            except TrackingError as error:
                problem, runs = str(error), []
            for run in runs:
                whose = run.run_id if (run.run_id or "").startswith(text) else run.tags.get(_PARENT)
                candidates.setdefault(whose, []).append(run)
        if not candidates:
            where = " or ".join(f"{folder}/" for folder in _FOLDERS)
            raise RecordError(f"{text}: no run with this id is in {where}; {problem}")
        if len(candidates) > 1:
            ids = ", ".join(sorted(map(str, candidates))[:5])
            raise RecordError(f"{text}: {len(candidates)} runs' ids begin so; write more of it: {ids}")
        return next(iter(candidates.values()))

    def _stored(self, query: str) -> list[RunRecord]:
        """The runs that a filter finds, the earliest first; of a sweep its points."""
        runs: dict[str, TrackedRun] = {}
        for run in reversed(find_runs(self._store, self._experiment, query)):
            points = self._points(run) if run.tags.get(_KIND) == "sweep" else [run]
            runs |= {point.run_id: point for point in points}
        return [_read_stored(self._store, run, self._folder / run_id) for run_id, run in runs.items()]

    def _points(self, sweep: TrackedRun) -> list[TrackedRun]:
        """A sweep's points: its children, and those that had finished before it was resumed."""
        find = partial(find_runs, self._store, self._experiment)
        points = list(reversed(find(f"tags.`{_PARENT}` = '{sweep.run_id}'")))
        for run_id in done_before(sweep.tags):
            points += find(f"attributes.run_id = '{run_id}'")
        return points


def _name(text: str) -> str:
    """A short name of an argument."""
    names = [Path(part).resolve().name if Path(part).exists() else part[:12] for part in text.split(",") if part]
    return " and ".join(names[:1] + [f"{len(names) - 1} more"] * (len(names) > 1))


def _read_stored(store: Store, run: TrackedRun, directory: Path) -> RunRecord:
    """One run. Where its summary was not stored, for instance because it was killed, what it logged has to do."""
    directory.mkdir(parents=True, exist_ok=True)
    fetch = partial(fetch_files, store, run.run_id, directory)
    try:
        store.call("download_artifacts", run.run_id, SUMMARY, str(directory), bulk=True)
        record = read_run(directory)
        if not record.config:
            fetch()
            record = read_run(directory)
    except KvlabError:
        record = RunRecord(
            name=run.name,
            run_id=run.run_id,
            status=run.tags.get("kvlab.status", run.state.lower()),
            error=run.tags.get("kvlab.error"),
            config={key: _value(text) for key, text in run.params.items()},
            choices=run.choices,
            metrics=run.metrics,
            tags=run.tags,
            directory=directory,
            facts={"workload_digest": run.tags["workload.digest"]} if "workload.digest" in run.tags else {},
        )
    return dataclasses.replace(record, run_id=run.run_id, tags=run.tags, fetch=fetch)


def _value(text: str) -> object:
    """A setting from the text that a store keeps of it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
