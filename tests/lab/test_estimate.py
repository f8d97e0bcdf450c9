"""What a run says of the time it will take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.cli.compose import compose_run
from kvlab.lab.results.roofline import MachineRates
from kvlab.lab.run.estimate import estimate_s, estimate_sentence, in_words, is_worth_estimating
from kvlab.lab.run.plan import RunPlan, plan_run

FAST = MachineRates(read_bytes_per_s=1e12, flops_per_s=4e12, product_flops_per_s=2e12)


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return plan_run(compose_run(["model=qwen3_0_6b", "executor=cpu", "kv.num_blocks=1024"]).config)


def test_prompts_cost_products_and_outputs_steps(plan: RunPlan) -> None:
    body = plan.model.body_parameters
    prompts = sum(len(request.prompt_token_ids) for request in plan.requests)
    prefill = 1.3 * 2 * body * prompts / FAST.product_flops_per_s
    assert estimate_s(plan, FAST) > prefill
    one = [replace(each, sampling=replace(each.sampling, max_tokens=1)) for each in plan.requests]
    assert estimate_s(replace(plan, requests=one), FAST) == pytest.approx(prefill, rel=0.05)


def test_where_memory_is_slow_steps_read_weights(plan: RunPlan) -> None:
    slow = FAST._replace(read_bytes_per_s=1e9)
    outputs = sum(request.sampling.max_tokens for request in plan.requests)
    least = outputs / len(plan.requests) * plan.weights.parameters / 1e9
    assert least < estimate_s(plan, slow) < 3 * least


def test_a_long_run_is_told_what_would_be_quick(plan: RunPlan) -> None:
    crawling = MachineRates(1e7, 1e8)
    assert "Quick instead: model=qwen3_0_6b, or executor=simulated" in estimate_sentence(plan, crawling)
    assert "Quick" not in estimate_sentence(plan, FAST)
    assert "runs took 0.7 to 2.4 times what was estimated so" in estimate_sentence(plan, FAST)


def test_what_takes_no_time_is_not_estimated(plan: RunPlan) -> None:
    assert is_worth_estimating(plan)
    assert not is_worth_estimating(replace(plan, requests=plan.requests[:1]))
    simulated = compose_run(["model=qwen3_8b", "executor=simulated", "hardware=h100_sxm"]).config
    assert not is_worth_estimating(plan_run(simulated))


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.21, "3.2 s"), (40, "40 s"), (150, "2 min"), (3600, "60 min"), (20_000, "6 h")]
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
