"""Small models with random weights, written by transformers and read by kvlab."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvlab.attention.base import AttentionSpec
from kvlab.attention.registry import default_registry
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder, attention_spec
from kvlab.models.families import from_transformers
from kvlab.models.weights import open_weights

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

#: transformers' model type and configuration of each model that the scenarios name.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**_SHAPE, "tie_word_embeddings": True, "rope_parameters": _ROPE}),
    "qwen3 untied": ("qwen3", {**_SHAPE, "tie_word_embeddings": False, "rope_parameters": _ROPE}),
    "llama": ("llama", {**_SHAPE, "tie_word_embeddings": False, "rope_parameters": _ROPE}),
    "llama tied": ("llama", {**_SHAPE, "tie_word_embeddings": True, "rope_parameters": _ROPE}),
    "llama3 rope": ("llama", {**_SHAPE, "tie_word_embeddings": False, "rope_parameters": _ROPE_LLAMA3}),
}


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    """Token ids of every model's vocabulary."""
    source = random.Random(seed)
    return tuple(source.randrange(_SHAPE["vocab_size"]) for _ in range(count))


def read_decoder(config: DecoderConfig, directory: Path, spec: AttentionSpec) -> Decoder:
    """kvlab's decoder with the weights of a directory."""
    weights = open_weights(str(directory), torch.float32, "cpu")
    return Decoder(config, weights, default_registry().select(spec), spec, MAX_POSITIONS)


@dataclass
class Checkpoint:
    """One model twice: as transformers runs it, and the directory that kvlab reads."""

    name: str
    reference: Any  # transformers' PreTrainedModel
    directory: Path
    config: DecoderConfig
    decoder: Decoder
    _generated: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """transformers' logits `[tokens, vocab]` of one sequence."""
        with torch.no_grad():
            logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits

    def stored_kv(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """What transformers caches for one sequence, `[tokens, layers, 2, kv_heads, head_dim]`."""
        with torch.no_grad():
            cache = self.reference(torch.tensor([token_ids]), use_cache=True).past_key_values
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        return torch.stack(layers).permute(3, 0, 1, 2, 4)

    def generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """The tokens that transformers generates after a prompt, greedily."""
        key = (prompt, count)
        if key not in self._generated:
            ids = torch.tensor([prompt])
            output = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
            )
            self._generated[key] = output[0, len(prompt) :].tolist()
        return self._generated[key]


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
        torch.manual_seed(sorted(ARCHITECTURES).index(name))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones, with which any two could be mixed up unseen
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        directory = self._root / name.replace(" ", "-")
        model.save_pretrained(directory)
        config = from_transformers(model.config)
        spec = attention_spec(config, "float32", "cpu")
        return Checkpoint(name, model, directory, config, read_decoder(config, directory, spec))
