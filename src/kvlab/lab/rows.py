"""Records as rows of steps.parquet and requests.parquet, and back. A row is a mapping of column to value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
_COUNTERS = [each.name for each in dataclasses.fields(PoolCounters) if each.name != "merged_blocks"]

#: Columns and their types by Arrow's names; a list of a type ends with "[]".
STEP_TYPES = {name: "int64" if kind == "int" else "float64" for name, kind in _STEP.items()} | dict.fromkeys(
    [*_POOL, *_COUNTERS], "int64"
)
REQUEST_TYPES = {
    "request_id": "string",
    "sample": "int64",
    "arrival_s": "float64",
    "prompt_tokens": "int64",
    "cached_tokens": "int64",
    "output_token_ids": "int64[]",
    "finish_reason": "string",
    "error": "string",
    "scheduled_s": "float64",
    "first_token_s": "float64",
    "end_s": "float64",
    "queue_ms": "float64",
    "ttft_ms": "float64",
    "tpot_ms": "float64",
    "e2el_ms": "float64",
    "preemptions": "int64",
    "recomputed_tokens": "int64",
    "token_times_s": "float64[]",
    "preempted_s": "float64[]",
    "resumed_s": "float64[]",
}


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
    return {name: getattr(record, "finished_s" if name == "end_s" else name) for name in REQUEST_TYPES}


def read_request(row: Mapping[str, Any]) -> RequestRecord:
    """The record of a row. What an older version did not write has its default."""
    times = tuple(row.get("token_times_s") or ())
    end = row.get("end_s")
    return RequestRecord(
        request_id=row["request_id"],
        sample=row.get("sample") or 0,
        arrival_s=row["arrival_s"],
        prompt_tokens=row["prompt_tokens"],
        output_token_ids=tuple(row.get("output_token_ids") or ()),
        token_times_s=times,
        finish_reason=FinishReason(row.get("finish_reason") or FinishReason.ABORTED),
        finished_s=end if end is not None else times[-1] if times else row["arrival_s"],
        error=row.get("error"),
        scheduled_s=row.get("scheduled_s"),
        cached_tokens=row.get("cached_tokens") or 0,
        preempted_s=tuple(row.get("preempted_s") or ()),
        resumed_s=tuple(row.get("resumed_s") or ()),
        recomputed_tokens=row.get("recomputed_tokens") or 0,
    )
