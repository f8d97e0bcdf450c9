"""The roofline of a run, on a model and a log small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.engine.build import plan_engine
from kvlab.kernels.cpu.native import paths
from kvlab.lab.results.roofline import MachineRates, RunCosts, StepCost, roofline, run_costs
from kvlab.models.config import DecoderConfig, LayerConfig, RopeConfig
from tests.lab.test_metrics import step
from tests.support.plans import compose_run

LAYER = LayerConfig(RopeConfig(theta=1e4))
MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    layers=(LAYER, LAYER),
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    attention_scale=0.5,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    eos_token_ids=(),
)
HEAD = 100 * 8
# Of a layer: q and o 8 x 16 each, k and v 8 x 8 each, three of 8 x 16, two norms; one norm at the end.
BODY = 2 * (2 * 128 + 2 * 64 + 3 * 128 + 2 * 8) + 8
KV = 2 * 2 * 2 * 4 * 2  # K and V, layers, heads, dim, bytes
COSTS = RunCosts(MODEL, bytes_per_weight=2, kv_bytes_per_token=KV)


def test_a_decode_step_reads_all_weights_and_its_contexts() -> None:
    decode = step(0, 1, running=3, decode_tokens=3, sampled_tokens=3, context_tokens=30, attended_tokens=30)
    assert COSTS.step(decode) == StepCost(
        num_bytes=2 * (BODY + HEAD) + KV * (30 + 3),
        flops=2 * 3 * (BODY + HEAD) + 2 * (4 * 4 * 4 * 30),
    )


def test_a_chunk_that_ends_no_prompt_has_no_logits() -> None:
    chunk = step(0, 1, prefill_tokens=5, context_tokens=5, attended_tokens=15)
    assert COSTS.step(chunk) == StepCost(2 * BODY + KV * (5 + 5), 2 * 5 * BODY + 2 * (4 * 4 * 4 * 15))


def test_embeddings_of_their_own_are_not_read() -> None:
    untied = replace(COSTS, model=replace(MODEL, tie_word_embeddings=False))
    decode = step(0, 1, decode_tokens=1, sampled_tokens=1, context_tokens=9, attended_tokens=9)
    assert untied.step(decode) == COSTS.step(decode)


def test_a_window_limits_what_its_layers_read_and_attend_to() -> None:
    sliding = replace(COSTS, model=replace(MODEL, layers=(LAYER, replace(LAYER, sliding_window=4))))
    long = step(0, 1, running=2, decode_tokens=2, sampled_tokens=2, context_tokens=60, attended_tokens=60)
    saved = COSTS.step(long).num_bytes - sliding.step(long).num_bytes
    assert saved == KV / 2 * (60 - (2 * 4 + 2))
    assert COSTS.step(long).flops - sliding.step(long).flops == 4 * 4 * 4 * (60 - 2 * 4)
    short = step(0, 1, running=2, decode_tokens=2, sampled_tokens=2, context_tokens=6, attended_tokens=6)
    assert sliding.step(short) == COSTS.step(short)


def test_smaller_weights_are_read_faster_and_computed_as_fast() -> None:
    decode = step(0, 1, decode_tokens=1, sampled_tokens=1, context_tokens=9, attended_tokens=9)
    whole, half = COSTS.step(decode), replace(COSTS, bytes_per_weight=1).step(decode)
    assert whole.num_bytes - half.num_bytes == BODY + HEAD
    assert whole.flops == half.flops


def test_each_step_is_bound_by_what_takes_it_longer() -> None:
    by_memory = step(0, 2, decode_tokens=1, sampled_tokens=1, context_tokens=9, attended_tokens=9)
    by_arithmetic = step(2, 3, prefill_tokens=60, sampled_tokens=1, context_tokens=60, attended_tokens=1830)
    release = step(3, 3, running=0)
    first, second = COSTS.step(by_memory), COSTS.step(by_arithmetic)
    rates = MachineRates(read_bytes_per_s=10_000, flops_per_s=50_000)
    found = roofline(COSTS, [by_memory, by_arithmetic, release], rates)
    assert found.memory_s == pytest.approx(first.num_bytes / 10_000)
    assert found.bound_s == pytest.approx(found.memory_s + second.flops / 50_000)
    assert found.steps_s == 3
    assert found.share == pytest.approx(100 * found.bound_s / 3)


def test_a_run_that_computed_nothing_reached_nothing() -> None:
    assert roofline(COSTS, [], MachineRates(1.0, 1.0)).share == 0


@pytest.mark.parametrize("weights", ["auto", "plain"])
def test_weights_count_as_they_are_stored(weights: str) -> None:
    """auto: in 12 bits where products are computed in tiles."""
    plan = plan_engine(compose_run("model=qwen3_tiny", "executor=cpu", f"executor.weights={weights}"))
    compact = weights == "auto" and paths().tiles
    assert plan.weights_format == ("compact" if compact else "plain")
    each = run_costs(plan).bytes_per_weight
    assert each == 1.5 if compact else each >= 2
