"""The tables that a run leaves: their columns, and records as rows of them.

A row of steps.parquet or requests.parquet is a mapping of column to value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
from kvlab.kv.journal import BlockEvent, BlockEvents
from kvlab.secrets import redact

_STEP = {column.name: column.type for column in fields(StepRecord) if column.name not in ("pool", "counters")}
_FIELDS = {"block_token_slots": "block_size", "tokens_in_use": "tokens_stored", "end_s": "finished_s"}  # by column
_OF_POOL = (
    *("blocks_total", "blocks_in_use", "block_token_slots", "tokens_in_use", "blocks_cached", "shared_blocks"),
    *("blocks_pinned", "host_blocks", "disk_blocks", "loading_sequences"),
)
_POOL = {name: _FIELDS.get(name, name) for name in _OF_POOL}  # column: field of PoolStats
_COUNTERS = [name for name in PoolCounters._fields if name != "merged_blocks"]
_RETENTION = ("blocks_pinned", "expired_blocks", "quota_evictions", "pinned_evictions", "pins_refused")
_TIERS = ("host_blocks", "disk_blocks", "loading_sequences", *TIER_COUNTERS)
_SPECULATION = ("proposed_tokens", "accepted_tokens")  # columns of runs that speculate
_VAIN = ("vain_tokens",)  # a column of runs in which a sequence decoded once more
_FLEET = ("replica",)  # a column of runs of several replicas
_BLOCK_EVENTS = pa.array([event.name.lower() for event in BlockEvent])

STEP_SCHEMA = pa.schema(
    {name: pa.int64() if kind == "int" else pa.float64() for name, kind in _STEP.items()}
    | dict.fromkeys([*_POOL, *_COUNTERS], pa.int64())
)
_TEXT, _WHOLE, _NUMBER = pa.string(), pa.int64(), pa.float64()
REQUEST_SCHEMA = pa.schema(
    {"request_id": _TEXT, "sample": _WHOLE, "arrival_s": _NUMBER, "prompt_tokens": _WHOLE, "cached_tokens": _WHOLE}
    | {"output_token_ids": pa.list_(_WHOLE), "finish_reason": _TEXT, "error": _TEXT}
    | dict.fromkeys(("scheduled_s", "first_token_s", "end_s", "queue_ms", "ttft_ms", "tpot_ms", "e2el_ms"), _NUMBER)
    | {"preemptions": _WHOLE, "recomputed_tokens": _WHOLE}
    | dict.fromkeys(("token_times_s", "preempted_s", "resumed_s"), pa.list_(_NUMBER))
    | {"prompt": _TEXT, "text": _TEXT, "salt": _TEXT, "replica": _WHOLE}
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
        for group in (_RETENTION, _TIERS, _SPECULATION, _VAIN, _FLEET)
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
    row = {name: getattr(record, _FIELDS.get(name, name)) for name in REQUEST_SCHEMA.names}
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
    table = table.drop_columns([name for name in table.column_names if _FIELDS.get(name, name) in unreported])
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
    values = {_FIELDS.get(name, name): value for name, value in row.items() if value is not None}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names}
    times = values.setdefault("token_times_s", ())
    defaults = {
        "sample": 0,
        "output_token_ids": (UNKNOWN_TOKEN,) * len(times),
        "finished_s": times[-1] if times else values["arrival_s"],
    }
    reason = FinishReason(values.pop("finish_reason", FinishReason.ABORTED))
    return RequestRecord(**(defaults | values), finish_reason=reason)


def blocks_table(events: BlockEvents) -> pa.Table:
    """A run's block events as the table of blocks.parquet: `step`, `block`, `event` by name, and the `sequence`
    whose reference it was as its row in requests.parquet, -1 for none.
    """
    names = pa.DictionaryArray.from_arrays(pa.array(events.event), _BLOCK_EVENTS)
    return pa.table({"step": events.step, "block": events.block, "event": names, "sequence": events.sequence})


def read_blocks(table: pa.Table) -> BlockEvents:
    """The block events of such a table."""
    event = pc.index_in(table["event"].cast(pa.string()), value_set=_BLOCK_EVENTS)
    return BlockEvents(
        step=table["step"].to_numpy(),
        event=event.to_numpy().astype(np.int8),
        block=table["block"].to_numpy(),
        sequence=table["sequence"].to_numpy(),
    )
