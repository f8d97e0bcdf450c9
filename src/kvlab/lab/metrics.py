"""The figures of a run, all computed from its request and step log. Formulas: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvlab.core import FinishReason, PoolCounters, PoolStats, Sequence, StepRecord
from kvlab.kv.sizing import PoolSize
from kvlab.lab.drive import RunLog, completed

_KV_COUNTERS = (
    "blocks_allocated",
    "blocks_freed",
    "evictions",
    "evicted_blocks",
    "cow_copies",
    "same_step_hit_tokens",
    "recompute_hit_tokens",
)


def run_metrics(log: RunLog, pool: PoolSize, *, leaked_blocks: int) -> dict[str, float]:
    """Every metric of a run by name. One that has no value (a latency with no request) is absent."""
    done, duration, steps = completed(log), log.duration_s, log.steps

    def total(name: str) -> int:
        return sum(getattr(step, name) for step in steps)

    prompt_tokens = sum(min(s.high_water, s.num_prompt_tokens) for s in log.sequences if s.index == 0)
    output_tokens = sum(s.num_output_tokens for s in log.sequences)
    metrics: dict[str, float] = {
        "duration_s": duration,
        "capacity/kv_bytes": pool.num_bytes,
        "capacity/token_slots": pool.token_slots,
        "requests/completed": len(done),
        "requests/failed": sum(s.finish_reason is FinishReason.FAILED for s in log.sequences),
        "requests/refused": len(log.refused),
        "requests/preemptions": sum(s.preemptions for s in log.sequences),
        "tokens/prompt": prompt_tokens,
        "tokens/output": output_tokens,
        "tokens/prefill": total("prefill_tokens"),
        "tokens/recomputed": total("recomputed_tokens"),
        "kv/leaked_blocks": leaked_blocks,
        "engine/steps": sum(step.batch_seqs > 0 for step in steps),
        "engine/failed_passes": total("failed_passes"),
    }
    computed = total("prefill_tokens") + total("decode_tokens")
    if computed:
        metrics["tokens/recomputed_share"] = 100 * total("recomputed_tokens") / computed
    if duration > 0:
        metrics["throughput/output_tokens_per_s"] = output_tokens / duration
        metrics["throughput/total_tokens_per_s"] = (prompt_tokens + output_tokens) / duration
        metrics["throughput/requests_per_s"] = len(done) / duration
    if any(step.batch_seqs for step in steps):
        metrics |= _running(steps) | _engine([step for step in steps if step.batch_seqs])
        metrics |= _memory([(step.end_s - step.start_s, step.pool) for step in steps if step.pool is not None])
    metrics |= _counters([step.counters for step in steps if step.counters is not None], duration)
    for name, values in latencies_ms(done).items():
        metrics |= _distribution(f"latency/{name}_ms", values)
    return metrics


def latencies_ms(sequences: Iterable[Sequence]) -> dict[str, list[float]]:
    """Latencies of completed sequences in milliseconds, counted from the scheduled arrival.

    ttft: to the first token; e2el: to the last; tpot: (e2el - ttft) / (n - 1) for n > 1 tokens; itl: every
    gap between tokens, pooled; queue: to the first admission.
    """
    values: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "itl", "e2el", "queue")}
    for sequence in sequences:
        arrival, times = sequence.request.arrival_s, sequence.token_times_s
        values["ttft"].append((times[0] - arrival) * 1000)
        values["e2el"].append((times[-1] - arrival) * 1000)
        values["queue"].append(((sequence.scheduled_s or arrival) - arrival) * 1000)
        gaps = np.diff(times) * 1000
        if len(gaps):
            values["tpot"].append(float(gaps.mean()))
            values["itl"].extend(gaps.tolist())
    return values


def _running(steps: list[StepRecord]) -> dict[str, float]:
    """Sequences that run at once; the mean is weighted by each step's time."""
    running = [step.running for step in steps]
    weights = [step.end_s - step.start_s for step in steps]
    return {
        "capacity/peak_running": float(max(running)),
        "capacity/mean_running": float(np.average(running, weights=weights)),
    }


def _memory(steps: list[tuple[float, PoolStats]]) -> dict[str, float]:
    """Use of memory over steps of so many seconds; means are weighted by them."""
    if not steps:
        return {}
    weights, pools = zip(*steps, strict=True)
    blocks = [pool.block_utilization for pool in pools]
    unused = [pool.internal_fragmentation if pool.blocks_in_use else 1.0 for pool in pools]
    return {
        "kv/shared_blocks_peak": max(pool.shared_blocks for pool in pools),
        "kv/block_utilization_mean": 100 * float(np.average(blocks, weights=weights)),
        "kv/block_utilization_peak": 100 * max(blocks),
        "kv/token_utilization_mean": 100 * float(np.average([p.token_utilization for p in pools], weights=weights)),
        "kv/internal_fragmentation_mean": 100 * float(np.average(unused, weights=weights)),
    }


def _counters(steps: list[PoolCounters], duration: float) -> dict[str, float]:
    """What the pool did, in all and per second."""
    if not steps:
        return {}
    total = {name: sum(getattr(step, name) for step in steps) for name in PoolCounters.__slots__}
    metrics: dict[str, float] = {f"kv/{name}": total[name] for name in _KV_COUNTERS}
    metrics["kv/prefix_hit_tokens"] = total["hit_tokens"]
    if duration > 0:
        metrics["kv/blocks_allocated_per_s"] = total["blocks_allocated"] / duration
        metrics["kv/blocks_freed_per_s"] = total["blocks_freed"] / duration
    if total["prompt_tokens"]:
        metrics["kv/prefix_hit_rate"] = total["hit_tokens"] / total["prompt_tokens"]
    return metrics


def _engine(steps: list[StepRecord]) -> dict[str, float]:
    whole = [(step.end_s - step.start_s) * 1000 for step in steps]
    schedule = [step.schedule_ms for step in steps]
    return {
        "engine/step_ms_p50": float(np.percentile(whole, 50)),
        "engine/schedule_ms_p50": float(np.percentile(schedule, 50)),
        "engine/schedule_ms_p99": float(np.percentile(schedule, 99)),
        "engine/batch_tokens_mean": float(np.mean([s.prefill_tokens + s.decode_tokens for s in steps])),
        "engine/batch_seqs_mean": float(np.mean([step.batch_seqs for step in steps])),
    }


def _distribution(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p50": p50, f"{name}_p90": p90, f"{name}_p99": p99}
