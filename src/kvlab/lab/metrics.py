"""The metrics of a run, all computed from its records of requests and steps. Formulas: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvlab.config import SloConfig
from kvlab.core import FinishReason, PoolCounters, PoolStats, RequestRecord, StepRecord
from kvlab.kv.sizing import PoolSize
from kvlab.lab.drive import RunLog
from kvlab.lab.requests import is_within, latencies_ms

_NOT_METRICS = ("prompt_tokens", "hit_tokens", "merged_blocks")  # of the counters; hits have a name of their own


def run_metrics(
    log: RunLog, pool: PoolSize | None = None, *, leaked_blocks: int | None = None, slo: SloConfig | None = None
) -> dict[str, float]:
    """Every metric of a run by name. One that has no value is absent: a latency with no request, what the engine
    does not report, of an engine without blocks all about blocks, and without limits in `slo` service levels.
    """
    records, steps, duration = log.records, log.steps, log.duration_s
    prompt_tokens = sum(_prompt_tokens(record) for record in records)
    output_tokens = sum(len(record.output_token_ids) for record in records)
    metrics: dict[str, float] = {
        "duration_s": duration,
        "requests/completed": log.completed,
        "requests/failed": sum(record.finish_reason is FinishReason.FAILED for record in records),
        "requests/refused": len(log.refused),
        "tokens/prompt": prompt_tokens,
        "tokens/output": output_tokens,
    }
    if duration > 0:
        metrics["throughput/output_tokens_per_s"] = output_tokens / duration
        metrics["throughput/total_tokens_per_s"] = (prompt_tokens + output_tokens) / duration
        metrics["throughput/requests_per_s"] = log.completed / duration
    for name, values in latencies_ms(records).items():
        metrics |= _distribution(f"latency/{name}_ms", values)
    if slo is not None:
        metrics |= _service_levels(log, slo.limits)
    if pool is not None:
        metrics |= {"capacity/kv_bytes": pool.num_bytes, "capacity/token_slots": pool.token_slots}
    if leaked_blocks is not None:
        metrics["kv/leaked_blocks"] = leaked_blocks
    if steps:
        metrics["requests/preemptions"] = sum(record.preemptions for record in records)
        metrics |= _steps(steps)
        metrics |= _memory([(step.end_s - step.start_s, step.pool) for step in steps if step.pool is not None])
        metrics |= _counters([step.counters for step in steps if step.counters is not None], duration)
    return metrics


def _prompt_tokens(record: RequestRecord) -> int:
    """Prompt tokens that were computed or found; of a prompt with several samples those of the first."""
    if record.computed_prompt_tokens is not None and not record.sample:
        return record.computed_prompt_tokens
    return record.prompt_tokens if record.token_times_s and not record.sample else 0


def _service_levels(log: RunLog, limits: Mapping[str, float]) -> dict[str, float]:
    """Goodput, and the shares of all submitted requests that completed within `limits`: those of ttft and tpot."""
    if not limits:
        return {}
    within = {name: [is_within(record, name, most) for record in log.records] for name, most in limits.items()}
    good = sum(map(all, zip(*within.values(), strict=True)))
    submitted = len(log.records) + len(log.refused)
    metrics: dict[str, float] = {}
    if log.duration_s > 0:
        metrics["slo/goodput_per_s"] = good / log.duration_s
    if submitted:
        metrics["slo/attainment"] = 100 * good / submitted
        metrics |= {f"slo/{name}_attainment": 100 * sum(found) / submitted for name, found in within.items()}
    return metrics


def _steps(steps: Sequence[StepRecord]) -> dict[str, float]:
    """What the steps computed, for how many sequences at once, and in which time."""
    recomputed = sum(step.recomputed_tokens for step in steps)
    prefill = sum(step.prefill_tokens for step in steps)
    computed = prefill + sum(step.decode_tokens for step in steps)
    running, seconds = [step.running for step in steps], [step.end_s - step.start_s for step in steps]
    busy = [step for step in steps if step.batch_seqs]
    metrics: dict[str, float] = {
        "tokens/prefill": prefill,
        "tokens/recomputed": recomputed,
        "engine/steps": len(busy),
        "engine/failed_passes": sum(step.failed_passes for step in steps),
        "capacity/peak_running": float(max(running)),
        "capacity/mean_running": _mean(running, seconds),
    }
    if computed:
        metrics["tokens/recomputed_share"] = 100 * recomputed / computed
    if busy:
        schedule = [step.schedule_ms for step in busy]
        metrics |= {
            "engine/step_ms_p50": float(np.percentile([(step.end_s - step.start_s) * 1000 for step in busy], 50)),
            "engine/schedule_ms_p50": float(np.percentile(schedule, 50)),
            "engine/schedule_ms_p99": float(np.percentile(schedule, 99)),
            "engine/batch_tokens_mean": float(np.mean([s.prefill_tokens + s.decode_tokens for s in busy])),
            "engine/batch_seqs_mean": float(np.mean([step.batch_seqs for step in busy])),
        }
    return metrics


def _memory(steps: Sequence[tuple[float, PoolStats]]) -> dict[str, float]:
    """Use of memory over steps of so many seconds; means are weighted by them."""
    if not steps:
        return {}
    seconds, pools = zip(*steps, strict=True)
    unused = [pool.internal_fragmentation if pool.blocks_in_use else 1.0 for pool in pools]
    return {
        "kv/shared_blocks_peak": max(pool.shared_blocks for pool in pools),
        "kv/block_utilization_mean": 100 * _mean([pool.block_utilization for pool in pools], seconds),
        "kv/block_utilization_peak": 100 * max(pool.block_utilization for pool in pools),
        "kv/token_utilization_mean": 100 * _mean([pool.token_utilization for pool in pools], seconds),
        "kv/internal_fragmentation_mean": 100 * _mean(unused, seconds),
    }


def _counters(steps: Sequence[PoolCounters], duration: float) -> dict[str, float]:
    """What the pool did, in all and per second."""
    if not steps:
        return {}
    total = {name: sum(getattr(step, name) for step in steps) for name in PoolCounters.__slots__}
    metrics: dict[str, float] = {f"kv/{name}": total[name] for name in total if name not in _NOT_METRICS}
    metrics["kv/prefix_hit_tokens"] = total["hit_tokens"]
    if duration > 0:
        metrics["kv/blocks_allocated_per_s"] = total["blocks_allocated"] / duration
        metrics["kv/blocks_freed_per_s"] = total["blocks_freed"] / duration
    if total["prompt_tokens"]:
        metrics["kv/prefix_hit_rate"] = total["hit_tokens"] / total["prompt_tokens"]
    return metrics


def _mean(values: Sequence[float], seconds: Sequence[float]) -> float:
    """The mean, weighted by time."""
    return float(np.average(values, weights=seconds)) if sum(seconds) > 0 else float(np.mean(values))


def _distribution(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p50": p50, f"{name}_p90": p90, f"{name}_p99": p99}
