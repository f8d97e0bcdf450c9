from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import (
    AttentionConfig,
    ExecutorConfig,
    FaultsConfig,
    KVConfig,
    LengthConfig,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    SloConfig,
    TrackingConfig,
    WorkloadConfig,
    format_bytes,
    parse_bytes,
)
from kvlab.errors import ConfigError


class TestParseBytes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("1KiB", 1024),
            ("512MiB", 512 * 1024**2),
            ("4GiB", 4 * 1024**3),
            ("1TiB", 1024**4),
            ("1KB", 1000),
            ("2GB", 2 * 10**9),
            ("1.5 GiB", 1536 * 1024**2),
            ("  2 mib ", 2 * 1024**2),
            ("0.5KiB", 512),
        ],
    )
    def test_sizes(self, text: str, expected: int) -> None:
        assert parse_bytes(text, key="kv.memory") == expected

    @pytest.mark.parametrize(
        "text", ["", "MiB", "-1", "-1GiB", "1,5GiB", "1e9", "12 parsecs", "1GiB2", "1.", ".5", "nan"]
    )
    def test_anything_else_names_key_and_value(self, text: str) -> None:
        with pytest.raises(ConfigError, match="512MiB, 4GiB or 2GB") as caught:
            parse_bytes(text, key="kv.memory")
        assert (caught.value.key, caught.value.value) == ("kv.memory", text)

    @given(count=st.integers(0, 2**53), unit=st.sampled_from(["", "B", "b"]))
    def test_bytes_come_back_as_they_are(self, count: int, unit: str) -> None:
        assert parse_bytes(f"{count}{unit}", key="x") == count


class TestFormatBytes:
    @pytest.mark.parametrize(
        ("count", "expected"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (512 * 1024**2, "512.0 MiB"),
            (3.25 * 1024**3, "3.2 GiB"),
            (5 * 1024**4, "5.0 TiB"),
            (5000 * 1024**4, "5000.0 TiB"),
            (-2048, "-2.0 KiB"),
        ],
    )
    def test_sizes(self, count: float, expected: str) -> None:
        assert format_bytes(count) == expected

    @given(count=st.integers(0, 2**60))
    def test_can_be_read_back_to_within_its_digits(self, count: int) -> None:
        again = parse_bytes(format_bytes(count), key="x")
        assert abs(again - count) <= 0.05 * count


class TestDefaults:
    @pytest.mark.parametrize(
        "config",
        [KVConfig, SchedulerConfig, AttentionConfig, ExecutorConfig, WorkloadConfig, TrackingConfig, RunConfig],
    )
    def test_are_valid(self, config: Callable[[], object]) -> None:
        assert config() is not None

    def test_are_those_that_the_design_names(self) -> None:
        assert KVConfig().block_size == 16
        assert SchedulerConfig().admission_reserve == 0.2

    def test_are_not_shared_between_runs(self) -> None:
        first, second = RunConfig(), RunConfig()
        first.tags["who"] = "first"
        first.kv.block_size = 1
        assert second.tags == {}
        assert second.kv.block_size == 16


Case = tuple[Callable[..., object], dict[str, Any], str, str, str]

