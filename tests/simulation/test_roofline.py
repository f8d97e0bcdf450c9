"""The roofline's formula against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.remarks import remarks_on_devices
from kvlab.models.config import DecoderConfig
from kvlab.models.families import decoder_config
from kvlab.models.sparse import SparseConfig
from kvlab.simulation.timings.base import Deployment
from kvlab.simulation.timings.roofline import LAUNCHES, RooflineTiming
from tests.support.model import tiny_config
from tests.support.plans import composed

#: Nothing but memory and arithmetic, at rates that are easy to divide by.
PLAIN = HardwareConfig(
    name="plain",
    memory="1GiB",
    bandwidth_gb_s=1.0,
    tflops={"bfloat16": 1.0},
    link_gb_s=1.0,
    bandwidth_efficiency=1.0,
    compute_efficiency=1.0,
    link_efficiency=1.0,
    launch_us=0.0,
    collective_us=0.0,
)


def windowed(model: DecoderConfig, *windows: int | None) -> DecoderConfig:
    return replace(model, layers=tuple(replace(model.layers[0], sliding_window=window) for window in windows))


def timing(model: DecoderConfig, hardware: HardwareConfig = PLAIN, devices: int = 1) -> RooflineTiming:
    body, head = 2 * model.body_parameters, 2 * model.vocab_size * model.hidden_size
    kv_bytes = model.kv_spec("bfloat16").bytes_per_token
    return RooflineTiming(model, hardware, devices, "bfloat16", body, head, kv_bytes)


def counts(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def attended_by_counting(model: DecoderConfig, new: int, length: int) -> tuple[int, int]:
    """Tokens that are read and pairs, summed over the layers, one query after the other."""
    read = pairs = 0
    for layer in model.layers:
        window = layer.sliding_window or length
        seen: set[int] = set()
        for position in range(length - new, length):
            keys = range(max(0, position + 1 - window), position + 1)
            seen.update(keys)
            pairs += len(keys)
        read += len(seen)
    return read, pairs


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 3, 3, 8)])
@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 7), (5, 5), (5, 9), (12, 40), (40, 40)])
def test_what_a_sequence_attends_to_is_exact(windows: tuple[int | None, ...], new: int, length: int) -> None:
    model = windowed(tiny_config(), *windows)
    read, pairs = timing(model)._attended(counts(new), counts(length))
    assert (read * len(windows), pairs * len(windows)) == pytest.approx(attended_by_counting(model, new, length))


def test_a_decode_step_reads_every_weight_and_the_context() -> None:
    model = tiny_config()
    step = timing(model).step(counts(1, 1), counts(10, 20), sampled=2)
    weights = model.body_parameters + model.vocab_size * model.hidden_size
    assert step.linear == pytest.approx(weights * 2 / 1e9)
    assert step.attention == pytest.approx((2 + 30) * model.kv_spec("bfloat16").bytes_per_token / 1e9)
    assert step.total == step.linear + step.attention


def test_a_long_prefill_is_bound_by_arithmetic_and_without_logits_skips_the_output_layer() -> None:
    model = tiny_config()
    tokens = 100_000
    step = timing(model).step(counts(tokens), counts(tokens), sampled=0)
    assert step.linear == pytest.approx(2 * model.body_parameters * tokens / 1e12)
    pairs = tokens * (tokens + 1) / 2
    assert step.attention == pytest.approx(4 * model.num_heads * model.head_dim * model.num_layers * pairs / 1e12)


@pytest.mark.parametrize(
    ("weights", "rates", "faster"),
    [("fp8", {"fp8": 4.0}, 4.0), ("fp8", {}, 1.0), ("nvfp4", {"fp4": 8.0}, 8.0), ("nvfp4", {"fp8": 4.0}, 1.0)],
)
def test_products_have_a_rate_of_their_own_where_the_device_has_one(
    weights: str, rates: dict[str, float], faster: float
) -> None:
    hardware = replace(PLAIN, tflops={"bfloat16": 1.0} | rates)
    settings = composed("model=qwen3_8b", f"executor.weights={weights}")
    model = decoder_config(settings.model)
    deployment = Deployment(settings, model, hardware, 1.0, model.body_parameters, 0, 0)
    fast = RooflineTiming.of(deployment).step(counts(10_000), counts(10_000), sampled=0)
    plain = replace(timing(model), body_bytes=0).step(counts(10_000), counts(10_000), sampled=0)
    assert fast.linear == pytest.approx(plain.linear / faster)
    assert fast.attention == plain.attention
    alone = RooflineTiming.of(deployment).step(counts(1), counts(1), sampled=0)
    assert alone.linear == pytest.approx(model.body_parameters / 1e9)  # a byte of each is read


def test_experts_in_nvfp4_are_multiplied_in_fp4_and_attention_in_16_bits() -> None:
    settings = composed("model=minimax_m2", "executor.weights=nvfp4")
    model = decoder_config(settings.model, simulated=True)
    assert isinstance(model, SparseConfig)
    seconds = []
    for rates in ({}, {"fp4": 4.0}):
        hardware = replace(PLAIN, tflops={"bfloat16": 1.0} | rates)
        deployed = RooflineTiming.of(Deployment(settings, model, hardware, 1.0, 1, 0, 0))
        seconds.append(deployed.step(counts(10_000), counts(10_000), sampled=0).linear)
    chosen = 62 * 8 * 3 * 3072 * 1536
    assert seconds[0] - seconds[1] == pytest.approx(2 * chosen * 10_000 / 1e12 * 3 / 4)


def test_devices_divide_the_work_and_add_all_reduces() -> None:
    model = tiny_config()
    one, two = (timing(model, devices=devices).step(counts(1), counts(50), 1) for devices in (1, 2))
    assert [two.linear, two.attention] == pytest.approx([one.linear / 2, one.attention / 2])
    assert one.links == 0
    # Two all-reduces per layer; in each a device sends half of the token's numbers twice.
    assert two.links == pytest.approx(2 * model.num_layers * model.hidden_size * 2 / 1e9)


def test_in_a_mesh_two_devices_have_one_link() -> None:
    model, mesh = tiny_config(), replace(PLAIN, link_peers=7)
    links = {
        (hardware.link_peers, devices): timing(model, hardware, devices).step(counts(64), counts(64), 1).links
        for hardware in (mesh, PLAIN)
        for devices in (2, 4, 8)
    }
    ratios = [links[7, devices] / links[0, devices] for devices in (2, 4, 8)]
    assert ratios == pytest.approx([7, 7 / 3, 1])


def test_over_pcie_more_devices_share_their_paths() -> None:
    model, shared = tiny_config(), replace(PLAIN, links_shared=True, collective_us=3.0)
    own = replace(shared, links_shared=False)
    links = {
        (hardware.links_shared, devices): timing(model, hardware, devices).step(counts(64), counts(64), 1).links
        for hardware in (shared, own)
        for devices in (2, 8)
    }
    assert links[True, 2] == links[False, 2]
    assert links[True, 8] == pytest.approx(4 * links[False, 8])


def test_launches_cost_the_same_whatever_is_computed() -> None:
    model = tiny_config()
    hardware = replace(PLAIN, launch_us=2.0, collective_us=5.0)
    step = timing(model, hardware, devices=2).step(counts(1, 1, 7), counts(5, 6, 7), 2)
    assert step.launches == pytest.approx(model.num_parts * LAUNCHES * 2e-6)
    assert step.links > 2 * model.num_layers * 5e-6


def test_the_host_costs_beside_the_device_or_behind_it() -> None:
    framework = FrameworkConfig(step_us=100.0, sequence_us=3.0, token_us=0.5)
    assert framework.step_s(0.001, sequences=3, tokens=10, layers=2) == pytest.approx(0.001114)
    assert replace(framework, overlap=True).step_s(0.001, sequences=3, tokens=10, layers=2) == 0.001
    assert replace(framework, overlap=True).step_s(1e-6, sequences=3, tokens=10, layers=2) == pytest.approx(114e-6)
    launched = replace(framework, prompts_us=5000.0)
    assert launched.step_s(0.001, sequences=3, tokens=10, layers=2) == pytest.approx(0.005114)
    assert launched.step_s(0.009, sequences=3, tokens=10, layers=2) == pytest.approx(0.009114)
    assert launched.step_s(0.001, sequences=3, tokens=3, layers=2) == framework.step_s(
        0.001, sequences=3, tokens=3, layers=2
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("hardware=h100_sxm executor.tensor_parallel=8", False),
        ("hardware=h100_sxm executor.tensor_parallel=16", True),
        ("hardware=h100_sxm executor.tensor_parallel=16 hardware.link_gb_s=50", False),
        ("hardware=gb200 executor.tensor_parallel=16", False),
    ],
)
def test_links_among_servers_are_asked_for(words: str, says: bool) -> None:
    config = composed(
        "executor=simulated",
        "executor.timing=roofline",
        "model=qwen3_8b",
        "workload.num_requests=1",
        *words.split(),
    )
    plan = plan_run(config)
    assert plan.timing is not None
    assert any("of one server" in remark for remark in remarks_on_devices(plan, plan.timing)) == says
