"""What a run leaves on disk: its files, their columns, and a run read back, the input of reports and figures.

A row of steps.parquet or requests.parquet is a mapping of column to value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from kvlab.core import (
    TIER_COUNTERS,
    UNKNOWN_TOKEN,
    FinishReason,
    PoolCounters,
    PoolStats,
    RequestRecord,
    StepRecord,
)
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineReport, EngineSeries
from kvlab.errors import RecordError
from kvlab.kv.journal import BlockEvent, BlockEvents
from kvlab.lab.results.log import RunLog
from kvlab.lab.settings import flatten
from kvlab.run_files import BLOCKS, CONFIG, PREFIXES, REQUESTS, SERIES, STEPS, SUMMARY
from kvlab.secrets import redact

_REPLICAS = re.compile(r", \d+ replicas behind \w+$")
SIMULATED = "simulated "  # how the machine of a simulated run begins in its summary
BLOCK_EVENTS = [event.name.lower() for event in BlockEvent]  # in blocks.parquet

_STEP = {column.name: column.type for column in fields(StepRecord) if column.name not in ("pool", "counters")}
_POOL = {  # column: field of PoolStats
    "blocks_total": "blocks_total",
    "blocks_in_use": "blocks_in_use",
    "block_token_slots": "block_size",
    "tokens_in_use": "tokens_stored",
    "blocks_cached": "blocks_cached",
    "shared_blocks": "shared_blocks",
    "blocks_pinned": "blocks_pinned",
    "host_blocks": "host_blocks",
    "disk_blocks": "disk_blocks",
    "loading_sequences": "loading_sequences",
}
_REQUEST = {"end_s": "finished_s"}  # column: field of RequestRecord
_COUNTERS = [name for name in PoolCounters._fields if name != "merged_blocks"]
_RETENTION = ("blocks_pinned", "expired_blocks", "quota_evictions", "pinned_evictions", "pins_refused")
_TIERS = ("host_blocks", "disk_blocks", "loading_sequences", *TIER_COUNTERS)
_SPECULATION = ("proposed_tokens", "accepted_tokens")  # columns of runs that speculate
_FLEET = ("replica",)  # a column of runs of several replicas

STEP_SCHEMA = pa.schema(
    {name: pa.int64() if kind == "int" else pa.float64() for name, kind in _STEP.items()}
    | dict.fromkeys([*_POOL, *_COUNTERS], pa.int64())
)
REQUEST_SCHEMA = pa.schema(
    {
        "request_id": pa.string(),
        "sample": pa.int64(),
        "arrival_s": pa.float64(),
        "prompt_tokens": pa.int64(),
        "cached_tokens": pa.int64(),
        "output_token_ids": pa.list_(pa.int64()),
        "finish_reason": pa.string(),
        "error": pa.string(),
        "scheduled_s": pa.float64(),
        "first_token_s": pa.float64(),
        "end_s": pa.float64(),
        "queue_ms": pa.float64(),
        "ttft_ms": pa.float64(),
        "tpot_ms": pa.float64(),
        "e2el_ms": pa.float64(),
        "preemptions": pa.int64(),
        "recomputed_tokens": pa.int64(),
        "token_times_s": pa.list_(pa.float64()),
        "preempted_s": pa.list_(pa.float64()),
        "resumed_s": pa.list_(pa.float64()),
        "prompt": pa.string(),
        "text": pa.string(),
        "salt": pa.string(),
        "replica": pa.int64(),
    }
)


def step_table(steps: StepLog) -> pa.Table:
    """Steps as the table of steps.parquet; what their engine does not have is null. Without pins, a time to live or
    quotas it has no columns of them, nor of tiers, nor of proposed tokens where there were none.
    """
    columns = {name: steps.column(name) for name in _STEP}
    columns |= {column: steps.column(f"pool.{name}") for column, name in _POOL.items()}
    columns |= {name: steps.column(f"counters.{name}") for name in _COUNTERS}
    absent = dict.fromkeys(_POOL, steps.column("has_pool") == 0)
    absent |= dict.fromkeys(_COUNTERS, steps.column("has_counters") == 0)
    table = pa.table(
        [pa.array(columns[name], mask=absent.get(name)) for name in STEP_SCHEMA.names], schema=STEP_SCHEMA
    )
    unused = [
        group
        for group in (_RETENTION, _TIERS, _SPECULATION, _FLEET)
        if not any(columns[name].any() for name in group)
    ]
    return table.drop_columns([name for group in unused for name in group])


def step_row(step: StepRecord) -> dict[str, int | float | None]:
    """One step as a row of it."""
    row = {name: getattr(step, name) for name in _STEP}
    row |= {column: getattr(step.pool, name, None) for column, name in _POOL.items()}
    return row | {name: getattr(step.counters, name, None) for name in _COUNTERS}


def read_step(row: Mapping[str, Any]) -> StepRecord:
    """The step of a row. What an older version did not write is 0."""
    pool = {name: row.get(column) or 0 for column, name in _POOL.items()}
    counters = {name: row.get(name) or 0 for name in _COUNTERS}
    return StepRecord(
        **{name: row.get(name) or 0 for name in _STEP},
        pool=PoolStats(**pool) if row.get("blocks_total") is not None else None,
        counters=PoolCounters(**counters) if row.get("blocks_allocated") is not None else None,
    )


def request_row(record: RequestRecord) -> dict[str, Any]:
    """A request's sample as a row."""
    row = {name: getattr(record, _REQUEST.get(name, name)) for name in REQUEST_SCHEMA.names}
    return row | {"error": record.error and redact(record.error)}


