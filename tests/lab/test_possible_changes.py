"""Which changes advice tries, by the device, the framework and the traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlab.cli.advise import compose_today, words_of
from kvlab.config.fleet import FleetConfig
from kvlab.config.groups import with_settings
from kvlab.errors import ConfigError
from kvlab.lab.advise.changes import TrafficFacts, possible_changes
from kvlab.lab.advise.parts import changed
from kvlab.lab.advise.settings import AdviseSettings
from tests.support.plans import composed


@pytest.mark.parametrize(("hardware", "formats"), [("h100_sxm", {"fp8"}), ("b200_sxm", {"fp8", "nvfp4"})])
def test_weights_in_four_bits_are_tried_where_a_device_multiplies_them(hardware: str, formats: set[str]) -> None:
    config = composed("executor=simulated", f"hardware={hardware}")
    facts = TrafficFacts(False, False, False, None, 0, False, 2048)
    changes = possible_changes(config, facts, 1)
    tried = {change.settings["executor.weights"] for change in changes if "executor.weights" in change.settings}
    assert tried == formats


@pytest.mark.parametrize("more", ["framework.version=0.19.0", "scheduler.reserve_output=true", ""])
def test_whole_prompts_are_tried_where_first_chunks_are_admitted(more: str) -> None:
    words = ["hardware=h100_sxm", "framework.version=0.18.1", *([more] if more else [])]
    config = compose_today(AdviseSettings(), words)[0]
    facts = TrafficFacts(False, False, True, None, 0, False, 64)
    tried = [change.settings for change in possible_changes(config, facts, 1)]
    assert ({"scheduler.reserve_prompt": True} in tried) == (not more)


@pytest.mark.parametrize(
    ("framework", "asks_more", "changes"),
    [
        ("sglang", True, [{"scheduler.conservativeness": 0.3}, {"scheduler.conservativeness": 1.3}]),
        ("trtllm", True, [{"scheduler.reserve_output": False}]),
        ("vllm", True, []),
        ("sglang", False, []),
        ("trtllm", False, []),
    ],
)
def test_less_is_kept_for_outputs_where_requests_ask_for_more_than_they_produce(
    framework: str, asks_more: bool, changes: list[dict[str, Any]]
) -> None:
    config = compose_today(AdviseSettings(), ["hardware=h100_sxm", f"framework={framework}"])[0]
    facts = TrafficFacts(False, False, False, None, 0, False, 64, asks_more)
    tried = [change.settings for change in possible_changes(config, facts, 1) if change.kind == "admission"]
    assert tried == changes


@pytest.mark.parametrize(("framework", "shares"), [("vllm", {0.95}), ("trtllm", {0.95}), ("sglang", set())])
def test_more_of_the_memory_is_tried_unless_steps_need_the_rest(framework: str, shares: set[float]) -> None:
    config = composed("model=qwen3_4b", "executor=simulated", "hardware=h100_sxm", f"framework={framework}")
    changes = possible_changes(config, TrafficFacts(False, False, False, None, 0, False, 64), 1)
    key = "executor.memory_utilization"
    assert {change.settings[key] for change in changes if key in change.settings} == shares


@pytest.mark.parametrize(
    ("framework", "own", "settings"),
    [
        ("sglang", "", {"scheduler.max_batched_tokens": 32_768}),
        ("sglang", "", {"executor.tensor_parallel": 4}),
        ("sglang", "", {"scheduler.max_batched_tokens": 32_768, "executor.memory_utilization": 0.5}),
        ("sglang", "executor.memory_utilization=0.7", {"scheduler.max_batched_tokens": 32_768}),
        ("vllm", "model=deepseek_v3", {"kv.dtype": "fp8_e4m3"}),
        ("vllm", "model=deepseek_v3 kv.block_size=32", {"kv.dtype": "fp8_e4m3"}),
        ("trtllm", "", {"kv.block_size": 64}),
        ("trtllm", "", {"scheduler.long_prefill_threshold": 16}),
        ("trtllm", "", {"kv.block_size": 64, "scheduler.chunk_unit": 16}),
        ("trtllm", "scheduler.chunk_unit=10000", {"kv.block_size": 64}),
        ("trtllm", "", {"scheduler.reserve_output": False}),
        ("trtllm", "scheduler.policy=static", {"scheduler.policy": "continuous"}),
        ("sglang", "scheduler.policy=static", {"scheduler.policy": "continuous"}),
        ("vllm_synchronous", "scheduler.policy=static", {"scheduler.policy": "continuous"}),
    ],
)
def test_what_is_simulated_has_what_the_server_of_its_command_takes(
    framework: str, own: str, settings: dict[str, Any]
) -> None:
    """SGLang its share of the memory, vLLM its blocks of latent attention, TensorRT-LLM chunks of its blocks, and
    all their own orders of a step.
    """
    words = ["executor=simulated", "hardware=h100_sxm", f"framework={framework}", *own.split()]
    words += [] if "model=" in own else ["model=qwen3_4b"]
    written = [f"{key}={value}" for key, value in settings.items()]
    assert changed(composed(*words), settings) == composed(*words, *written)


@pytest.mark.parametrize(
    ("framework", "settings"),
    [
        ("sglang", {"fleet.groups.1.scheduler.max_batched_tokens": 32_768}),
        ("sglang", {"scheduler.max_batch_size": 64}),
        ("sglang", {"fleet.groups.0.executor.tensor_parallel": 2}),
        ("sglang", {"fleet.groups.1.kv.block_size": 8, "fleet.groups.1.executor.memory_utilization": 0.5}),
        ("trtllm", {"fleet.groups.1.kv.block_size": 64}),
        ("trtllm", {"kv.block_size": 64}),
        ("trtllm", {"fleet.groups.0.scheduler.long_prefill_threshold": 16}),
    ],
)
def test_each_group_has_what_the_server_of_its_command_takes(framework: str, settings: dict[str, Any]) -> None:
    words = ["model=qwen3_4b", "executor=simulated", f"framework={framework}"]
    words += ["fleet.groups=[{name:a,count:1,hardware:h100_sxm},{name:b,count:2,hardware:l40s}]"]
    expected = composed(*words, *(f"{key}={value}" for key, value in settings.items()))
    own, theirs = (
        [with_settings(config, each.settings) for each in config.fleet.parts]
        for config in (changed(composed(*words), settings), expected)
    )
    assert [replace(config, fleet=FleetConfig()) for config in own] == [
        replace(config, fleet=FleetConfig()) for config in theirs
    ]


@pytest.mark.parametrize("key", ["kv.nothing", "kv.dtype.x", "seed.x", "kv.", "fleet.link.x"])
def test_what_is_kept_is_a_setting_or_a_group_of_them(key: str) -> None:
    own = ["kv", "kv.dtype", "fleet.link.gb_s", "fleet.groups.1.scheduler", "hardware.name", "tags.side"]
    words_of(AdviseSettings(keep=own), ["hardware=h100_sxm"])
    with pytest.raises(ConfigError, match="is none of the settings that advice changes"):
        words_of(AdviseSettings(keep=[key]), ["hardware=h100_sxm"])
