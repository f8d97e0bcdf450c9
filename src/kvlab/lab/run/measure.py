"""The figures of a run that was served."""

from __future__ import annotations

from kvlab.lab.explain.prompt_tokens import Reason
from kvlab.lab.results.fleet import duplicate_metrics, fleet_metrics, pull_metrics
from kvlab.lab.results.metrics import run_metrics, speculation_metrics
from kvlab.lab.results.roofline import roofline, run_costs
from kvlab.lab.run.drive import RunLog
from kvlab.lab.run.peer_plan import PeerPlan
from kvlab.lab.run.plan import RunPlan, planned_metrics
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.serve import Served
from kvlab.workloads.prefixes import prefix_tree


def measure(plan: RunPlan | PeerPlan, served: Served, profiler: Profiler, *, may_measure: bool) -> dict[str, float]:
    """The metrics of a run, by the names of docs/metrics.md. `may_measure`: the rates of this machine too, where
    they are not known.
    """
    log, slo = served.log, plan.config.slo
    own = plan if isinstance(plan, RunPlan) else None
    metrics = run_metrics(log, own.pool if own else None, leaked_blocks=served.leaked_blocks, slo=slo)
    if own is not None:
        if (replicas := own.config.fleet.replicas) > 1:
            metrics |= fleet_metrics(log.records, log.steps, replicas, log.transfers)
            if own.config.fleet.life:
                metrics |= {"fleet/retried": log.retried, "fleet/lost_tokens": log.lost_tokens}
            if log.store is not None:
                metrics["fleet/store_written_blocks"] = log.store.stored
                metrics["fleet/store_loaded_blocks"] = log.store.loaded
                metrics["fleet/store_hit_tokens"] = log.store.hits * own.pool.block_size
            if log.pulls is not None:
                metrics |= pull_metrics(log.pulls, log.pulled_hits * own.pool.block_size)
            if log.holdings is not None:
                metrics |= duplicate_metrics(log.holdings.duplicates)
                metrics["fleet/hit_rate_ceiling"] = prefix_tree(own.requests, own.pool.block_size).most_hit_rate
            if own.config.fleet.rules:
                metrics["fleet/replicas_mean"] = log.replica_s / max(log.duration_s, 1e-9)
                metrics["fleet/started"] = sum(scaled.event == "start" for scaled in log.scaled)
            pools = [replica.pool for replica in own.replicas]
            metrics["capacity/kv_bytes"] = sum(pool.num_bytes for pool in pools)
            metrics["capacity/token_slots"] = sum(pool.token_slots for pool in pools)
        if own.config.scheduler.speculation.method is not None:
            metrics |= speculation_metrics(log.steps)
        metrics |= _prompts(served) | _energy(own, log, metrics["tokens/output"])
        metrics |= planned_metrics(own) | _efficiency(own, log, may_measure=may_measure)
    return metrics | profiler.metrics()


def _energy(plan: RunPlan, log: RunLog, output_tokens: float) -> dict[str, float]:
    """The most that simulated devices can take for a token, where the power of all is known."""
    devices = [(replica.config.hardware, replica.config.executor.devices) for replica in plan.replicas]
    watts = [count * hardware.power_watts for hardware, count in devices if hardware is not None]
    if plan.is_real or not output_tokens or len(watts) < len(devices) or not all(watts):
        return {}
    joules = sum(watts) * log.duration_s
    if plan.config.fleet.rules:  # what it has stopped takes nothing; unequal ones count as the largest
        joules = min(joules, max(watts) * log.replica_s)
    return {"energy/output_token_j_most": joules / output_tokens}


def _prompts(served: Served) -> dict[str, float]:
    """Tokens of prompts by why they were computed, where it was looked at."""
    if served.prompts is None:
        return {}
    reasons = (reason for reason in Reason if reason is not Reason.FOUND)
    return {f"prompt/{reason.name.lower()}_tokens": served.prompts.get(reason, 0) for reason in reasons}


def _efficiency(plan: RunPlan, log: RunLog, *, may_measure: bool) -> dict[str, float]:
    """The share of the roofline that was reached; none on a GPU, or without this machine's rates."""
    if plan.device != "cpu" or not log.steps:
        return {}
    import torch  # this late: simulations do without

    from kvlab.lab.machine_rates import known_rates, measure_and_keep

    torch.set_num_threads(plan.cpu_threads)  # of all ranks, which have ended
    dtype = plan.config.executor.products
    rates = known_rates(dtype) or (measure_and_keep(dtype) if may_measure else None)
    return {} if rates is None else {"efficiency/roofline_share": roofline(run_costs(plan), log.steps, rates).share}
