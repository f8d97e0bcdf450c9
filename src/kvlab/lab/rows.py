"""Records as rows of steps.parquet and requests.parquet, and back. A row is a mapping of column to value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kvlab.core import FinishReason, PoolCounters, PoolStats, RequestRecord, StepRecord

_STEP = {each.name: each.type for each in dataclasses.fields(StepRecord) if each.name not in ("pool", "counters")}
_POOL = {  # column: field of PoolStats
    "blocks_total": "blocks_total",
    "blocks_in_use": "blocks_in_use",
    "block_token_slots": "block_size",
    "tokens_in_use": "tokens_stored",
    "blocks_cached": "blocks_cached",
    "shared_blocks": "shared_blocks",
}
_REQUEST = {"end_s": "finished_s"}  # column: field of RequestRecord
_COUNTERS = [each.name for each in dataclasses.fields(PoolCounters) if each.name != "merged_blocks"]

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
    }
)


def step_row(step: StepRecord) -> dict[str, int | float | None]:
    """A step as a row; what its engine does not have is None."""
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
    return {name: getattr(record, _REQUEST.get(name, name)) for name in REQUEST_SCHEMA.names}


def read_request(row: Mapping[str, Any]) -> RequestRecord:
    """The record of a row. What an older version did not write has its default."""
    fields = {each.name for each in dataclasses.fields(RequestRecord)}
    found = {_REQUEST.get(name, name): value for name, value in row.items() if value is not None}
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if name in fields}
    times = found.setdefault("token_times_s", ())
    defaults = {"sample": 0, "output_token_ids": (), "finished_s": times[-1] if times else found["arrival_s"]}
    reason = FinishReason(found.pop("finish_reason", FinishReason.ABORTED))
    return RequestRecord(**(defaults | found), finish_reason=reason)
