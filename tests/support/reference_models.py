"""The tiny models of conf/model, with random weights that transformers wrote and kvlab reads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.attention.registry import select_backend
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.models.config import DecoderConfig, attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import read_config
from kvlab.models.ops.base import Ops
from kvlab.models.weights import SafetensorsWeights
from kvlab.paths import CONF

MAX_POSITIONS = 512
BLOCK_SIZE = 16
_SLIDING = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
_LINEAR_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
}

#: A file of conf/model, and what is changed in its architecture.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_tiny", {}),
    "llama with biases": ("llama_tiny", {"attention_bias": True}),
    "qwen2": ("qwen2_tiny", {}),
    "qwen2 sliding": ("qwen2_tiny", _SLIDING),
    "qwen3": ("qwen3_tiny", {}),
    "qwen3 sliding": ("qwen3_tiny", _SLIDING),
    "gemma3": ("gemma3_tiny", {}),
    "gemma3 linear rope": ("gemma3_tiny", {"rope_parameters": _LINEAR_ROPE}),
    "gemma3 capped logits": ("gemma3_tiny", {"final_logit_softcapping": 3.0}),
    "gemma3 capped scores": ("gemma3_tiny", {"attn_logit_softcapping": 2.0}),
}


@dataclass
class TinyModel:
    """One model twice: as transformers runs it in float32, and the directory that kvlab reads."""

    reference: Any  # transformers' PreTrainedModel
    directory: Path
    config: DecoderConfig
    decoder: Decoder

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits `[tokens, vocab]` of one sequence."""
        with torch.no_grad():
            logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits

    def error(self, texts: list[list[int]], steps: list[list[int]]) -> float:
        """The largest difference of a logit to transformers' over all tokens of `texts`; see `logits_in_steps`."""
        found = logits_in_steps(self.decoder, texts, steps)
        return max(float((ours - self.expected(ids)).abs().max()) for ours, ids in zip(found, texts, strict=True))


def make_model(variant: str, seed: int, directory: Path, max_shard_size: str = "1GB") -> TinyModel:
    """Write a variant's checkpoint, every parameter random, and read it."""
    file, changes = VARIANTS[variant]
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{file}.yaml"))
    described = AutoConfig.for_model(values["family"], **(values["architecture"] | changes))
    torch.manual_seed(seed)
    # Plain attention: the one implementation of transformers that can be given a soft cap.
    reference = AutoModelForCausalLM.from_config(described, attn_implementation="eager")
    reference = reference.float().eval()
    config = read_config(reference.config.to_dict())
    for name, parameter in reference.named_parameters():
        if parameter.dim() == 1:
            middle = 0.0 if name.endswith(".bias") else config.initial_norm_weight
            torch.nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
        else:  # ten times the usual: with less, a random model hardly looks at its context
            torch.nn.init.normal_(parameter, std=0.2)
    reference.save_pretrained(directory, max_shard_size=max_shard_size)
    return TinyModel(reference, directory, config, read_decoder(config, directory))


def read_decoder(config: DecoderConfig, directory: Path, dtype: str = "float32", ops: Ops | None = None) -> Decoder:
    """kvlab's decoder with a checkpoint's weights in `dtype`."""
    specs = attention_specs(config, dtype, "cpu")
    weights = SafetensorsWeights(directory, getattr(torch, dtype), "cpu")
    return Decoder(config, weights, select_backend(specs), specs, MAX_POSITIONS, ops)


def random_texts(*lengths: int) -> list[list[int]]:
    """A sequence of token ids for each length."""
    return [random.Random(seed).choices(range(512), k=length) for seed, length in enumerate(lengths)]


def in_chunks(texts: list[list[int]], size: int) -> list[list[int]]:
    """Steps in which each text has `size` new tokens until its end."""
    longest = max(len(text) for text in texts)
    return [[max(0, min(size, len(text) - start)) for text in texts] for start in range(0, longest, size)]


def logits_in_steps(
    decoder: Decoder, texts: list[list[int]], steps: list[list[int]], dtype: str = "float32"
) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` of each text, run together in scattered blocks: in each of `steps` as many tokens of
    each text as it says. `dtype`: of K and V, as `int8`, or of each, as `int8+fp8_e5m2`.
    """
    key_dtype, _, value_dtype = dtype.partition("+")
    needed = [-(-len(text) // BLOCK_SIZE) for text in texts]
    storage = KVStorage(decoder.config.kv_spec(key_dtype, value_dtype or None), sum(needed), BLOCK_SIZE)
    pool = PagedKVCachePool(sum(needed), BLOCK_SIZE, MAX_POSITIONS, storage)
    pool.allocator.allocate(sum(needed))
    pool.allocator.free(random.Random(0).sample(range(sum(needed)), k=sum(needed)))
    slots = [pool.allocate_slot() for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in steps:
        running = [index for index, count in enumerate(counts) if count]
        tokens: list[int] = []
        for index in running:
            start = pool.get_seq_len(slots[index])
            tokens += texts[index][start : start + counts[index]]
        view = pool.view([slots[index] for index in running], [counts[index] for index in running])
        logits = decoder.forward(torch.tensor(tokens), view, torch.arange(len(tokens)))
        view.advance()
        for index, part in zip(running, logits.split([counts[index] for index in running]), strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]
