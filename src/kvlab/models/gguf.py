"""GGUF, the file format of llama.cpp: metadata and tensors in one file. Strangers wrote it, so that every length is
checked before it is believed: the `gguf` package's own reader takes the counts in a file at their word.

Layout (docs/gguf.md of ggml): header, metadata, the tensors' names and shapes, padding, the tensors' data.
"""

import math
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import shown
from kvlab.models.files import check_file

#: Stored types that are turned into floating-point numbers; `gguf` names them and does it.
TYPES: tuple[str, ...] = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K")
TYPES += ("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

_VERSIONS = (2, 3)
_MOST_METADATA = 64 << 20  # bytes; the largest vocabularies take 15 million
_MOST_VALUES = 1 << 22  # of an array
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


class GgufTensor(NamedTuple):
    """Where a tensor is: its `size` bytes begin at `offset` of the file. `shape` is in PyTorch's order."""

    shape: tuple[int, ...]
    type: str
    offset: int
    size: int


class GgufFile(NamedTuple):
    """A GGUF file whose metadata was read and whose tensors lie within it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor, dequantised."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, tensor.size, offset=tensor.offset)
        if len(data) != tensor.size:
            raise ValueError(f"is cut off: tensor {shown(name)} ends beyond it")
        with np.errstate(all="ignore"):  # what is not finite is found later
            if tensor.type in ("F32", "F16"):
                values: Any = data.view(np.float32 if tensor.type == "F32" else np.float16)
            else:
                values = dequantize(data, GGMLQuantizationType[tensor.type])
            numbers: NDArray[np.float32] = values.astype(np.float32, copy=False).reshape(tensor.shape)
        return numbers


def is_gguf(where: str) -> bool:
    """Whether a setting names a GGUF file rather than a directory or the id of a hub."""
    return where.lower().endswith(".gguf")


def read_gguf(path: Path) -> GgufFile:
    """The metadata of a file and where its tensors are. Raises ValueError, whose text goes on after the file's
    name, for one that is cut off, is no GGUF of version 2 or 3, or holds a tensor of a type that is not in TYPES.
    """
    return _read(path, check_file(path), os.stat(path).st_mtime_ns)


@lru_cache(maxsize=2)  # configuration, tokenizer and weights of a model are read one after the other
def _read(path: Path, size: int, _modified: int) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _Reader(file, size).read(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def read(self, path: Path) -> GgufFile:
        if self._file.read(4) != b"GGUF":
            raise ValueError("is no GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise ValueError(f"is {kind}; GGUF of versions 2 and 3 is read, little-endian")
        tensors, values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self._text()
            if key in metadata:
                raise ValueError(f"has the key {shown(key)} twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise ValueError(f"has general.alignment={shown(alignment, repr)}; from 1 to 65536")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, tensor in infos:
            if name in placed:
                raise ValueError(f"has the tensor {shown(name)} twice")
            if start + tensor.offset + tensor.size > self._size:
                raise ValueError(f"is cut off: tensor {shown(name)} ends beyond it; fetch it again")
            placed[name] = tensor._replace(offset=start + tensor.offset)
        return GgufFile(path, metadata, placed)

    def _take(self, count: int) -> bytes:
        if self._at + count > self._size:
            raise ValueError("is cut off: it ends within its metadata; fetch it again")
        if self._at + count > _MOST_METADATA:
            raise ValueError(f"has more metadata than the {_MOST_METADATA} bytes that are read")
        self._at += count
        return self._file.read(count)

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{kind}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"has a text that is not UTF-8, before byte {self._at}") from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"has a value of type {kind}, which GGUF does not know")
        kind, count = self._number("I"), self._number("Q")
        if count > _MOST_VALUES:
            raise ValueError(f"has an array of {count} values, more than the {_MOST_VALUES} that are read")
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"has an array of values of type {kind}, which no model needs")
        return list(self._numbers(_SCALARS[kind], count))

    def _tensor(self) -> tuple[str, GgufTensor]:
        """Name and tensor, whose offset counts from the beginning of the data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(
                f"has the tensor {shown(name)} of {dimensions} dimensions; from 1 to {_MOST_DIMENSIONS}"
            )
        shape = tuple(reversed(self._numbers("Q", dimensions)))
        number, offset = self._number("I"), self._number("Q")
        kind = {kind.value: kind.name for kind in GGMLQuantizationType}.get(number, f"type {number}")
        if kind not in TYPES:
            raise ValueError(f"stores tensor {shown(name)} as {kind}; dequantised: {', '.join(TYPES)}")
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if 0 in shape or shape[-1] % per_block:
            raise ValueError(
                f"has the tensor {shown(name)} {list(shape)}, whose rows are not whole blocks of {kind}"
            )
        return name, GgufTensor(shape, kind, offset, math.prod(shape) // per_block * block_bytes)
