"""Writes a decoder as a GGUF file, as llama.cpp's converter does, for an engine that reads nothing else.

The file has no tokenizer: prompts are token ids.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlab.attention.registry import select_backend
from kvlab.models.config import DecoderConfig, TransformersConfig, attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.gguf_config import ARCHITECTURES, ROPE_FACTORS
from kvlab.models.gguf_model import stored_name
from kvlab.models.rope import inverse_frequencies
from kvlab.models.weights import WeightSource, check_finite

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: How matrices may be stored; vectors are F32. Q8_0: 32 numbers of 8 bits and their scale, 8.5 bits a number.
STORED = (*_PLAIN, "Q8_0")
_Q8_BLOCK = 32
_WRITTEN = {name: family for name, family in ARCHITECTURES.items() if name != "gemma3"}


def misfit(config: DecoderConfig, stored: str) -> str | None:
    """Why a decoder cannot be written so that llama.cpp computes the same; None where it can."""
    if isinstance(config, TransformersConfig) or config.family not in _WRITTEN.values():
        return f"is not written as GGUF; {', '.join(_WRITTEN.values())} are"
    is_llama, rope = config.family == "llama", config.layers[0].rope
    columns = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    odd = {
        "sliding windows": any(layer.sliding_window for layer in config.layers),
        "soft caps": config.attention_soft_cap or config.logit_soft_cap,
        f"the activation {config.activation}": config.activation != "silu",
        "biases of its attention": config.output_bias and not is_llama,
        "the rotary angles of Llama 3.1": rope.original_max_position and rope.factor != 1 and not is_llama,
        f"rows that are not whole blocks of {_Q8_BLOCK}": stored == "Q8_0" and any(n % _Q8_BLOCK for n in columns),
    }
    for what, has in odd.items():
        if has:
            return f"has {what}, which llama.cpp does not compute of {config.family} in {stored}"
    return None


class _Taken(WeightSource):
    """Tensors without numbers, and what was taken."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def finish(self) -> None:
        """All were taken."""


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of such a decoder, in the order in which `Decoder` takes them: random ones depend on it."""
    taken, specs = _Taken(), attention_specs(config, "float32", "cpu")
    Decoder(config, taken, select_backend(specs), specs, 1)
    return taken.shapes


def write_gguf(config: DecoderConfig, weights: WeightSource, path: Path, stored: str) -> None:
    """Write a decoder that has no `misfit`, tensor by tensor, with its matrices as `stored`, one of STORED.

    Raises WeightsError as the weights do, and for numbers that are not finite as `stored`; OSError.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer, tensors = GGUFWriter(path, config.family), tensor_shapes(config)
    kinds = {name: stored if len(shape) > 1 else "F32" for name, shape in tensors.items()}
    factors = _describe(writer, config)
    for name, shape in tensors.items():
        kind = GGMLQuantizationType[kinds[name]]
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // per_block * block_bytes
        writer.add_tensor_info(stored_name(name)[0], shape, np.dtype(np.float32), size, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in tensors.items():
            writer.write_tensor_data(_bytes(config, name, weights.take(name, shape), kinds[name]))
        if factors is not None:
            writer.write_tensor_data(factors)
        weights.finish()
    finally:
        writer.close()


def _describe(writer: Any, config: DecoderConfig) -> np.ndarray | None:
    """Add the metadata. Returns what the frequencies of rotary angles are divided by, where each has its own."""
    from gguf import RopeScalingType

    rope = config.layers[0].rope
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.theta)
    writer.add_tokenizer_model("none")
    if rope.factor == 1:
        return None
    if rope.original_max_position is None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
        return None
    plain = inverse_frequencies(type(rope)(rope.theta), config.head_dim)
    factors: np.ndarray = (plain / inverse_frequencies(rope, config.head_dim)).numpy()
    return factors


def _bytes(config: DecoderConfig, name: str, tensor: torch.Tensor, stored: str) -> np.ndarray:
    """A tensor as the file holds it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stored_name(name)[1])
    if heads and config.family == "llama":  # llama.cpp rotates neighbours, not halves, of this family alone
        halves = tensor.view(heads, 2, config.head_dim // 2, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    if stored not in _PLAIN:
        data: np.ndarray = quantize(tensor.float().numpy(), GGMLQuantizationType[stored])
        return data
    numbers = tensor.to(_PLAIN[stored]).contiguous()
    check_finite(f"tensor {name}", numbers)
    return numbers.view(torch.uint8).numpy()
