"""A run as a benchmark report of llm-d (schema v0.2, llm-d/llm-d-benchmark), as those of other tools are."""

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

import kvlab
from kvlab.errors import RecordError
from kvlab.lab.results.records import RunRecord
from kvlab.lab.results.requests import latencies_ms

VERSION = "0.2"
_PERCENTILES = {"p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95,
                "p99": 99, "p99p9": 99.9}  # fmt: skip


def benchmark_report(run: RunRecord) -> dict[str, Any]:
    """The report. Latencies are of completed requests, TPOT is over each request, ITL between any two tokens.

    Raises RecordError for a run without a completed request.
    """
    records = run.requests()
    done = [record for record in records if record.completed]
    if not done:
        raise RecordError(f"{run.directory}: no request completed, so that there is nothing to export")
    refused = int(run.metrics.get("requests/refused", 0))  # or not sent: they have no records
    begin, end = min(record.arrival_s for record in records), max(record.finished_s for record in records)
    prompt, output = ([record.prompt_tokens for record in done], [len(record.output_token_ids) for record in done])
    latencies = latencies_ms(records)
    first, request = latencies["ttft"], latencies["e2el"]
    rates = {
        "input_token_rate": (sum(prompt), "tokens/s"),
        "output_token_rate": (sum(output), "tokens/s"),
        "total_token_rate": (sum(prompt) + sum(output), "tokens/s"),
        "request_rate": (len(done), "queries/s"),
    }
    aggregate = {
        "requests": {
            "total": len(records) + refused,
            "failures": len(records) + refused - len(done),
            "input_length": _statistics(prompt, "count"),
            "output_length": _statistics(output, "count"),
        },
        "latency": {
            "time_to_first_token": _statistics(first, "ms"),
            "time_per_output_token": _statistics(latencies["tpot"], "ms/token"),
            "inter_token_latency": _statistics(latencies["itl"], "ms/token"),
            "request_latency": _statistics(request, "ms"),
        },
        "throughput": {
            name: {"units": units, "mean": count / (end - begin)} for name, (count, units) in rates.items()
        }
        if end > begin
        else None,
    }
    report: dict[str, Any] = _known(
        {
            "version": VERSION,
            "run": _about(run, end - begin),
            "scenario": {"stack": [_component(run)], "load": _load(run, prompt, output)},
            "results": {"request_performance": {"aggregate": aggregate}},
        }
    )
    return report


def report_text(run: RunRecord) -> str:
    """The report as YAML."""
    text: str = yaml.safe_dump(benchmark_report(run), sort_keys=False, allow_unicode=True)
    return text


def _about(run: RunRecord, seconds: float) -> dict[str, Any]:
    started = run.facts.get("started")
    uid = run.run_id or blake2b(str(run.directory.resolve()).encode(), digest_size=16).hexdigest()
    description = f"{run.name}, {run.simulated}" if run.simulated else run.name
    start = None if started is None else datetime.fromtimestamp(started, UTC).isoformat()
    time = {"start": start, "duration": f"PT{seconds:.6f}S"}
    keywords = ["simulated"] if run.simulated else None
    return {"uid": uid, "time": time, "description": description, "keywords": keywords}


def _component(run: RunRecord) -> dict[str, Any]:
    """What served the requests, with every setting as `native`."""
    settings = {key: value for key, value in run.config.items() if value is not None}
    return {
        "metadata": {"label": "engine-0", "cfg_id": str(run.facts.get("settings_digest", "unknown"))},
        "standardized": {
            "kind": "generic",
            "tool": "kvlab",
            "tool_version": kvlab.__version__,
            "model": run.config.get("model.name"),
            "machine": run.facts.get("machine"),
        },
        "native": {"config": settings},
    }


def _load(run: RunRecord, prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    settings = run.config
    rate = settings.get("workload.rate") if settings.get("workload.arrival") in ("poisson", "uniform") else None
    return {
        "metadata": {"cfg_id": str(run.facts.get("workload_digest", "unknown"))},
        "standardized": {
            "tool": "kvlab",
            "tool_version": kvlab.__version__,
            "source": "unknown",
            "input_seq_len": _lengths(prompt),
            "output_seq_len": _lengths(output),
            "rate_qps": rate,
            "concurrency": settings.get("workload.concurrency"),
        },
        "native": {"config": {key: value for key, value in settings.items() if key.startswith("workload.")}},
    }


def _lengths(tokens: Sequence[int]) -> dict[str, Any]:
    least, most = min(tokens), max(tokens)
    kind = "fixed" if least == most else "other"
    return {"distribution": kind, "value": float(np.mean(tokens)), "min": least, "max": max(most, 1)}


def _statistics(values: Sequence[float] | NDArray[np.float64], units: str) -> dict[str, Any] | None:
    if not len(values):
        return None
    numbers = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(numbers, list(_PERCENTILES.values())).tolist()
    return {
        "units": units,
        "mean": float(numbers.mean()),
        "stddev": float(numbers.std()),
        "min": float(numbers.min()),
        **dict(zip(_PERCENTILES, percentiles, strict=True)),
        "max": float(numbers.max()),
    }


def _known(value: Any) -> Any:
    """Without what is None."""
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items() if inner is not None}
    return [_known(inner) for inner in value] if isinstance(value, list) else value
