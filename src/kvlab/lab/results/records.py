"""A run read back from what it left on disk: the input of reports and figures."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from kvlab.core import RequestRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineSeries
from kvlab.errors import RecordError
from kvlab.kv.journal import BlockEvents
from kvlab.lab.results.columns import read_blocks, read_request, read_series, read_step
from kvlab.lab.results.log import RunLog
from kvlab.lab.settings import flatten
from kvlab.run_files import BLOCKS, CONFIG, PREFIXES, REQUESTS, SERIES, STEPS, SUMMARY

_REPLICAS = re.compile(r", \d+ replicas behind \w+$")
SIMULATED = "simulated "  # how the machine of a simulated run begins in its summary


def simulated_on(facts: Mapping[str, Any]) -> str:
    """The device and the timing of a run by its summary, in words; empty where it was not simulated."""
    machine = _REPLICAS.sub("", str(facts.get("machine", "")))
    return machine if machine.startswith(SIMULATED) else ""


T = TypeVar("T")
_ROWS = 10_000  # that are Python objects at once
_FIELDS = ("name", "run_id", "status", "error", "config", "choices", "metrics", "tags")


@dataclass(frozen=True)
class RunRecord:
    """One run as it was recorded. What an older version of kvlab did not write is empty, never an error."""

    name: str
    run_id: str | None  # in the tracking store; None for a run that was not tracked
    status: str  # a RunStatus: finished, failed, interrupted, out_of_memory
    error: str | None
    config: Mapping[str, object]  # flat dotted keys
    choices: Mapping[str, str]  # each group's choice: {"kv": "paged", ...}
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    directory: Path
    facts: Mapping[str, Any] = field(default_factory=dict)  # the summary's rest: machine, device, ...
    fetch: Callable[[], None] | None = None  # brings the files into `directory`, for a run of a tracking store
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end; only then its figures are those of the whole workload."""
        return self.status == "finished"

    @property
    def simulated(self) -> str:
        """The device and the timing of a run that was simulated, in words; else empty."""
        return simulated_on(self.facts)

    def steps(self) -> StepLog:
        """The engine's steps in order, read when first asked for; none where the run kept none."""
        return self.once(STEPS, lambda: StepLog(self._rows(STEPS, read_step)))

    def series(self) -> EngineSeries:
        """What an engine without steps said of itself; empty where it said nothing."""
        return self.once(SERIES, lambda: read_series(self._read(SERIES)))

    def requests(self) -> list[RequestRecord]:
        """What happened to each request and sample, read when first asked for."""
        return self.once(REQUESTS, lambda: list(self._rows(REQUESTS, read_request)))

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What was made of this run under a name, when it was first asked for."""
        if name not in self._known:
            self._known[name] = make()
        return cast(T, self._known[name])

    def blocks(self) -> BlockEvents | None:
        """What happened to each block, sequences as indices of `requests`; None where the run kept no journal."""
        if BLOCKS in self._known:
            return cast(BlockEvents | None, self._known[BLOCKS])
        table = self._read(BLOCKS)
        return None if table is None else read_blocks(table)

    def prefixes(self) -> Any:
        """The table of prefixes.parquet; None where the run kept none."""
        return self._read(PREFIXES)

    @cached_property
    def _fetched(self) -> bool:
        if self.fetch is not None:
            self.fetch()
        return True

    def _rows(self, name: str, read: Callable[[Mapping[str, Any]], T]) -> Iterator[T]:
        table = self._read(name)
        try:
            for batch in () if table is None else table.to_batches(max_chunksize=_ROWS):
                yield from map(read, batch.to_pylist())
        except (KeyError, TypeError, ValueError) as error:
            text = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise RecordError(f"{self.directory / name}: cannot be read as a table of a run: {text}") from error

    def _read(self, name: str) -> Any:
        """A table of the run; None where it kept none. Raises RecordError for one that cannot be read."""
        file = self.directory / name
        if not self._fetched or not file.is_file():
            return None
        try:
            return pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"{file}: cannot be read: {error}") from error


def read_run(directory: Path) -> RunRecord:
    """The run whose files are in `directory`. Raises RecordError where there is none, or none that can be read."""
    file = directory / SUMMARY
    if not file.is_file():
        raise RecordError(f"{directory}: no run's output directory, it has no {SUMMARY}")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        config, settings = summary.get("config"), directory / CONFIG
        if config is None:  # an older version's, or refused before it wrote one
            config = flatten(yaml.safe_load(settings.read_text("utf-8")) or {}) if settings.is_file() else {}
        return _record(directory, {**summary, "config": config})
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(f"{file}: cannot be read as a run's summary: {error}") from error


def read_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of the run in `directory`; None where it has none, or none yet that can be read."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def make_run(directory: Path, summary: Mapping[str, Any], log: RunLog) -> RunRecord:
    """The same of a run that has just ended, whatever of its files could be written."""
    record = _record(directory, summary)
    series = EngineSeries() if log.engine_report is None else log.engine_report.series
    record._known.update({STEPS: log.steps, REQUESTS: log.records, BLOCKS: log.blocks, SERIES: series})
    return record


def _record(directory: Path, summary: Mapping[str, Any]) -> RunRecord:
    config = summary["config"]
    tags = {key[5:]: str(value) for key, value in config.items() if key.startswith("tags.")}
    return RunRecord(
        name=str(summary.get("name") or directory.name),
        run_id=summary.get("run_id"),
        status=str(summary.get("status", "finished")),
        error=summary.get("error"),
        config=config,
        choices=dict(summary.get("choices") or {}),
        metrics={key: float(value) for key, value in (summary.get("metrics") or {}).items()},
        tags=summary.get("tags") or tags,
        directory=directory,
        facts={key: value for key, value in summary.items() if key not in _FIELDS},
    )


def read_sweep(directory: Path) -> list[RunRecord]:
    """The points of the sweep in `directory`, in the order they ran. Raises RecordError where there are none."""
    files = sorted(directory.glob(f"*/{SUMMARY}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if not files:
        raise RecordError(f"{directory}: no sweep's directory, none of its folders has a {SUMMARY}")
    return [read_run(file.parent) for file in files]
