"""The figures of a run that was served."""

from kvlab.lab.results.fleet import fleet_metrics
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics, speculation_metrics
from kvlab.lab.results.roofline import roofline, run_costs
from kvlab.lab.run.peer_plan import Plan
from kvlab.lab.run.plan import RunPlan, planned_metrics
from kvlab.lab.run.profile import Profiler
from kvlab.lab.run.prompt_tokens import Reason
from kvlab.lab.run.serve import Served


def measure(plan: Plan, served: Served, profiler: Profiler, *, may_measure: bool) -> dict[str, float]:
    """The metrics of a run, by the names of docs/metrics.md. `may_measure`: the rates of this machine too, where
    they are not known.
    """
    log, slo, own = served.log, plan.config.slo, plan.own
    metrics = run_metrics(log, own.pool if own else None, leaked_blocks=served.leaked_blocks, slo=slo)
    if own is not None:
        if log.fleet is not None:
            metrics |= fleet_metrics(log, log.fleet, [replica.pool for replica in own.replicas], own.requests)
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
    if log.fleet is not None and log.fleet.replica_s is not None:
        # What it has stopped takes nothing; unequal ones count as the largest.
        joules = min(joules, max(watts) * log.fleet.replica_s)
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
