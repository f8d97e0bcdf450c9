"""Small models with random weights, written by transformers and read by kvlab."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvlab.attention.registry import select_backend
from kvlab.hashed_prompt import TokenIds
from kvlab.models.config import DecoderConfig, attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import read_config
from kvlab.models.weight_sources import open_weights

#: Positions that the decoders compute rotary angles for.
MAX_POSITIONS = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,  # ten times the usual: with less, a random model hardly looks at its context
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA: dict[str, Any] = {**_SHAPE, "tie_word_embeddings": False, "rope_parameters": _ROPE}
_QWEN: dict[str, Any] = {**_SHAPE, "tie_word_embeddings": True, "rope_parameters": _ROPE}
_QWEN2 = {key: value for key, value in _QWEN.items() if key != "head_dim"} | {"num_attention_heads": 4}
#: Every layer sees 32 tokens, and there is but one.
_ONE_SLIDING_LAYER = {
    "num_hidden_layers": 1,
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 0,
}
#: Two layers that see 24 tokens, then one that sees all; scores are scaled by other than their head_dim.
_GEMMA3: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 9,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_ROPE_GEMMA3_LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

#: transformers' model type and configuration of each model that the scenarios name.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", _QWEN),
    "qwen3 untied": ("qwen3", {**_QWEN, "tie_word_embeddings": False}),
    "qwen3 sliding": ("qwen3", {**_QWEN, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3 of one sliding layer": ("qwen3", {**_QWEN, **_ONE_SLIDING_LAYER}),
    "qwen2": ("qwen2", _QWEN2),
    "qwen2 sliding": (
        "qwen2",
        {**_QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "qwen2 of one sliding layer": ("qwen2", {**_QWEN2, **_ONE_SLIDING_LAYER}),
    "llama": ("llama", _LLAMA),
    "llama tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {**_LLAMA, "attention_bias": True}),
    "llama3 rope": ("llama", {**_LLAMA, "rope_parameters": _ROPE_LLAMA3}),
    "gemma3": ("gemma3_text", _GEMMA3),
    "gemma3 linear rope": ("gemma3_text", {**_GEMMA3, "rope_parameters": _ROPE_GEMMA3_LINEAR}),
    "gemma3 of one sliding layer": (
        "gemma3_text",
        {**_GEMMA3, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 32},
    ),
    "gemma3 with images": (
        "gemma3",
        {"text_config": _GEMMA3, "vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": 210},
    ),
}


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    """Token ids of every model's vocabulary."""
    source = random.Random(seed)
    return tuple(source.randrange(_SHAPE["vocab_size"]) for _ in range(count))


def read_decoder(config: DecoderConfig, directory: Path, backend: str = "auto") -> Decoder:
    """kvlab's decoder with the weights of a directory, and an attention backend by name or the fastest."""
    weights = open_weights(str(directory), torch.float32, "cpu")
    specs = attention_specs(config, "float32", "cpu")
    return Decoder(config, weights, select_backend(specs, backend), specs, MAX_POSITIONS)


@dataclass
class Checkpoint:
    """One model twice: as transformers runs it, and the directory that kvlab reads."""

    name: str
    reference: Any  # transformers' PreTrainedModel
    directory: Path
    config: DecoderConfig
    decoder: Decoder
    _picked: dict[tuple[TokenIds, TokenIds], list[int]] = field(default_factory=dict)
    _passes: dict[TokenIds, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """transformers' logits `[tokens, vocab]` of one sequence."""
        return self._pass(token_ids)[0]

    def stored_kv(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """What transformers caches for one sequence, `[tokens, layers, 2, kv_heads, head_dim]`."""
        return self._pass(token_ids)[1]

    def _pass(self, token_ids: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, computed once: scenarios read the same texts."""
        from transformers import DynamicCache

        if token_ids not in self._passes:
            cache = DynamicCache()  # without a configuration it keeps what is behind a window too
            with torch.no_grad():
                logits: torch.Tensor = self.reference(torch.tensor([token_ids]), past_key_values=cache).logits[0]
            layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
            self._passes[token_ids] = logits, torch.stack(layers).permute(3, 0, 1, 2, 4)
        return self._passes[token_ids]

    def greedy(self, prompt: TokenIds, answer: Sequence[int]) -> list[int]:
        """The tokens that transformers picks behind a prompt and behind each token of an answer but the last. Where
        they are the answer, it is what transformers generates greedily, found in one pass.
        """
        key = prompt, tuple(answer)
        if key not in self._picked:
            logits = self.logits((*prompt, *answer[:-1]))
            self._picked[key] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        return self._picked[key]


class Checkpoints:
    """Makes each checkpoint on first use, with a seed of its own that never changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Checkpoint] = {}

    def get(self, name: str) -> Checkpoint:
        """The checkpoint of this name in `ARCHITECTURES`."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Checkpoint:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        family, values = ARCHITECTURES[name]
        torch.manual_seed(zlib.crc32(name.encode()))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).float().eval()
        config = read_config(model.config.to_dict())
        for key, parameter in model.named_parameters():
            # Norms start as ones (or zeros) and biases as zeros, with which any two could be mixed up unseen.
            if parameter.dim() == 1:
                middle = 0.0 if key.endswith(".bias") else config.initial_norm_weight
                torch.nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
        directory = self._root / name.replace(" ", "-")
        model.save_pretrained(directory)
        return Checkpoint(name, model, directory, config, read_decoder(config, directory))
