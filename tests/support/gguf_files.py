"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_ARCHITECTURES = {"gemma3_text": "gemma3"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stored_name(name: str, *, gemma: bool) -> str:
    """What GGUF calls a tensor of transformers."""
    module, kind = name.rsplit(".", 1)
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_LAYER if gemma else _LAYER)[part]}.{kind}"


def write_gguf(reference: Any, path: Path, stored: str = "F32", metadata: dict[str, Any] | None = None) -> None:
    """A model of transformers, its matrices as `stored`, its vectors as F32. `metadata` replaces or adds values, or
    leaves them out (None).
    """
    config, gemma = reference.config, reference.config.model_type == "gemma3_text"
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
    values: dict[str, Any] = {
        f"{architecture}.vocab_size": config.vocab_size,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.attention.key_length": reference.model.layers[0].self_attn.head_dim,
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
    }
    if gemma:
        values[f"{architecture}.attention.sliding_window"] = config.sliding_window
    if rope["rope_type"] == "linear":
        values |= {f"{architecture}.rope.scaling.type": "linear"}
        values |= {f"{architecture}.rope.scaling.factor": float(rope["factor"])}
    ends = config.eos_token_id
    if ends is not None:
        values["tokenizer.ggml.eos_token_id"] = ends[0] if isinstance(ends, list) else ends
    for key, value in (values | (metadata or {})).items():
        if value is not None:
            add_value(writer, key, value)
    tensors = reference.state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if rope["rope_type"] == "llama3":
        exponents = torch.arange(0, 1, 2 / reference.model.layers[0].self_attn.head_dim)
        plain = rope["rope_theta"] ** -exponents
        writer.add_tensor("rope_freqs.weight", (plain / reference.model.rotary_emb.inv_freq).numpy())
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if gemma and name.endswith("norm.weight"):
            array = array + 1
        add_tensor(writer, stored_name(name, gemma=gemma), array, stored if array.ndim > 1 else "F32")
    close(writer)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A value of the type that llama.cpp gives such values."""
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, stored: str) -> None:
    """A tensor as `stored`."""
    kind = gguf.GGMLQuantizationType[stored]
    if stored == "F32":
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind)


def close(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
