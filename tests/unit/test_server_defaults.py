"""The defaults of serving frameworks by the memory of a device."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from kvlab.config import HardwareConfig
from kvlab.config.server_defaults import keeps_states_within_steps, server_defaults, state_multiple
from kvlab.config.values import parse_bytes
from kvlab.errors import ConfigError
from kvlab.paths import CONF
from tests.support.plans import compose_run, composed

DEVICES = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "here")


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_has_what_a_run_asks_of_it(name: str) -> None:
    settings = OmegaConf.to_container(OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
    hardware = HardwareConfig(**settings)  # type: ignore[arg-type]
    assert hardware.name == name
    assert 0.9 < hardware.usable_bytes / parse_bytes(hardware.memory, key="hardware.memory") <= 1
    assert {"bfloat16", "float16", "float32"} <= set(hardware.tflops)
    assert min(hardware.bandwidth_gb_s, hardware.link_gb_s, hardware.power_watts) > 0
    assert (hardware.host_link_gb_s > 0) == (name != "gb10")  # whose host has no memory of its own


@pytest.mark.parametrize(
    ("framework", "device", "gib", "tokens", "sequences", "block"),
    [
        ("vllm", "b200_sxm", 180, 16_384, 1_024, 16),
        ("vllm", "any", 160, 16_384, 1_024, 16),
        ("vllm", "h100_sxm", 79.6, 8_192, 1_024, 16),
        ("vllm", "any", 70, 8_192, 1_024, 16),
        ("vllm", "a100_sxm", 79.6, 2_048, 256, 16),
        ("vllm", "any", 69.9, 2_048, 256, 16),
        ("vllm_synchronous", "l4", 22, 2_048, 256, 16),
        ("sglang", "l4", 22, 4_096, 2_048, 16),
        ("sglang", "rtx_4060ti_16g", 16, 2_048, 2_048, 16),
        ("sglang", "a100_40g", 39, 4_096, 2_048, 16),
        ("sglang", "h200", 140, 8_192, 2_048, 16),
        ("sglang", "b200", 180, 16_384, 2_048, 64),
        ("trtllm", "l4", 22, 8_192, 2_048, 32),
    ],
)
def test_by_memory(framework: str, device: str, gib: float, tokens: int, sequences: int, block: int) -> None:
    found = server_defaults(framework, device, f"{gib}GiB")
    assert found is not None
    assert (found.max_batched_tokens, found.max_batch_size, found.block_size) == (tokens, sequences, block)
    assert found.partial_reuse == (framework == "trtllm")
    assert found.merge_equal == (not framework.startswith("vllm"))


@pytest.mark.parametrize(
    ("version", "device", "gib", "tokens", "sequences", "ahead"),
    [
        # From the sources of each version.
        ("0.28.0", "b200_sxm", 180, 16_384, 1_024, True),
        ("0.27.0", "b200_sxm", 180, 8_192, 1_024, True),
        ("0.33.0", "gb10", 119.7, 2_048, 256, True),
        ("0.32.0", "gb10", 119.7, 8_192, 1_024, True),
        ("0.33.0", "mi300x", 191.98, 16_384, 1_024, True),
        ("0.14.0", "h100_sxm", 79.6, 8_192, 1_024, True),
        ("0.13.0", "h100_sxm", 79.6, 8_192, 1_024, False),
        ("0.9.0", "a100_sxm", 79.6, 2_048, 256, False),
        ("0.8.5", "a100_sxm", 79.6, 8_192, 1_024, False),
        ("0.8.5", "l4", 22, 2_048, 256, False),
    ],
)
def test_vllms_limits_and_schedule_are_those_of_its_version(
    version: str, device: str, gib: float, tokens: int, sequences: int, ahead: bool
) -> None:
    found = server_defaults("vllm", device, f"{gib}GiB", version)
    assert found is not None
    assert (found.max_batched_tokens, found.max_batch_size, found.ahead) == (tokens, sequences, ahead)
    assert found.source == f"vLLM {version}'s server"


@pytest.mark.parametrize(
    ("device", "version", "narrow", "block"),
    [
        # From the sources of each version: what its default backend for latent attention has.
        ("h100_sxm", "0.9.2", False, 64),
        ("h20_sxm", "0.17.0", False, 64),
        ("h200_sxm", "0.18.1", False, 16),
        ("h100_pcie", None, True, 64),  # fp8
        ("b200_sxm", "0.9.2", False, 16),
        ("gb200", "0.14.0", False, 128),
        ("b300_sxm", "0.15.1", True, 64),
        ("gb300", None, False, 32),
        ("a100_sxm", "0.9.2", False, 16),
    ],
)
def test_vllms_blocks_of_latent_attention(device: str, version: str | None, narrow: bool, block: int) -> None:
    found = server_defaults("vllm", device, "79GiB", version, latent=True, narrow=narrow)
    assert found is not None
    assert found.block_size == block


@pytest.mark.parametrize(
    ("device", "version", "latent", "block"),
    [
        ("b300_sxm", "0.5.6", False, 16),
        ("gb200", "0.5.6", True, 64),
        ("gb300", "0.5.7", False, 64),
        ("b200_sxm", "0.5.3", True, 16),
        ("h200_sxm", None, True, 16),
    ],
)
def test_sglangs_pages(device: str, version: str | None, latent: bool, block: int) -> None:
    found = server_defaults("sglang", device, "180GiB", version, latent=latent)
    assert found is not None
    assert found.block_size == block


@pytest.mark.parametrize("framework", ["kvlab", "mine"])
def test_others_keep_kvlabs_own(framework: str) -> None:
    assert server_defaults(framework, "h100_sxm", "80GiB") is None


@pytest.mark.parametrize(
    ("framework", "version", "share"),
    [
        ("vllm", None, 0.92),
        ("vllm", "0.21.0", 0.92),
        ("vllm", "0.20.1", 0.9),
        ("vllm_synchronous", None, 0.9),  # 0.12
        ("trtllm", "1.2.0", 0.9),
    ],
)
def test_vllm_takes_more_memory_since_it_counts_graphs(framework: str, version: str | None, share: float) -> None:
    found = server_defaults(framework, "h100_sxm", "80GiB", version)
    assert found is not None
    assert found.memory_utilization == share


@pytest.mark.parametrize(
    ("version", "mib", "devices", "groups", "latent", "tokens", "share"),
    [
        # 0.5.23's handle_gpu_memory_settings, run on these figures.
        ("0.5.23", 81_559, 1, 1, False, 8_192, 0.83),
        ("0.5.23", 81_559, 2, 1, False, 8_192, 0.828),  # sgl-project/sglang 29092 reports it
        ("0.5.23", 143_771, 1, 1, False, 8_192, 0.903),
        ("0.5.23", 183_359, 1, 1, False, 16_384, 0.854),
        # Started servers said so in their logs (experiments/planner_vs_sglang).
        ("0.5.6", 46_068, 1, 1, False, 4_096, 0.851),
        ("0.5.6", 143_771, 1, 1, False, 8_192, 0.907),
        ("0.5.3", 81_559, 1, 1, False, 8_192, 0.835),
        ("0.5.2", 81_559, 8, 1, False, 8_192, 0.831),
        ("0.4.10", 16_303, 1, 1, False, 2_048, 0.818),
        ("0.4.3", 23_034, 4, 1, False, 2_048, 0.85),
        ("0.4.1", 81_559, 1, 1, False, 8_192, 0.88),
        # From the formulas of the sources.
        ("0.4.6", 143_771, 8, 1, False, 8_192, 1 - 18 * 1_024 / 143_771),
        ("0.5.23", 81_559, 8, 8, False, 8_192, round(1 - (15_312 + 512 * 8 * 4.5) / 81_559, 3)),
        ("0.5.23", 81_559, 8, 1, True, 8_192, round(1 - (14_848 + 1_536) / 81_559, 3)),
        ("0.5.23", 81_559, 1, 1, False, 1_024, round(1 - 10_240 / 81_559, 3)),
    ],
)
def test_sglangs_share_leaves_steps_and_graphs_their_memory(
    version: str, mib: int, devices: int, groups: int, latent: bool, tokens: int, share: float
) -> None:
    memory = f"{mib}MiB"
    found = server_defaults("sglang", "any", memory, version, groups, devices=devices, tokens=tokens, latent=latent)
    assert found is not None
    assert found.memory_utilization == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(("version", "tokens", "share"), [("0.5.19", 2_048, 0.833), ("0.5.20", 4_096, 0.704)])
def test_sglang_takes_larger_steps_on_small_devices_since_0_5_20(version: str, tokens: int, share: float) -> None:
    found = server_defaults("sglang", "rtx_4090", "24564MiB", version)
    assert found is not None
    assert (found.max_batched_tokens, found.memory_utilization) == (tokens, share)


def test_sglang_captures_no_graph_for_more_sequences_than_may_run() -> None:
    few, many = (server_defaults("sglang", "any", "81559MiB", sequences=count) for count in (16, 2_048))
    assert few is not None
    assert many is not None
    assert few.memory_utilization - many.memory_utilization == pytest.approx(2 * 240 / 81_559, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "merges"),
    [
        ((), True),
        (("executor=simulated", "hardware=l4"), False),
        (("executor=simulated", "hardware=l4", "framework=sglang"), True),
        (("executor=simulated", "hardware=l4", "kv.eviction=lfu"), True),
        (("executor=simulated", "hardware=l4", "kv.ttl_s=60"), True),
        (("executor=simulated", "hardware=l4", "kv.prefix_sharing=false"), True),
        (("executor=simulated", "hardware=l4", "kv.merge_equal=true"), True),
    ],
)
def test_equal_blocks_both_stay_where_vllm_evicts(settings: tuple[str, ...], merges: bool) -> None:
    assert composed("model=qwen3_tiny", *settings).kv.merge_equal == merges


def test_equal_blocks_do_not_both_stay_beside_other_evictions() -> None:
    with pytest.raises(ConfigError, match=r"kv.merge_equal=False: is for kv.eviction=lru .*; leave it true"):
        compose_run("model=qwen3_tiny", "kv.merge_equal=false", "kv.eviction=lfu")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("hardware=h100_sxm",), (True, True)),
        (("hardware=rtx_5090",), (True, True)),
        (("hardware=l40s",), (False, True)),
        (("hardware=h100_sxm", "framework.version=0.32"), (False, True)),
        (("hardware=h100_sxm", "framework.version=0.31"), (False, False)),
        (("hardware=h100_sxm", "framework=kvlab"), (False, False)),
        (("hardware=h100_sxm", "kv.prefix_sharing=false"), (False, False)),
    ],
)
def test_states_are_kept_within_steps_by_kernels_that_do(
    settings: tuple[str, ...], expected: tuple[bool, bool]
) -> None:
    run = composed("model=qwen3_tiny", "executor=simulated", *settings)
    assert tuple(keeps_states_within_steps(run, flashinfer=flashinfer) for flashinfer in (True, False)) == expected
    assert state_multiple(run, flashinfer=True) == (64 if expected[0] else 16)
    assert state_multiple(run, flashinfer=False) == 16
