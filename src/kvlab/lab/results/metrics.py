"""The metrics of a run, all computed from its records of requests and steps. Formulas: docs/metrics.md."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.config import SloConfig
from kvlab.core import TIER_COUNTERS, FinishReason, PoolCounters, RequestRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineReport
from kvlab.kv.sizing import PoolSize
from kvlab.lab.results.catalogue import TENANT_HITS
from kvlab.lab.results.load import offered_load
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.requests import is_within, latencies_ms

ATTAINMENT, GOODPUT = "slo/attainment", "slo/goodput_per_s"
_NOT_METRICS = ("prompt_tokens", "hit_tokens", "merged_blocks")  # of the counters; hits have a name of their own
_RETENTION = ("expired_blocks", "quota_evictions", "pinned_evictions", "pins_refused")  # where there is any
_MOST_TENANTS = 16
_METRIC_NAME = re.compile(r"[^\w. :-]")  # what no tracking store takes in a name


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
    if (load := offered_load(records, log.refused_s)) is not None:
        metrics |= {"load/offered_per_s": load.offered_per_s, "load/served_per_s": load.served_per_s}
    if slo is not None:
        metrics |= service_levels(log, slo.limits)
    if pool is not None:
        metrics |= {"capacity/kv_bytes": pool.num_bytes, "capacity/token_slots": pool.token_slots}
    if leaked_blocks is not None:
        metrics["kv/leaked_blocks"] = leaked_blocks
    if steps:
        metrics["requests/preemptions"] = sum(record.preemptions for record in records)
        metrics |= _steps(steps) | _memory(steps) | _counters(steps, duration) | _tenants(records)
    if log.engine_report is not None:
        metrics |= _reported(log.engine_report)
    return metrics


def _reported(report: EngineReport) -> dict[str, float]:
    """What an engine without steps said of itself, from its series: means over its samples, and what its counters
    gained.
    """
    columns = {name: np.asarray(values) for name, values in report.series.columns.items() if len(values)}
    gained = {name: float(values[-1] - values[0]) for name, values in columns.items()}
    metrics = dict(report.metrics)
    if "running" in columns:
        metrics["capacity/peak_running"] = float(columns["running"].max())
        metrics["capacity/mean_running"] = float(columns["running"].mean())
    if "kv_usage" in columns:
        metrics["kv/block_utilization_mean"] = 100 * float(columns["kv_usage"].mean())
        metrics["kv/block_utilization_peak"] = 100 * float(columns["kv_usage"].max())
    if "preemptions" in columns:
        metrics["requests/preemptions"] = gained["preemptions"]
    if "prefix_hits" in columns:
        metrics["kv/prefix_hit_tokens"] = gained["prefix_hits"]
        if gained.get("prefix_queries"):
            metrics["kv/prefix_hit_rate"] = gained["prefix_hits"] / gained["prefix_queries"]
    return metrics


def _prompt_tokens(record: RequestRecord) -> int:
    """Prompt tokens that were computed or found; of a prompt with several samples those of the first."""
    if record.computed_prompt_tokens is not None and not record.sample:
        return record.computed_prompt_tokens
    return record.prompt_tokens if record.token_times_s and not record.sample else 0


def service_levels(log: RunLog, limits: Mapping[str, float]) -> dict[str, float]:
    """Goodput, and the shares of all submitted requests that completed within `limits`: those of ttft and tpot."""
    if not limits:
        return {}
    within = {name: [is_within(record, name, most) for record in log.records] for name, most in limits.items()}
    good = sum(map(all, zip(*within.values(), strict=True)))
    submitted = len(log.records) + len(log.refused)
    metrics: dict[str, float] = {}
    if log.duration_s > 0:
        metrics[GOODPUT] = good / log.duration_s
    if submitted:
        metrics[ATTAINMENT] = 100 * good / submitted
        metrics |= {f"slo/{name}_attainment": 100 * sum(flags) / submitted for name, flags in within.items()}
    return metrics


def _steps(steps: StepLog) -> dict[str, float]:
    """What the steps computed, for how many sequences at once, and in which time."""
    recomputed, prefill = int(steps.column("recomputed_tokens").sum()), steps.column("prefill_tokens")
    tokens = prefill + steps.column("decode_tokens")
    running, sequences, seconds = steps.column("running"), steps.column("batch_seqs"), steps.seconds
    busy, computed = sequences > 0, int(tokens.sum())
    metrics: dict[str, float] = {
        "tokens/prefill": int(prefill.sum()),
        "tokens/recomputed": recomputed,
        "engine/steps": int(busy.sum()),
        "engine/failed_passes": int(steps.column("failed_passes").sum()),
        "capacity/peak_running": float(running.max()),
        "capacity/mean_running": _mean(running, seconds),
    }
    if computed:
        metrics["tokens/recomputed_share"] = 100 * recomputed / computed
    if busy.any():
        schedule = steps.column("schedule_ms")[busy]
        metrics |= {
            "engine/step_ms_p50": float(np.percentile(seconds[busy] * 1000, 50)),
            "engine/schedule_ms_p50": float(np.percentile(schedule, 50)),
            "engine/schedule_ms_p99": float(np.percentile(schedule, 99)),
            "engine/batch_tokens_mean": float(np.mean(tokens[busy])),
            "engine/batch_seqs_mean": float(np.mean(sequences[busy])),
        }
    return metrics


def speculation_metrics(steps: StepLog) -> dict[str, float]:
    """What became of the tokens that were proposed, for a run that proposes some."""
    names = ("decode_tokens", "proposed_tokens", "accepted_tokens")
    decoded, proposed, accepted = (int(steps.column(name).sum()) for name in names)
    metrics: dict[str, float] = {"speculation/proposed_tokens": proposed, "speculation/accepted_tokens": accepted}
    if proposed:
        metrics["speculation/acceptance_rate"] = 100 * accepted / proposed
    if decoded > proposed:
        metrics["speculation/tokens_per_step"] = 1 + accepted / (decoded - proposed)
    return metrics


def _memory(steps: StepLog) -> dict[str, float]:
    """Use of memory over the steps with a pool; means are weighted by their time. Ratios as PoolStats has them."""
    known = steps.column("has_pool") > 0
    if not known.any():
        return {}
    in_use, total, size, stored, shared = (
        steps.column(f"pool.{name}")[known]
        for name in ("blocks_in_use", "blocks_total", "block_size", "tokens_stored", "shared_blocks")
    )
    seconds, blocks = steps.seconds[known], _ratio(in_use, total)
    unused = np.where(in_use > 0, 1 - _ratio(stored, in_use * size), 1.0)
    return {
        "kv/shared_blocks_peak": int(shared.max()),
        "kv/block_utilization_mean": 100 * _mean(blocks, seconds),
        "kv/block_utilization_peak": 100 * float(blocks.max()),
        "kv/token_utilization_mean": 100 * _mean(_ratio(stored, total * size), seconds),
        "kv/internal_fragmentation_mean": 100 * _mean(unused, seconds),
    }


def _counters(steps: StepLog, duration: float) -> dict[str, float]:
    """What the pool did, in all and per second."""
    if not steps.column("has_counters").any():
        return {}
    total = {name: int(steps.column(f"counters.{name}").sum()) for name in PoolCounters._fields}
    metrics: dict[str, float] = {
        f"kv/{name}": total[name] for name in total if name not in (*_NOT_METRICS, *_RETENTION, *TIER_COUNTERS)
    }
    pinned = int(steps.column("pool.blocks_pinned").max())
    if pinned or any(total[name] for name in _RETENTION):
        metrics |= {"kv/pinned_blocks_peak": pinned} | {f"kv/{name}": total[name] for name in _RETENTION}
    metrics |= _tiers(steps, {name: total[name] for name in TIER_COUNTERS})
    metrics["kv/prefix_hit_tokens"] = total["hit_tokens"]
    if duration > 0:
        metrics["kv/blocks_allocated_per_s"] = total["blocks_allocated"] / duration
        metrics["kv/blocks_freed_per_s"] = total["blocks_freed"] / duration
    if total["prompt_tokens"]:
        metrics["kv/prefix_hit_rate"] = total["hit_tokens"] / total["prompt_tokens"]
    return metrics


def _tiers(steps: StepLog, total: Mapping[str, int]) -> dict[str, float]:
    """What went to memory behind the pool and came back, of each tier that held anything."""
    metrics: dict[str, float] = {}
    for tier in ("host", "disk"):
        held = int(steps.column(f"pool.{tier}_blocks").max())
        if held:
            metrics[f"kv/{tier}_blocks_peak"] = held
            metrics |= {f"kv/{name}": total[name] for name in TIER_COUNTERS if name.startswith(tier)}
    if metrics:
        metrics["kv/store_s"], metrics["kv/load_s"] = total["store_us"] / 1e6, total["load_us"] / 1e6
        names = ("failed_pages", "swapped_out_blocks", "swapped_in_blocks")
        metrics |= {f"kv/{name}": total[name] for name in names}
    return metrics


def _tenants(records: Sequence[RequestRecord]) -> dict[str, float]:
    """The hit rate of each salt, of those that have most prompt tokens; none where no request has one."""
    prompts, hits = Counter[str](), Counter[str]()
    for record in records:
        if record.salt is not None and record.scheduled_s is not None and not record.sample:
            prompts[record.salt] += record.prompt_tokens
            hits[record.salt] += record.cached_tokens
    rates = dict[str, float]()
    for salt, tokens in prompts.most_common(_MOST_TENANTS):
        name = plain = _METRIC_NAME.sub("_", salt)[:64]
        number = 1
        while name in rates:  # of another salt, which differs in what was replaced or cut
            number += 1
            name = f"{plain} {number}"
        rates[name] = hits[salt] / tokens
    return {f"{TENANT_HITS}{name}": rate for name, rate in rates.items()}


def _mean(values: NDArray[Any], seconds: NDArray[np.float64]) -> float:
    return float(np.average(values, weights=seconds)) if seconds.sum() > 0 else float(np.mean(values))


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Part by whole; 0 where there is no whole."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _distribution(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p50": p50, f"{name}_p90": p90, f"{name}_p99": p99}