TRACE = {"source": "azure", "path": "x", "arrival": "trace"}
WRONG: list[Case] = [
    (ModelConfig, {"max_seq_len": 0}, "model.max_seq_len", "0", "at least 1"),
    (ModelConfig, {"family": None, "path": None}, "model.path", "null", "model.path"),
    (ModelConfig, {"family": "qwen3", "weights": None}, "model.weights", "null", "model.path"),
    (KVConfig, {"backend": "pagd"}, "kv.backend", "pagd", "known: contiguous, paged"),
    (KVConfig, {"block_size": 0}, "kv.block_size", "0", "at least 1"),
    (KVConfig, {"num_blocks": 0}, "kv.num_blocks", "0", "at least 1"),
    (KVConfig, {"num_blocks": 8, "memory": "1GiB"}, "kv.memory", "1GiB", "kv.num_blocks=8"),
    (KVConfig, {"memory": "lots"}, "kv.memory", "lots", "is not a size"),
    (KVConfig, {"memory": "0GiB"}, "kv.memory", "0GiB", "more than 0"),
    (SchedulerConfig, {"policy": "dynamic"}, "scheduler.policy", "dynamic", "known: continuous, static"),
    (SchedulerConfig, {"order": "lifo"}, "scheduler.order", "lifo", "known: de"),
    (SchedulerConfig, {"max_batch_size": 0}, "scheduler.max_batch_size", "0", "at least 1"),
    (SchedulerConfig, {"max_batched_tokens": 0}, "scheduler.max_batched_tokens", "0", "at least 1"),
    (SchedulerConfig, {"max_wait_ms": -0.5}, "scheduler.max_wait_ms", "-0.5", "at least 0"),
    (SchedulerConfig, {"admission_reserve": 1.0}, "scheduler.admission_reserve", "1.0", "[0, 1)"),
    (SchedulerConfig, {"admission_reserve": -0.1}, "scheduler.admission_reserve", "-0.1", "[0, 1)"),
    (
        SchedulerConfig,
        {"max_batch_size": 9, "max_batched_tokens": 8},
        "scheduler.max_batched_tokens",
        "8",
        "scheduler.max_batch_size=9",
    ),
    (ExecutorConfig, {"device": "tpu"}, "executor.device", "tpu", "known: auto, cpu, cuda"),
    (ExecutorConfig, {"kind": "tpu"}, "executor.kind", "tpu", "torch"),
    (AttentionConfig, {"backend": "flash"}, "attention.backend", "flash", "known: concat, cpu"),
    (AttentionConfig, {"prefer": ["sdpa", "flash"]}, "attention.prefer", "flash", "known: concat, cpu"),
    (ExecutorConfig, {"dtype": "int8"}, "executor.dtype", "int8", "known: float32, bfloat16, float16"),
    (ExecutorConfig, {"threads": 0}, "executor.threads", "0", "at least 1"),
    (WorkloadConfig, {"source": "csv"}, "workload.source", "csv", "known: azure, burstgpt, chat, jsonl"),
    (WorkloadConfig, {"arrival": "poison"}, "workload.arrival", "poison", "known: burst"),
    (WorkloadConfig, {"temperature": -1.0}, "workload.temperature", "-1.0", "at least 0"),
    (WorkloadConfig, {"num_requests": 0}, "workload.num_requests", "0", "at least 1"),
    (WorkloadConfig, {"prompt_len": LengthConfig(0, 4)}, "workload.prompt_len.min", "0", "at least 1"),
    (WorkloadConfig, {"output_len": LengthConfig(0, 4)}, "workload.output_len.min", "0", "at least 1"),
    (WorkloadConfig, {"prompt_len": LengthConfig(5, 4)}, "workload.prompt_len.max", "4", "prompt_len.min=5"),
    (WorkloadConfig, {"output_len": LengthConfig(5, 4)}, "workload.output_len.max", "4", "output_len.min=5"),
    (WorkloadConfig, {"arrival": "uniform"}, "workload.rate", "null", "requests per second"),
    (WorkloadConfig, {"arrival": "uniform", "rate": 0.0}, "workload.rate", "0.0", "requests per second"),
    (WorkloadConfig, {"source": "jsonl"}, "workload.path", "null", "workload.path=<file>"),
    (WorkloadConfig, {"source": "azure"}, "workload.path", "null", "workload=azure needs workload.path=<file>"),
    (WorkloadConfig, {"arrival": "trace"}, "workload.arrival", "trace", "needs a trace with times: workload=azure"),
    (
        WorkloadConfig,
        {"source": "mooncake", "path": "x", "block_tokens": 0},
        "workload.block_tokens",
        "0",
        "least 1",
    ),
    (WorkloadConfig, {"concurrency": 0}, "workload.concurrency", "0", "at least 1"),
    (
        WorkloadConfig,
        {**TRACE, "window": "9-8"},
        "workload.window",
        "9-8",
        "one second to another, as 600-1200",
    ),
    (WorkloadConfig, {**TRACE, "window": "1h"}, "workload.window", "1h", "first seconds of the trace, as 600"),
    (WorkloadConfig, {"window": "9"}, "workload.window", "9", "needs a trace with times: workload=azure, burstgpt"),
    (WorkloadConfig, {**TRACE, "sample": 0.0}, "workload.sample", "0.0", "at least"),
    (WorkloadConfig, {**TRACE, "sample": 1.5}, "workload.sample", "1.5", "at most 1"),
    (WorkloadConfig, {**TRACE, "rate_scale": -1.0}, "workload.rate_scale", "-1.0", "at least"),
    (
        WorkloadConfig,
        {**TRACE, "arrival": "burst", "rate_scale": 2.0},
        "workload.rate_scale",
        "2.0",
        "set workload.rate",
    ),
    (WorkloadConfig, {"arrival": "gamma", "rate": 1.0, "burstiness": 0.0}, "workload.burstiness", "0.0", "least"),
    (
        WorkloadConfig,
        {"source": "jsonl", "path": "x", "temperature": -1.0},
        "workload.temperature",
        "-1.0",
        "least 0",
    ),
    (TrackingConfig, {"backend": "wandb"}, "tracking.backend", "wandb", "known: mlflow, off"),
    (TrackingConfig, {"timeout_s": 0.0}, "tracking.timeout_s", "0.0", "more than 0"),
    (RunConfig, {"seed": -1}, "seed", "-1", "at least 0"),
]


