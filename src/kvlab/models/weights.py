"""Sources of a model's weights: random numbers, or safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from kvlab.errors import WeightsError

_TILE = 1_048_583  # a prime, so that rows of a weight do not repeat
_BIAS_DEVIATION = 0.1
_LANGUAGE_MODEL = "language_model."  # prefix of the decoder's tensors in a multimodal checkpoint


class WeightSource(Protocol):
    """Gives a decoder its tensors, by the names that transformers' checkpoints use."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, of this shape, in the source's dtype and on its device. Raises WeightsError."""

    def finish(self) -> None:
        """Called when the model has taken all its tensors. Raises WeightsError if some are left over."""


class DummyWeights:
    """Real shapes and random values: copies of one tile of normal numbers, which takes seconds for billions.

    All norm weights are `norm_weight`.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0, norm_weight: float = 1.0
    ) -> None:
        self._tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
        self._offset, self._norm_weight = 0, norm_weight

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource. Matrices have a deviation of 1 / sqrt(columns), which keeps activations alive through
        the layers, so that each token depends on its whole prompt; biases are small compared with the sums.
        Every other vector is a norm's weight.
        """
        is_bias = name.endswith(".bias")
        if len(shape) == 1 and not is_bias:
            return self._tile.new_full(shape, self._norm_weight)
        tile = _bytes(self._tile * (_BIAS_DEVIATION if is_bias else shape[-1] ** -0.5))
        weight = self._tile.new_empty(shape)
        flat = _bytes(weight)
        # Each tensor begins at another offset of the tile, so that no two are equal.
        start, self._offset = -self._offset * weight.itemsize, (self._offset + 7919) % _TILE
        while start < len(flat):
            end = min(start + len(tile), len(flat))
            flat[max(start, 0) : end] = tile[max(-start, 0) : end - start]
            start += len(tile)
        return weight

    def finish(self) -> None:
        """Nothing can be left over."""


class SafetensorsWeights:
    """Tensors of a checkpoint directory: `model.safetensors`, or the shards its index names.

    Files are mapped into memory and read tensor by tensor. Of a multimodal checkpoint only the language model is
    seen. Raises WeightsError where the directory holds no such files, or an index that names a file which is not
    there.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory, self._dtype, self._device = directory, dtype, device
        owner: dict[str, Any] = {}
        for file in self._files(directory):
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{file}: not a readable safetensors file ({error})") from error
            owner.update(dict.fromkeys(handle.keys(), handle))
        self._prefix = _LANGUAGE_MODEL if any(name.startswith(_LANGUAGE_MODEL) for name in owner) else ""
        ours = [name for name in owner if name.startswith(self._prefix)]
        self._owner = {name.removeprefix(self._prefix): owner[name] for name in ours}
        self._unused = set(self._owner)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource. Raises WeightsError naming a tensor that is missing or has another shape."""
        if name not in self._owner:
            raise WeightsError(f"{self._directory}: tensor {name} {list(shape)} is missing")
        handle, stored = self._owner[name], self._prefix + name
        found, needed = list(handle.get_slice(stored).get_shape()), list(shape)
        if found != needed:
            raise WeightsError(f"{self._directory}: tensor {name} has shape {found}, the model needs {needed}")
        self._unused.discard(name)
        tensor: torch.Tensor = handle.get_tensor(stored)
        # Always a copy: a mapped tensor would keep the whole file in memory.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def finish(self) -> None:
        """See WeightSource. Tables that the model computes itself may be left over, and a stored copy of a tied
        output layer.
        """
        unused = self._unused - {"lm_head.weight"}
        if extra := sorted(name for name in unused if not name.endswith("rotary_emb.inv_freq")):
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise WeightsError(f"{self._directory}: the model has no place for tensor(s) {shown}")

    @staticmethod
    def _files(directory: Path) -> list[Path]:
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.is_file():
            return [single]
        if not index.is_file():
            raise WeightsError(f"{directory}: neither model.safetensors nor model.safetensors.index.json")
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in names if not (directory / name).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: not an index of safetensors shards ({error!r})") from error
        if missing:
            raise WeightsError(f"{index} names {missing[0]}, which is not there")
        return [directory / name for name in names]


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's memory, flat. On a CPU as a numpy array: numpy copies in the calling thread, and does not wait for
    other threads, which makes PyTorch's copies a hundred times slower on a busy machine.
    """
    flat = tensor.view(-1).view(torch.uint8)
    return flat.numpy() if flat.device.type == "cpu" else flat


def open_weights(
    where: str, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0, norm_weight: float = 1.0
) -> DummyWeights | SafetensorsWeights:
    """`dummy`, a directory, or a hub id (downloaded once); `seed` and `norm_weight` are those of DummyWeights.

    Raises WeightsError where no weights are found.
    """
    if where == "dummy":
        return DummyWeights(dtype, device, seed, norm_weight)
    directory = Path(os.path.expanduser(where))
    return SafetensorsWeights(directory if directory.is_dir() else _download(where), dtype, device)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's client raises many kinds: offline, no such id, bad name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"model.weights={repository}: no such directory, and the hub gave nothing ({reason}); "
            "point it at a directory that holds model.safetensors"
        ) from error
