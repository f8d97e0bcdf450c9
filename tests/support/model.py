"""The tiny decoder that most tests run: its prompts, and the tokens that it should produce."""

from __future__ import annotations

import random
from functools import cache

import torch

from kvlab.attention.registry import select_backend
from kvlab.core import Request
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.models.config import DecoderConfig, attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import read_config
from kvlab.models.weights import DummyWeights

VOCAB = 200


class LoudWeights(DummyWeights):
    """Dummy weights half as large again: greedy tokens of a tiny model then depend on all tokens before them."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = super().take(name, shape)
        return weight if len(shape) == 1 else weight * 1.5


@cache
def tiny_config() -> DecoderConfig:
    return read_config(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
        }
    )


@cache
def tiny_decoder(kv_dtype: str = "float32") -> Decoder:
    """Holds no state between calls, so that all tests share it."""
    config = tiny_config()
    specs = attention_specs(config, "float32", "cpu", (kv_dtype, kv_dtype))
    return Decoder(config, LoudWeights(torch.float32, "cpu"), select_backend(specs), specs, 512)


def prompt_for(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(VOCAB), k=length))


def expected_tokens(asked: Request) -> list[int]:
    """Greedy tokens by the book: for each, the whole sequence through the model again, into an empty cache."""
    return list(_greedy(asked.prompt_token_ids, asked.sampling.max_tokens))


@cache
def _greedy(prompt_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    if count == 0:
        return ()
    before = _greedy(prompt_ids, count - 1)
    ids = prompt_ids + before
    pool = ContiguousKVCachePool(1, len(ids), KVStorage(tiny_config().kv_spec("float32"), 1, len(ids)))
    view = pool.view([pool.allocate_slot(len(ids))], [len(ids)])
    logits = tiny_decoder().forward(torch.tensor(ids), view, torch.tensor([len(ids) - 1]))
    return (*before, int(logits.argmax()))
