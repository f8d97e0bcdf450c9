"""The planner beside what vLLM reported at its start, version by version."""

from __future__ import annotations

from itertools import chain

import pytest

from experiments.planner_vs_vllm.run import Case, cases
from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.engine.build import build_engine, plan_engine
from kvlab.errors import CapacityError, ConfigError
from kvlab.planning.devices import lacking_for_steps, plan_on_devices
from kvlab.planning.startup import Startup, graph_bytes, startup
from kvlab.simulation.accuracy import PLANNED
from tests.support.plans import composed

MIB = 2**20
COLD = 0.1  # a start that found its kernels compiled counts less than the plan, which cannot know it


def test_as_many_blocks_as_vllm_reported() -> None:
    today = [case for case in cases() if case.version[0].isdigit()]
    assert len(today) == 13
    assert {case: case.ratio for case in today} == {case: pytest.approx(1, abs=_bound(case)) for case in today}
    assert sorted(chain.from_iterable(PLANNED.values())) == sorted(round(case.ratio, 3) for case in today)


def _bound(case: Case) -> float:
    if case.version == "0.29.0":
        return COLD
    return 0.03 if case.version == "0.28.0" or "LMCache" in case.address else 0.01


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.11.0", Startup(38, unsure=True)),  # 14 with FlashInfer
        ("0.11.1", Startup(38)),
        ("0.15.1", Startup(38)),
        ("0.16.0", Startup(38, compiles=True)),
        ("0.19", Startup(14, 128, compiles=True)),
        ("0.21.0", Startup(14, compiles=True, graphs=True)),
        ("0.28.0", Startup(2, compiles=True, counts=True)),
        ("0.32.0", Startup(2, compiles=True, graphs=True, counts=True)),
        (None, Startup(14, compiles=True, graphs=True, counts=True)),
    ],
)
def test_a_version_counts_what_its_source_says(version: str | None, expected: Startup) -> None:
    assert startup(FrameworkConfig(version=version)) == expected


@pytest.mark.parametrize(
    ("version", "flashinfer", "expected"),
    [
        ("0.10.0", True, Startup(14)),  # as in vLLM's Docker images
        ("0.19", True, Startup(14, compiles=True)),
        ("0.21.0", False, Startup(14, 128, compiles=True, graphs=True)),
        ("0.28.0", True, Startup(2, compiles=True, counts=True)),  # which samples without top-k at its start
        ("0.33.0", False, Startup(6, 128, compiles=True, graphs=True, counts=True)),
    ],
)
def test_a_sampler_of_flashinfer_counts_less(version: str, flashinfer: bool, expected: Startup) -> None:
    assert startup(FrameworkConfig(version=version, flashinfer_sampler=flashinfer)) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.10.0", Startup(38)),
        ("0.21.0", Startup(14, 128, compiles=True, graphs=True)),
        (None, Startup(6, 128, compiles=True, graphs=True, counts=True)),
    ],
)
def test_flashinfer_samples_on_nvidias_devices_alone(version: str | None, expected: Startup) -> None:
    amd = HardwareConfig("mi300x", "196592MiB", cuda=False)
    assert startup(FrameworkConfig(version=version), amd) == expected
    assert startup(FrameworkConfig(version=version, flashinfer_sampler=True), amd) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19", Startup(14, 128)),
        ("0.21.0", Startup(14)),
        ("0.28.0", Startup(2, counts=True)),
        (None, Startup(14, counts=True)),
    ],
)
def test_nothing_is_compiled_or_captured_without_graphs(version: str | None, expected: Startup) -> None:
    assert startup(FrameworkConfig(version=version, cuda_graphs=False)) == expected


def test_tensorrt_llm_is_refused_on_devices_of_others() -> None:
    with pytest.raises(ConfigError, match=r"framework=trtllm: runs on NVIDIA's devices alone, and hardware=mi300x"):
        composed("executor=simulated", "hardware=mi300x", "framework=trtllm", "model=llama3_1_8b")


def test_synchronous_vllm_counts_as_before() -> None:
    assert startup(FrameworkConfig(name="vllm_synchronous")) == Startup()


def test_tensorrt_llm_gives_the_cache_a_share_of_what_weights_and_steps_leave() -> None:
    """A start of TensorRT-LLM 0.20.0 that a user published (NVIDIA/TensorRT-LLM 6294): 860,320 tokens."""
    settings = (
        *("executor=simulated", "framework=trtllm", "hardware=h100_sxm", "model=llama3_1_8b"),
        *("executor.dtype=bfloat16", "executor.weights=fp8", "kv.dtype=fp8_e4m3"),
        *("scheduler.max_batched_tokens=23552", "scheduler.max_batch_size=4096"),
    )
    tokens = {}
    for share in (0.4, 0.8):
        pool = plan_engine(composed(*settings, f"executor.memory_utilization={share}")).pool
        tokens[share] = pool.num_blocks * pool.block_size
    assert tokens[0.8] == pytest.approx(860_320, rel=0.04)
    assert tokens[0.4] == pytest.approx(tokens[0.8] / 2, abs=pool.block_size)
    two = plan_engine(composed(*settings, "executor.memory_utilization=0.8", "executor.tensor_parallel=2")).pool
    assert two.num_blocks * two.block_size > 2.1 * tokens[0.8]  # the weights are held once


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ("framework=sglang", False),
        ("framework=sglang executor.memory_utilization=0.9", False),  # 7.9 GiB for 3.7
        ("framework=sglang executor.memory_utilization=0.99", True),
        ("framework=sglang executor.memory_utilization=0.99 kv.memory=1GiB", False),
        ("framework=vllm executor.memory_utilization=0.99", False),  # whose share counts a step
    ],
)
def test_a_share_that_leaves_sglangs_steps_too_little_is_named(settings: str, lacks: bool) -> None:
    common = ("executor=simulated", "hardware=h100_sxm", "model=llama3_1_8b", "executor.dtype=bfloat16")
    config = composed(*common, *settings.split())
    assert config.hardware is not None
    working = plan_on_devices(config, config.hardware).working
    text = lacking_for_steps(config, config.hardware, working)
    assert (text is not None) == lacks
    assert not lacks or "leaves 804.1 MiB of each device for steps, which may need 3.7 GiB" in str(text)


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"framework.version=newest: must be a version, as 0.24.0"):
        startup(FrameworkConfig(version="newest"))


def test_graphs_are_those_that_vllm_captures() -> None:
    # PIECEWISE=51 (largest=512), FULL=35 (largest=256), as logs of 256 sequences have it; 35 and 19 of 128.
    assert graph_bytes(256, 2048, 5120 * 2) == (51 + 35) * 20 * MIB
    assert graph_bytes(128, 2048, 4096 * 2) == (35 + 19) * 20 * MIB
    assert graph_bytes(256, 2048, 512) == (51 + 35) * 2 * MIB  # small tensors share segments of 2 MiB
    assert graph_bytes(1, 2048, 8192) == (2 + 1) * 2 * MIB


def test_a_ledger_that_this_machine_cannot_hold_is_named() -> None:
    plan = plan_engine(composed("executor=simulated", "hardware=h100_sxm", f"kv.num_blocks={10**15}"))
    with pytest.raises(CapacityError, match=f"ledger of {10**15:,} blocks takes more memory than this machine has"):
        build_engine(plan)
