"""Sources of a model's weights: random numbers, safetensors files; `gguf_model.py` has that of GGUF files."""

import hashlib
import math
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from kvlab.errors import WeightsError, shown
from kvlab.models.files import check_file, read_object

_TILE = 1_048_583  # a prime, so that rows of a weight do not repeat
_BIAS_DEVIATION = 0.1
_DIGESTED = 1024  # numbers of a tensor that its digest is of, at least
_DTYPES = ("F64", "F32", "F16", "BF16")  # what safetensors calls floating-point numbers without a scale
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LANGUAGE_MODEL = "language_model."  # prefix of the decoder's tensors in a multimodal checkpoint


class WeightSource(Protocol):
    """Gives a decoder its tensors, by the names that transformers' checkpoints use."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, of this shape, in the source's dtype and on its device. Raises WeightsError."""

    def finish(self) -> None:
        """Called when the model has taken all its tensors. Raises WeightsError if some are left over."""


class DummyWeights(WeightSource):
    """Real shapes and random values: copies of one tile of normal numbers, which takes seconds for billions.

    All norm weights are `norm_weight`.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0, norm_weight: float = 1.0
    ) -> None:
        self._tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
        self._offset, self._norm_weight = 0, norm_weight

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Matrices have a deviation of 1 / sqrt(columns), which keeps activations alive through
        the layers, so that each token depends on its whole prompt; biases are small compared with the sums.
        Every other vector is a norm's weight.
        """
        is_bias = name.endswith(".bias")
        if len(shape) < 2 and not is_bias:
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


class DigestedWeights(WeightSource):
    """Another source, with a digest of what was taken from it: each tensor's name and shape, and some of its
    numbers, so that it changes with any tensor whose numbers all differ.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._sum = hashlib.sha256()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return self._sum.hexdigest()[:16]

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._source.take(name, shape)
        flat = tensor.reshape(-1)
        self._sum.update(f"{name} {shape}".encode())
        self._sum.update(_bytes(flat[:: max(len(flat) // _DIGESTED, 1)].cpu().contiguous()))
        return tensor

    def finish(self) -> None:
        self._source.finish()


class SafetensorsWeights(WeightSource):
    """Tensors of a checkpoint directory: `model.safetensors`, or the shards its index names.

    Files are mapped into memory and read tensor by tensor. Of a multimodal checkpoint only the language model is
    seen. Raises WeightsError where the directory holds no such files, an index that names anything but files beside
    it, or a tensor twice. Pickled weights are never read.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory, self._dtype, self._device = directory, dtype, device
        owner: dict[str, tuple[Path, Any]] = {}
        for file in _weight_files(directory):
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
            except (OSError, MemoryError, SafetensorError) as error:
                raise WeightsError(f"{file}: not a readable safetensors file ({shown(error)})") from error
            for name in handle.keys():  # noqa: SIM118 - not iterable itself
                if name in owner:
                    raise WeightsError(f"{file}: tensor {shown(name)} is in {owner[name][0].name} too")
                owner[name] = file, handle
        self._prefix = _LANGUAGE_MODEL if any(name.startswith(_LANGUAGE_MODEL) for name in owner) else ""
        ours = [name for name in owner if name.startswith(self._prefix)]
        self._owner = {name.removeprefix(self._prefix): owner[name] for name in ours}
        self._unused = set(self._owner)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises WeightsError naming a tensor that is missing, has another shape, is stored as
        anything but floating-point numbers, or holds one that is not finite.
        """
        if name not in self._owner:
            raise WeightsError(f"{self._directory}: tensor {name} {list(shape)} is missing")
        (file, handle), stored = self._owner[name], self._prefix + name
        part = handle.get_slice(stored)
        stored_shape, needed, kind = list(part.get_shape()), list(shape), part.get_dtype()
        if stored_shape != needed:
            raise WeightsError(f"{file}: tensor {name} has shape {shown(stored_shape)}, the model needs {needed}")
        if kind not in _DTYPES:
            raise WeightsError(f"{file}: tensor {name} is stored as {kind}; known: {', '.join(_DTYPES)}")
        self._unused.discard(name)
        # Always a copy: a mapped tensor would keep the whole file in memory.
        tensor: torch.Tensor = handle.get_tensor(stored).to(device=self._device, dtype=self._dtype, copy=True)
        check_finite(f"{file}: tensor {name}", tensor)
        return tensor

    def finish(self) -> None:
        """Tables that the model computes itself may be left over, and a stored copy of a tied
        output layer.
        """
        unused = self._unused - {"lm_head.weight"}
        check_unused(self._directory, {name for name in unused if not name.endswith("rotary_emb.inv_freq")})


def check_finite(subject: str, tensor: torch.Tensor) -> None:
    """Raise WeightsError unless all numbers of `subject`, a tensor, are finite."""
    if not _is_finite(tensor):
        raise WeightsError(f"{subject} holds numbers that are not finite in {tensor.dtype}")


def check_unused(where: Path, names: set[str]) -> None:
    """Raise WeightsError, with the first of them, unless no tensors of a checkpoint are left over."""
    if extra := sorted(names):
        text = ", ".join(map(shown, extra[:5])) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
        raise WeightsError(f"{where}: the model has no place for tensor(s) {text}")


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises WeightsError."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if os.path.lexists(single):
        files = {single: str(single)}
    elif os.path.lexists(index):
        files = {directory / name: f"{index} names {shown(name)}, which" for name in _shards(index)}
    else:
        pickled = [file.name for file in sorted(directory.glob("*.*")) if file.suffix in _PICKLED]
        why = "may run code when it is read, and kvlab reads safetensors alone: convert it"
        advice = f"{shown(pickled[0])} {why}" if pickled else "model.weights=dummy takes random ones"
        raise WeightsError(f"{directory}: neither {single.name} nor {index.name}; {advice}")
    for file, subject in files.items():
        try:
            check_file(file)
        except ValueError as error:
            raise WeightsError(f"{subject} {error}") from error
    return list(files)


def _shards(index: Path) -> list[str]:
    """The names of the files that an index gives its tensors to: those of files beside it, which lead nowhere else.
    (A file itself may be a link, as in a hub's cache: its owner made that, not who wrote the index.)
    """
    try:
        weight_map = read_object(index).get("weight_map")
    except ValueError as error:
        raise WeightsError(f"{index}: not an index of safetensors shards (it {error})") from error
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{index}: not an index of safetensors shards (weight_map has to name a file by tensor)")
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            advice = "a shard has to be a .safetensors file beside the index, named without a folder"
            raise WeightsError(f"{index}: weight_map names {shown(name)}; {advice}")
    return sorted(set(names))


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's memory, flat. On a CPU as a numpy array: numpy copies in the calling thread, and does not wait for
    other threads, which makes PyTorch's copies a hundred times slower on a busy machine.
    """
    flat = tensor.view(-1).view(torch.uint8)
    return flat.numpy() if flat.device.type == "cpu" else flat


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN, found without another tensor. On a CPU by the bits: of either sign,
    those of infinity and NaN are the largest when read as whole numbers; with numpy, for the reason of `_bytes`.
    """
    if tensor.device.type != "cpu":
        return all(math.isfinite(end) for end in tensor.aminmax())
    bits, size = _bytes(tensor), tensor.itemsize
    infinities = _bytes(torch.tensor([math.inf, -math.inf], dtype=tensor.dtype))
    return all(bits.view(f"{sign}{size}").max() < infinities.view(f"{sign}{size}").max() for sign in "iu")
