"""A decoder that two ranks compute gives what one process gives. Here the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from kvlab.attention.registry import select_backend
from kvlab.errors import ConfigError
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig, attention_specs, part_of, vocabulary_part
from kvlab.models.decoder import Decoder
from kvlab.models.families import read_config
from kvlab.models.ops import select_ops
from kvlab.models.ops.base import TopK
from kvlab.models.split import Ranks, SplitDecoder
from kvlab.models.weights import DummyWeights
from kvlab.paths import CONF
from tests.support.model import LoudWeights
from tests.support.reference_models import MAX_POSITIONS, VARIANTS, logits_in_steps, random_texts

TEXTS = random_texts(41, 80, 20)
STEPS = [[40, 17, 0], [1, 50, 19], [0, 12, 1], [0, 1, 0]]


class Exchange:
    """What threads that are ranks hand to each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[torch.Tensor] = [torch.empty(0)] * size

    def all(self, rank: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        everyone = [each.clone() for each in self.given]
        self.barrier.wait()
        return everyone


class ThreadRanks(Ranks):
    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, size

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.exchange.all(self.rank, x))).sum(0)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        everyone = list(self.exchange.all(self.rank, x))
        return everyone if self.rank == 0 else [x]


class GreedyDecoder(SplitDecoder):
    """Gives only the largest logit of each row, as if there were no others."""

    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        top: TopK = self.forward_top1(token_ids, view, rows)
        return torch.cat([top.values.double(), top.indices.double()], dim=1)


def described(variant: str, **changes: Any) -> DecoderConfig:
    file, own = VARIANTS[variant]
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{file}.yaml"))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return read_config({"model_type": values["family"], **values["architecture"], **own, **heads, **changes})


def on_ranks(
    config: DecoderConfig,
    dtype: str,
    size: int = 2,
    kind: type[SplitDecoder] = SplitDecoder,
    *,
    kernels: bool = True,
) -> list[torch.Tensor]:
    """What rank 0 gives."""
    exchange, number = Exchange(size), getattr(torch, dtype)
    specs = attention_specs(config, dtype, "cpu")

    def compute(rank: int) -> list[torch.Tensor]:
        weights, ops = LoudWeights(number, "cpu"), select_ops(number, "cpu", kernels=kernels)
        ranks = ThreadRanks(exchange, rank, size)
        decoder = kind(config, weights, select_backend(specs), specs, MAX_POSITIONS, ops, ranks)
        assert decoder.config.num_kv_heads == config.num_kv_heads // size
        return logits_in_steps(decoder, TEXTS, STEPS, dtype)

    with ThreadPoolExecutor(size) as pool:
        return next(iter(pool.map(compute, range(size))))


def alone(config: DecoderConfig, dtype: str) -> list[torch.Tensor]:
    number, specs = getattr(torch, dtype), attention_specs(config, dtype, "cpu")
    ops = select_ops(number, "cpu")
    decoder = Decoder(config, LoudWeights(number, "cpu"), select_backend(specs), specs, MAX_POSITIONS, ops)
    return logits_in_steps(decoder, TEXTS, STEPS, dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_float32(variant: str) -> None:
    config = described(variant)
    found, expected = torch.cat(on_ranks(config, "float32")), torch.cat(alone(config, "float32"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("variant", ["llama with biases", "qwen3", "gemma3"])
def test_logits_in_bfloat16_are_as_far_from_float32_as_those_of_one_process(variant: str) -> None:
    config = described(variant)
    exact, one, two = (torch.cat(each) for each in (
        alone(config, "float32"), alone(config, "bfloat16"), on_ranks(config, "bfloat16")))  # fmt: skip
    rounded, apart = (float((each - exact).square().mean().sqrt()) for each in (one, two))
    assert 0 < apart < 1.15 * rounded


def test_pytorchs_ops_and_four_ranks() -> None:
    config = described("llama", num_attention_heads=8, num_key_value_heads=4, vocab_size=515)
    found = torch.cat(on_ranks(config, "float32", size=4, kernels=False))
    torch.testing.assert_close(found, torch.cat(alone(config, "float32")), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3 capped logits"])
def test_the_largest_logit_of_unequal_parts(variant: str) -> None:
    config = described(variant, vocab_size=513)
    values, indices = torch.cat(on_ranks(config, "float32", kind=GreedyDecoder)).unbind(1)
    expected = torch.cat(alone(config, "float32")).max(-1)
    assert torch.equal(indices.long(), expected.indices)
    torch.testing.assert_close(values.float(), expected.values, atol=2e-5, rtol=2e-5)


def test_the_first_of_equal_logits_of_two_ranks() -> None:
    class Same(DummyWeights):
        def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            weight = super().take(name, shape)
            return weight[: len(weight) // 2].repeat(2, 1) if "embed" in name or "lm_head" in name else weight

    config = described("qwen3")
    specs, exchange = attention_specs(config, "float32", "cpu"), Exchange(2)

    def compute(rank: int) -> list[torch.Tensor]:
        weights, ranks = Same(torch.float32, "cpu"), ThreadRanks(exchange, rank, 2)
        ops = select_ops(torch.float32, "cpu")
        decoder = GreedyDecoder(config, weights, select_backend(specs), specs, MAX_POSITIONS, ops, ranks)
        return logits_in_steps(decoder, TEXTS, STEPS)

    with ThreadPoolExecutor(2) as pool:
        rows = torch.cat(next(iter(pool.map(compute, range(2)))))
    assert rows[:, 1].max() < config.vocab_size // 2


@pytest.mark.parametrize(("size", "parts"), [(2, [6, 5]), (3, [4, 4, 3]), (4, [3, 3, 3, 2])])
def test_parts_of_a_vocabulary(size: int, parts: list[int]) -> None:
    found = [vocabulary_part(11, rank, size) for rank in range(size)]
    assert [len(each) for each in found] == parts
    assert [token for each in found for token in each] == list(range(11))


@pytest.mark.parametrize(
    ("changes", "size", "text"),
    [
        ({}, 4, "executor.tensor_parallel=4: qwen3 has 2 KV heads, which cannot be divided so; 2 would do"),
        ({"num_key_value_heads": 1}, 2, "executor.tensor_parallel=2: qwen3 has 1 KV heads, .* 1 would do"),
        (
            {"intermediate_size": 129},
            2,
            "executor.tensor_parallel=2: qwen3 has 129 columns in its MLP, .* 1 would do",
        ),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, int], size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        part_of(described("qwen3", **changes), size)
