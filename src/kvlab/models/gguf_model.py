"""The weights of a model in a GGUF file, by the names and in the order of transformers' checkpoints."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from kvlab.errors import WeightsError
from kvlab.models.gguf import read_gguf
from kvlab.models.gguf_config import NAMES, ROPE_FACTORS, config_values
from kvlab.models.weights import WeightSource, check_finite, check_unused


class GgufWeights(WeightSource):
    """Tensors of a GGUF file, dequantised one by one. Raises WeightsError for a file that is none."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        try:
            self._file = read_gguf(path)
            values = config_values(self._file)
        except ValueError as error:
            raise WeightsError(f"{path} {error}") from error
        self._dtype, self._device = dtype, device
        self._is_gemma = values["model_type"] == "gemma3_text"
        self._names = NAMES["modules"] | (NAMES["gemma_modules"] if self._is_gemma else {})
        # llama.cpp rotates neighbours, not halves: the two parts of each head of Q and K are stored interleaved.
        query, key = values["num_attention_heads"], values.get("num_key_value_heads", values["num_attention_heads"])
        self._interleaved = {"attn_q": query, "attn_k": key} if values["model_type"] == "llama" else {}
        self._unused = set(self._file.tensors) - {ROPE_FACTORS}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises WeightsError naming a tensor that is missing, has another shape, or holds a
        number that is not finite.
        """
        path, (stored, part) = self._file.path, stored_name(name, self._names)
        if stored not in self._file.tensors:
            raise WeightsError(f"{path}: tensor {stored} {list(shape)} is missing")
        kept = self._file.tensors[stored].shape
        if kept != shape:
            raise WeightsError(f"{path}: tensor {stored} has shape {list(kept)}, the model needs {list(shape)}")
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
        """Nothing but the factors of rotary angles may be left over."""
        check_unused(self._file.path, self._unused)


def stored_name(name: str, names: Mapping[str, str] = NAMES["modules"]) -> tuple[str, str]:
    """A tensor's name in a file, and what of it says which part of a layer it is."""
    module, kind = name.rsplit(".", 1)
    prefix, layer = "", re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is not None:
        prefix, module = f"blk.{layer[1]}.", layer[2]
    part = names[module]
    return f"{prefix}{part}.{kind}", part
