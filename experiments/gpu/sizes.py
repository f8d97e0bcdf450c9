"""How much `make gpu` runs: all of it on a GPU, and as much as an interpreter can take where there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from experiments.attention_backends.benchmark import Case
from kvlab.config import LengthConfig, ModelConfig, WorkloadConfig

ROOT = Path(__file__).resolve().parents[2]
#: One or two of each kernel, for the interpreter.
FEW_TESTS = "steps0 or longest or single_tokens or test_heads or test_parts or one_layer"


@dataclass(frozen=True)
class Sizes:
    """`kernel_tests` selects tests as pytest's -k does; None: all, the test files side by side. Serving takes the
    KV bytes of `slots` sequences of `max_seq_len` tokens, and is timed on the last of `runs`.
    """

    device: str
    kernel_tests: str | None
    cases: tuple[Case, ...]
    rounds: int
    parity_models: tuple[str, ...]
    parity_layouts: tuple[tuple[str, str], ...]  # KV cache and attention, against concat on a CPU
    parity_workload: WorkloadConfig
    serving_model: str
    serving_dtype: str
    serving_workload: WorkloadConfig
    slots: int
    max_seq_len: int
    runs: int


def choose(kernel_tests: str | None = None) -> Sizes:
    """What this machine can take, with other kernel tests if they are given."""
    burst16, burst48 = workload("burst16"), workload("burst48")
    models = ("qwen3_tiny", "gemma3_tiny")
    if torch.cuda.is_available():
        decode = [Case(b, c, g) for g in (4, 8) for b in (1, 16, 64) for c in (1024, 4096, 16384)]
        prefill = [Case(b, c, g, new=c) for g in (4, 8) for b, c in ((1, 4096), (16, 1024))]
        layouts = [(kv, attention) for kv in ("paged", "contiguous") for attention in ("triton", "sdpa")]
        return Sizes(
            "cuda", kernel_tests, (*decode, *prefill), 5, models, tuple(layouts), burst16,
            "qwen3_4b", "bfloat16", burst48, slots=8, max_seq_len=4096, runs=2,
        )  # fmt: skip
    few: dict[str, Any] = {"prompt_len": LengthConfig(10, 40), "output_len": LengthConfig(2, 3)}
    return Sizes(
        "cpu", kernel_tests or FEW_TESTS,
        (Case(2, 48, 4), Case(1, 40, 4, new=40)), 1, models, (("paged", "triton"),),
        replace(burst16, num_requests=2, **few),
        "qwen3_tiny", "float32", replace(burst48, num_requests=4, **few), slots=2, max_seq_len=64, runs=1,
    )  # fmt: skip


def model(name: str, max_seq_len: int = 1024) -> ModelConfig:
    return ModelConfig(**_settings("model", name), max_seq_len=max_seq_len)


def workload(name: str) -> WorkloadConfig:
    settings = _settings("workload", name)
    for length in ("prompt_len", "output_len"):
        settings[length] = LengthConfig(**settings[length])
    return WorkloadConfig(**settings)


def _settings(group: str, name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((ROOT / "conf" / group / f"{name}.yaml").read_text())
    return settings