@pytest.mark.parametrize(
    ("config", "values", "key", "value", "advice"),
    WRONG,
    ids=[f"{key}={value}" for _, _, key, value, _ in WRONG],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_would_do(
    config: Callable[..., object], values: dict[str, Any], key: str, value: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}={value}: ")
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (ModelConfig, {"family": None, "path": "somewhere"}),
        (KVConfig, {"block_size": 1, "num_blocks": 1}),
        (KVConfig, {"memory": "1B"}),
        (SchedulerConfig, {"max_batch_size": 8, "max_batched_tokens": 8}),
        (SchedulerConfig, {"admission_reserve": 0.0, "max_wait_ms": 0.0}),
        (ExecutorConfig, {"threads": 1}),
        (WorkloadConfig, {"prompt_len": LengthConfig(7, 7), "output_len": LengthConfig(1, 1)}),
        (WorkloadConfig, {"arrival": "uniform", "rate": 0.001}),
        (WorkloadConfig, {"source": "jsonl", "path": "x", "num_requests": 0}),
        (RunConfig, {"seed": 0}),
    ],
)
def test_a_value_on_the_edge_is_taken(config: Callable[..., object], values: dict[str, Any]) -> None:
    assert config(**values) is not None


def test_weights_of_a_checkpoint_are_those_beside_its_configuration() -> None:
    assert ModelConfig(family=None, path="somewhere", weights=None).weights == "somewhere"
    assert ModelConfig(family=None, path="somewhere").weights == "dummy"


@pytest.mark.parametrize(
    ("key", "value"), [("kind", "gremlins"), ("rate", 1.5), ("rate", -0.1), ("rate", math.nan)]
)
def test_faults_are_checked(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultsConfig(**{key: value})
    assert caught.value.key == f"debug.faults.{key}"


@pytest.mark.parametrize("key", ["ttft_ms", "tpot_ms"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_limits_are_more_than_nothing_and_finite(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match="must be a number") as caught:
        SloConfig(**{key: value})
    assert caught.value.key == f"slo.{key}"


@pytest.mark.parametrize(
    ("key", "length"),
    [
        ("distribution", LengthConfig(1, 9, "normal")),
        ("median", LengthConfig(1, 9, "lognormal")),
        ("median", LengthConfig(1, 9, "lognormal", 0.0)),
        ("sigma", LengthConfig(1, 9, "lognormal", 4.0, -1.0)),
    ],
)
def test_lengths_are_checked(key: str, length: LengthConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkloadConfig(output_len=length)
    assert caught.value.key == f"workload.output_len.{key}"


def test_poisson_arrivals_need_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"workload\.arrival=poisson needs requests per second"):
        WorkloadConfig(arrival="poisson")
