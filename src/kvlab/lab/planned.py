"""What the planner says of a run's own workload, to stand beside what the run measures."""

from __future__ import annotations

from kvlab.lab.build import RunPlan
from kvlab.lab.capacity import sequences_that_fit
from kvlab.workloads.prompts import grown_lengths


def planned_metrics(plan: RunPlan) -> dict[str, float]:
    """The planner's figures for a run's sequences, each at the length it may grow to, with memory of its own."""
    grown = grown_lengths(plan.requests)
    lengths = [grown[request.request_id] for request in plan.requests for _ in range(request.sampling.n)]
    fit = sequences_that_fit(plan.pool, lengths)
    return {
        "capacity/mean_length": sum(lengths) / len(lengths),
        "capacity/planned_sequences": fit,
        "capacity/planned_running": min(fit, plan.config.scheduler.max_batch_size, len(lengths)),
        "capacity/weight_bytes": plan.weights.total,
        "capacity/working_bytes": plan.working.peak,
    }
