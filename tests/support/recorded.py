"""Runs on disk, written without running anything: what reports read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.lab.results.records import RunRecord, read_run

THROUGHPUT = "throughput/output_tokens_per_s"
CONFIG: dict[str, object] = {
    "model.name": "tiny",
    "model.architecture.hidden_size": 64,
    "model.weights": "dummy",
    "model.max_seq_len": 1024,
    "kv.backend": "paged",
    "kv.block_size": 16,
    "scheduler.order": "fcfs",
    "workload.name": "burst",
    "workload.arrival": "burst",
    "workload.num_requests": 2,
    "workload.temperature": 0.0,
    "tracking.backend": "off",
    "seed": 0,
    "repeat": 0,
}
_LIFE: dict[str, Any] = {
    "arrival_s": 0.0,
    "prompt_tokens": 16,
    "cached_tokens": 0,
    "finish_reason": "length",
    "error": None,
    "scheduled_s": 0.1,
    "first_token_s": 0.2,
    "end_s": 0.4,
    "queue_ms": 100.0,
    "ttft_ms": 200.0,
    "tpot_ms": 100.0,
    "e2el_ms": 400.0,
    "preemptions": 0,
    "recomputed_tokens": 0,
    "token_times_s": [0.2, 0.3, 0.4],
}


def record_run(
    directory: Path,
    rate: float = 100.0,
    *,
    metrics: dict[str, float] | None = None,
    tokens: dict[str, list[int]] | None = None,
    choices: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    status: str = "finished",
    error: str | None = None,
    facts: dict[str, Any] | None = None,
    **settings: object,
) -> RunRecord:
    """Write a run and read it back. Settings have `__` for the dots of their keys."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {key.replace("__", "."): value for key, value in settings.items()}
    figures = {THROUGHPUT: rate, "duration_s": 1000 / rate, "latency/ttft_ms_p50": 5000 / rate}
    summary = {
        "name": directory.name,
        "run_id": None,
        "status": status,
        "error": error,
        "metrics": {} if status != "finished" else figures | (metrics or {}),
        "choices": {"kv": str(config["kv.backend"])} | (choices or {}),
        "config": config,
        "tags": tags or {},
        "workload_digest": "d0",
        **(facts or {}),
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"request_id": request, "sample": 0, "output_token_ids": ids, **_LIFE}
        for request, ids in (tokens or {"r0": [1, 2, 3], "r1": [4, 5]}).items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "requests.parquet")
    return read_run(directory)


def record_sweep(
    directory: Path, points: dict[str, dict[str, Any]], rates: dict[str, list[float]]
) -> list[RunRecord]:
    """A sweep with repeats in turns: points by name with what `record_run` takes, and each repeat's rate."""
    runs: list[RunRecord] = []
    for repeat in range(max(map(len, rates.values()))):
        for name, settings in points.items():
            number = len(runs)
            own = settings | {"facts": {"started": 1000.0 + number, **settings.get("facts", {})}}
            runs.append(record_run(directory / str(number), rates[name][repeat], repeat=repeat, **own))
    return runs
