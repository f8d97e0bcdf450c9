"""How long a run will compute here, before it does: from the rates that were measured for this machine."""

from collections.abc import Sequence

from kvlab.config import RunConfig
from kvlab.errors import KvlabError
from kvlab.lab.results.roofline import MachineRates, run_costs
from kvlab.lab.run.plan import RunPlan, plan_run, planned_metrics
from kvlab.peers.engines import is_peer

LONG_S = 300.0  # from here on a run is said to be long
_WORTH_MEASURING = 2e12  # operations: of fewer nobody waits, and two seconds of measuring are not worth it
_OVERHEAD = 1.3  # what attention, sampling and scheduling add to products and reading (experiments/run_estimates)
#: Time taken over estimate in that experiment, beside other work too.
OFF_BY = (0.7, 2.4)
_LEAST_REQUESTS = 16  # of which one memory still runs visibly more at once than another


def is_worth_estimating(plan: RunPlan) -> bool:
    """Whether a run computes so much here that a user should know how long."""
    tokens = sum(
        len(request.prompt_token_ids) + request.sampling.n * request.expected_tokens for request in plan.requests
    )
    return plan.device == "cpu" and 2 * plan.model.body_parameters * tokens > _WORTH_MEASURING


def estimate_s(plan: RunPlan, rates: MachineRates) -> float:
    """Seconds of computing: the prompts' products at the rate of large ones; then steps of as many sequences as
    fit, each of which reads the weights and the K and V of its contexts, or multiplies, whichever takes longer.
    What prefixes share is not counted off, and waiting for arrivals not added.
    """
    costs, model = run_costs(plan), plan.model
    flops_per_s = rates.product_flops_per_s or rates.flops_per_s
    body, head = model.body_parameters, model.vocab_size * model.hidden_size
    prompts = sum(len(request.prompt_token_ids) for request in plan.requests)
    outputs = sum(request.expected_tokens * request.sampling.n for request in plan.requests)
    figures = planned_metrics(plan)
    batch = max(1.0, figures["capacity/planned_running"])
    context = batch * figures["capacity/mean_length"] * costs.kv_bytes_per_token
    reading = ((body + head) * costs.bytes_per_weight + context) / rates.read_bytes_per_s
    step = max(reading, 2 * (body + head) * batch / flops_per_s)
    return _OVERHEAD * (2 * body * prompts / flops_per_s + outputs / batch * step)


def in_words(seconds: float) -> str:
    """As `40 s`, `12 min` or `3 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.0f} h"


def estimate_sentence(plan: RunPlan, rates: MachineRates) -> str:
    """What a user should know before the run; of a long one, what would be quick instead."""
    seconds, (least, most) = estimate_s(plan, rates), OFF_BY
    text = (
        f"about {in_words(seconds)} of computing on this machine, from its measured rates; runs took {least:g} to "
        f"{most:g} times what was estimated so"
    )
    if seconds < LONG_S:
        return text
    return f"{text}. Quick instead: model=qwen3_0_6b, or executor=simulated hardware=h100_sxm"


def requests_within(configs: Sequence[RunConfig], seconds: float) -> tuple[int, float] | None:
    """How many requests these runs compute here, one run after another, in `seconds`: a multiple of 8; and the
    seconds that all would take. None where they take no longer, and where that is not estimated.
    """
    try:
        plans = [plan_run(config) for config in configs if not is_peer(config.engine.kind)]
    except KvlabError:  # which its run will say
        return None
    if not any(map(is_worth_estimating, plans)):
        return None
    from kvlab.lab.machine_rates import rates_here  # this late, since it imports torch

    executor, asked = configs[0].executor, configs[0].workload.num_requests
    rates = rates_here(executor.products, executor.all_threads)
    needed = sum(estimate_s(plan, rates) for plan in plans)
    count = max(_LEAST_REQUESTS, int(asked * seconds / needed) // 8 * 8)
    return None if count >= asked else (count, needed)
