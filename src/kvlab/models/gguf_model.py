"""A model in a GGUF file: its configuration in the words of a config.json, and its weights by the names and in the
order of transformers' checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlab.errors import WeightsError, shown
from kvlab.models.config import RopeConfig
from kvlab.models.gguf import GgufFile, read_gguf
from kvlab.models.rope import inverse_frequencies
from kvlab.models.weights import check_finite, check_unused

#: Values of general.architecture, and the family of each.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

_NEEDED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
_GEMMA_27B_LAYERS = 62  # which alone scales scores by the width per head, and not by the head's own (llama.cpp)
_ROPE_FACTORS = "rope_freqs.weight"  # what the frequencies of Llama 3.1 and later are divided by
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_ENDS = ("eos", "eot", "eom")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def config_values(file: GgufFile) -> dict[str, Any]:
    """The values of the config.json that the file was made from, as far as a decoder depends on them.

    Raises ValueError, whose text goes on after the file's name, for another architecture and for what no decoder of
    these families has.
    """
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        text = f"has general.architecture={shown(architecture, repr)}; known: {', '.join(ARCHITECTURES)}"
        raise ValueError(text)
    if metadata.get("split.count", 1) != 1:
        raise ValueError("is one of several files of a model; join them with llama-gguf-split --merge")
    for key in _NEEDED:
        if f"{architecture}.{key}" not in metadata:
            raise ValueError(f"has no {architecture}.{key}, which a decoder needs")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    if own.get("expert_count"):
        raise ValueError(
            f"has {architecture}.expert_count={shown(own['expert_count'])}; no mixture of experts is known"
        )
    values = {name: own[key] for key, name in (_NEEDED | _OPTIONAL).items() if key in own}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if type(hidden) is not int or type(heads) is not int or not 0 < heads <= hidden:
        raise ValueError(f"has {shown(heads)} heads (attention.head_count) in a width of {shown(hidden)}")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("has no tensor token_embd.weight")
    head_dim = own.get("attention.key_length", hidden // heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        text = f"has heads of {shown(head_dim)} numbers in K and {shown(own['attention.value_length'])} in V"
        raise ValueError(f"{text}; they have to be equal")
    if (rotated := own.get("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(
            f"rotates {shown(rotated)} of {shown(head_dim)} numbers of a head; whole heads are rotated"
        )
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS]
    values |= {
        "model_type": ARCHITECTURES[architecture],
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "rope_scaling": _rope_scaling(file, own, head_dim),
    }
    if architecture == "gemma3":
        values["sliding_window"] = own.get("attention.sliding_window")
        values["query_pre_attn_scalar"] = hidden / heads if own["block_count"] == _GEMMA_27B_LAYERS else head_dim
    return values


def _rope_scaling(file: GgufFile, own: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    """The value of rope_scaling in config.json."""
    kind = own.get("rope.scaling.type", "none")
    if kind != "none":
        return {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if _ROPE_FACTORS not in file.tensors:
        return None
    # llama3: not the parameters are stored but what comes of them, and all published models share three of four.
    factors, theta = file.read(_ROPE_FACTORS), own.get("rope.freq_base")
    if isinstance(theta, float) and theta > 0 and head_dim == 2 * len(factors) == 2 * factors.size:
        rope = RopeConfig(theta, float(factors.max()), **_LLAMA3)
        found = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(rope, head_dim)
        if np.allclose(factors, found.numpy(), rtol=1e-3):
            names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", "factor": rope.factor, **dict(zip(names, _LLAMA3.values(), strict=True))}
    raise ValueError(f"stretches its rotary angles ({_ROPE_FACTORS}) in another way than Llama 3.1, which is known")


class GgufWeights:
    """Tensors of a GGUF file, dequantised one by one. Raises WeightsError for a file that is none."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        try:
            self._file = read_gguf(path)
            values = config_values(self._file)
        except ValueError as error:
            raise WeightsError(f"{path} {error}") from error
        self._dtype, self._device = dtype, device
        self._is_gemma = values["model_type"] == "gemma3_text"
        self._names = _NAMES | (_GEMMA_NAMES if self._is_gemma else {})
        # llama.cpp rotates neighbours, not halves: the two parts of each head of Q and K are stored interleaved.
        query, key = values["num_attention_heads"], values.get("num_key_value_heads", values["num_attention_heads"])
        self._interleaved = {"attn_q": query, "attn_k": key} if values["model_type"] == "llama" else {}
        self._unused = set(self._file.tensors) - {_ROPE_FACTORS}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource. Raises WeightsError naming a tensor that is missing, has another shape, or holds a
        number that is not finite.
        """
        path, (stored, part) = self._file.path, self._stored(name)
        if stored not in self._file.tensors:
            raise WeightsError(f"{path}: tensor {stored} {list(shape)} is missing")
        found = self._file.tensors[stored].shape
        if found != shape:
            raise WeightsError(f"{path}: tensor {stored} has shape {list(found)}, the model needs {list(shape)}")
        self._unused.discard(stored)
        try:
            values = self._file.read(stored)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path}: {error}") from error
        if heads := self._interleaved.get(part):
            pairs = values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
            values = pairs.swapaxes(1, 2).reshape(shape)
        if self._is_gemma and part.endswith("norm"):
            values = values - 1  # stored as 1 + w
        tensor = torch.from_numpy(values).to(device=self._device, dtype=self._dtype, copy=True)
        check_finite(f"{path}: tensor {stored}", tensor)
        return tensor

    def finish(self) -> None:
        """See WeightSource. Nothing but the factors of rotary angles may be left over."""
        check_unused(self._file.path, self._unused)

    def _stored(self, name: str) -> tuple[str, str]:
        """The tensor's name in the file, and what of it says which part of a layer it is."""
        module, kind = name.rsplit(".", 1)
        prefix, layer = "", re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if layer is not None:
            prefix, module = f"blk.{layer[1]}.", layer[2]
        part = self._names[module]
        return f"{prefix}{part}.{kind}", part