def request_table(
    records: Sequence[RequestRecord],
    report: EngineReport | None = None,
    replica_names: Sequence[str] = (),
    pulled: Mapping[str, int] | None = None,
) -> pa.Table:
    """Requests as the table of requests.parquet, without the columns of what their engine cannot tell, and of salts
    where none has one; of groups of replicas with the `group` of each one's; with what was `pulled` of each
    request's prompt from other replicas, where that is done.
    """
    table = pa.Table.from_pylist([request_row(record) for record in records], schema=REQUEST_SCHEMA)
    unreported = frozenset() if report is None else report.unreported
    if not any(record.salt for record in records):
        unreported |= {"salt"}
    if not any(record.replica for record in records):
        unreported |= {"replica"}
    table = table.drop_columns([name for name in table.column_names if _REQUEST.get(name, name) in unreported])
    if pulled is not None:
        tokens = [0 if record.sample else pulled.get(record.request_id, 0) for record in records]
        table = table.append_column("pulled_tokens", pa.array(tokens, pa.int64()))
    groups = [replica_names[record.replica] for record in records] if replica_names else []
    return table.append_column("group", pa.array(groups, pa.string())) if replica_names else table


def series_table(series: EngineSeries) -> pa.Table:
    """What an engine said of itself as the table of series.parquet: `time_s`, and the columns that it has."""
    return pa.table({"time_s": series.times_s, **series.columns})


def read_series(table: pa.Table | None) -> EngineSeries:
    """The series of such a table."""
    columns = {} if table is None else table.to_pydict()
    return EngineSeries(columns.pop("time_s", ()), columns)


def read_request(row: Mapping[str, Any]) -> RequestRecord:
    """The record of a row. What an older version did not write has its default."""
    names = {column.name for column in fields(RequestRecord)}
    values = {_REQUEST.get(name, name): value for name, value in row.items() if value is not None}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names}
    times = values.setdefault("token_times_s", ())
    defaults = {
        "sample": 0,
        "output_token_ids": (UNKNOWN_TOKEN,) * len(times),
        "finished_s": times[-1] if times else values["arrival_s"],
    }
    reason = FinishReason(values.pop("finish_reason", FinishReason.ABORTED))
    return RequestRecord(**(defaults | values), finish_reason=reason)


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
        if table is None:
            return None
        event = pc.index_in(table["event"].cast(pa.string()), value_set=pa.array(BLOCK_EVENTS))
        return BlockEvents(
            step=table["step"].to_numpy(),
            event=event.to_numpy().astype(np.int8),
            block=table["block"].to_numpy(),
            sequence=table["sequence"].to_numpy(),
        )

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
        for batch in () if table is None else table.to_batches(max_chunksize=_ROWS):
            yield from map(read, batch.to_pylist())

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
        choices=summary.get("choices") or {},
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
