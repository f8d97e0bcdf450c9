"""The configuration of a model in a GGUF file, in the words of a config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import shown
from kvlab.models.config import RopeConfig
from kvlab.models.gguf import GgufFile

#: What GGUF calls values of a config.json, and the modules of transformers in a layer.
NAMES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("gguf_names.json").read_text(encoding="utf-8")
)
#: Values of general.architecture, and the family of each.
ARCHITECTURES = NAMES["architectures"]
_GEMMA_27B_LAYERS = 62  # which alone scales scores by the width per head, and not by the head's own (llama.cpp)
ROPE_FACTORS = "rope_freqs.weight"  # what the frequencies of Llama 3.1 and later are divided by
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_ENDS = ("eos", "eot", "eom")


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
    for key in NAMES["needed"]:
        if f"{architecture}.{key}" not in metadata:
            raise ValueError(f"has no {architecture}.{key}, which a decoder needs")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    if own.get("expert_count"):
        raise ValueError(
            f"has {architecture}.expert_count={shown(own['expert_count'])}; no mixture of experts is known"
        )
    values = {name: own[key] for key, name in (NAMES["needed"] | NAMES["optional"]).items() if key in own}
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
    if ROPE_FACTORS not in file.tensors:
        return None
    from kvlab.models.rope import inverse_frequencies  # this late, since it imports torch

    # llama3: not the parameters are stored but what comes of them, and all published models share three of four.
    factors, theta = file.read(ROPE_FACTORS), own.get("rope.freq_base")
    if isinstance(theta, float) and theta > 0 and head_dim == 2 * len(factors) == 2 * factors.size:
        rope = RopeConfig(theta, float(factors.max()), **_LLAMA3)
        expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(rope, head_dim)
        if np.allclose(factors, expected.numpy(), rtol=1e-3):
            names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", "factor": rope.factor, **dict(zip(names, _LLAMA3.values(), strict=True))}
    raise ValueError(f"stretches its rotary angles ({ROPE_FACTORS}) in another way than Llama 3.1, which is known")
