"""The library's interface as Python has it: structures, kinds, and the check that the library has the same.

`interface.hpp` declares it for C++. The library describes its constants, structures and functions, as the compiler
laid them out; `bind` compares that with what is declared here, and takes the functions' types from it.
"""

import ctypes
from collections.abc import Mapping
from enum import IntEnum

import torch

from kvlab.errors import KernelError

#: Rows of a tile. `LayersStep.normed` and `LayersStep.scratch` have room for whole tiles.
TILE_SIDE = 16

#: Products of at most so many rows count as those of few rows when instructions are chosen.
FEW_ROWS = 8

#: The fastest products in integers, for `kvlab_multiply_in_registers`.
INT8_PATH = 3

#: The largest head that `rotate_and_store` takes.
MAX_HEAD_DIM = 512

#: How K or V is stored, by the type of its tensor; every other type is PLAIN.
PLAIN, KV_FORMATS = 0, {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.uint8: 4}


class WeightFormat(IntEnum):
    """How a packed weight is stored."""

    PLAIN = 0  # as it is, in bfloat16 or float32
    INT8 = 1  # of bfloat16, with a scale for each output
    COMPACT = 2  # bfloat16 in 12 bits, without loss
    INT8_W8A8 = 3  # as INT8; products round rows of x to int8, too, and are summed in integers


_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class PartKind(IntEnum):
    """Kinds of LayerPart."""

    INPUT_NORM = 0
    RESIDUAL_NORM = 1
    OUTPUT_NORM = 2
    ATTENTION = 3
    MLP = 4


class Norm(ctypes.Structure):
    """The weight of a norm; null: there is no norm."""

    _fields_ = (("weight", _pointer), ("eps", _float), ("weight_bytes", _int))


class LinearWeight(ctypes.Structure):
    """A packed weight."""

    _fields_ = (
        *((name, _pointer) for name in ("packed", "scales", "bias")),
        *((name, _int) for name in ("outputs", "inputs", "format", "element_bytes")),
    )


class AttentionPart(ctypes.Structure):
    """Attention with its projections. `layer` is that of the cache."""

    _fields_ = (
        *((name, LinearWeight) for name in ("qkv", "out")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, _pointer) for name in ("cosine", "sine")),
        *((name, _int) for name in ("layer", "num_heads", "num_kv_heads", "head_dim", "window")),
        *((name, _float) for name in ("scale", "soft_cap")),
    )


class MlpPart(ctypes.Structure):
    """A gated feed-forward."""

    _fields_ = (("gate_up", LinearWeight), ("down", LinearWeight), ("gelu", _int))


class LayerPart(ctypes.Structure):
    """One operation of a decoder layer: a PartKind, and the address of the structure that belongs to it."""

    _fields_ = (("kind", _int), ("at", _pointer))


class LayersStep(ctypes.Structure):
    """What one step works on."""

    _fields_ = (
        *((name, _pointer) for name in ("keys", "values", "key_scales", "value_scales")),
        ("rows", ctypes.c_int64),
        *((name, _pointer) for name in ("positions", "slot_mapping", "block_tables", "places")),
        *((name, _pointer) for name in ("seq_lens", "query_start", "sampled")),
        *((name, _pointer) for name in ("residual", "delta", "normed", "scratch", "times", "sums", "sum")),
        *((name, _int) for name in ("tokens", "num_sampled", "hidden", "num_sequences", "table_width")),
        *((name, _int) for name in ("block_size", "key_format", "value_format", "element_bytes", "threads")),
    )


CONSTANTS = {
    "TILE_SIDE": TILE_SIDE,
    "FEW_ROWS": FEW_ROWS,
    "MAX_HEAD_DIM": MAX_HEAD_DIM,
    "INT8_PATH": INT8_PATH,
    "PLAIN": PLAIN,
    **dict(zip(("INT8", "FP8_E4M3", "FP8_E5M2", "INT4"), KV_FORMATS.values(), strict=True)),
    **{kind.name: kind.value for kind in PartKind},
    **{f"WEIGHT_{kind.name}": kind.value for kind in WeightFormat},
}
STRUCTURES: tuple[type[ctypes.Structure], ...] = (Norm, LinearWeight, AttentionPart, MlpPart, LayerPart, LayersStep)
_TYPES: dict[str, type[ctypes._SimpleCData] | None] = {  # type: ignore[type-arg]
    "p": _pointer,
    "i": _int,
    "q": ctypes.c_int64,
    "f": _float,
    "s": ctypes.c_char_p,
    "v": None,
}


def kv_format(cache: torch.Tensor) -> int:
    """How the K or V in a tensor is stored."""
    return KV_FORMATS.get(cache.dtype, PLAIN)


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's numbers begin; None, a null pointer, without one."""
    return None if tensor is None else tensor.data_ptr()


def bind(library: ctypes.CDLL) -> None:
    """Check the library's constants and structures, and give its functions their types.

    Raises KernelError, naming the structure and the field, where C++ and Python differ.
    """
    try:
        library.kvlab_interface.restype = ctypes.c_char_p
        description: bytes = library.kvlab_interface()
    except AttributeError as error:
        raise KernelError(f"{library._name} is no library of kvlab's kernels: {error}") from error
    lines = [line.split() for line in description.decode().splitlines()]
    for name, result, *arguments in (line[1:] for line in lines if line[0] == "function"):
        function = getattr(library, name)
        function.restype = _TYPES[result]
        function.argtypes = [_TYPES[argument] for argument in arguments]
    constants = {name: int(value) for kind, name, value in (line for line in lines if line[0] == "constant")}
    _compare("the constants", constants, CONSTANTS)
    described = {line[1]: (int(line[2]), line[3:]) for line in lines if line[0] == "structure"}
    declared = {structure.__name__: structure for structure in STRUCTURES}
    _compare("the structures", dict.fromkeys(described, ""), dict.fromkeys(declared, ""))
    for name, (size, fields) in described.items():
        _compare(f"structure {name}", _fields(fields), _declared_fields(declared[name]), "field ")
        _compare(f"structure {name}", {"in all": size}, {"in all": ctypes.sizeof(declared[name])}, "bytes ")


def _fields(described: list[str]) -> dict[str, str]:
    """Each field's type and offset, in words."""
    return {name: f"{kind} at byte {offset}" for name, kind, offset in (field.split(":") for field in described)}


def _declared_fields(structure: type[ctypes.Structure]) -> dict[str, str]:
    letters: dict[object, str] = {kind: letter for letter, kind in _TYPES.items()}
    return {
        name: f"{letters.get(kind, kind.__name__)} at byte {getattr(structure, name).offset}"
        for name, kind, *_ in structure._fields_
    }


def _compare(of: str, native: Mapping[str, object], declared: Mapping[str, object], what: str = "") -> None:
    """Raise KernelError for the first name that is missing on one side, or has another value there."""
    for name in dict.fromkeys([*native, *declared]):
        in_native, in_python = native.get(name, "missing"), declared.get(name, "missing")
        if in_native != in_python:
            raise KernelError(
                f"{of}, {what}{name}: {in_native} in the native library, {in_python} in Python; "
                "interface.hpp and interface.py have to declare the same"
            )
