"""C++ and Python declare the same structures, constants and functions, or the library is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kvlab.errors import KernelError
from kvlab.kernels.cpu import interface
from kvlab.kernels.cpu.native import load

STRUCTURES = interface.STRUCTURES


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        return load()
    except KernelError as error:
        pytest.skip(str(error))


def with_fields(name: str, fields: Any) -> tuple[type[ctypes.Structure], ...]:
    """The structures, one of them with other fields."""
    changed = type(name, (ctypes.Structure,), {"_fields_": fields})
    return tuple(changed if one.__name__ == name else one for one in STRUCTURES)


def fields_of(structure: type[ctypes.Structure]) -> list[Any]:
    return list(structure._fields_)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            [("eps", ctypes.c_float), ("weight", ctypes.c_void_p), ("weight_bytes", ctypes.c_int)],
            "structure Norm, field weight: p at byte 0 in the native library, p at byte 8 in Python",
        ),
        (
            [("weight", ctypes.c_void_p), ("eps", ctypes.c_int), ("weight_bytes", ctypes.c_int)],
            "structure Norm, field eps: f at byte 8 in the native library, i at byte 8 in Python",
        ),
        (
            [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float), ("weight_bytes", ctypes.c_int)],
            "structure Norm, field eps: f at byte 8 in the native library, missing in Python",
        ),
        (
            [*fields_of(interface.Norm), ("offset", ctypes.c_float)],
            "structure Norm, field offset: missing in the native library, f at byte 16 in Python",
        ),
    ],
)
def test_another_field_is_named(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, changed: Any, sentence: str
) -> None:
    monkeypatch.setattr(interface, "STRUCTURES", with_fields("Norm", changed))
    with pytest.raises(KernelError) as refusal:
        interface.bind(library)
    assert str(refusal.value).startswith(sentence)
    assert "interface.hpp and interface.py" in str(refusal.value)


def test_every_field_of_every_structure_is_compared(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for structure in STRUCTURES:
        for index, (name, *_) in enumerate(fields_of(structure)):
            fields = fields_of(structure)
            fields[index] = (name, ctypes.c_double)
            monkeypatch.setattr(interface, "STRUCTURES", with_fields(structure.__name__, fields))
            with pytest.raises(KernelError, match=f"structure {structure.__name__}, field "):
                interface.bind(library)


def test_another_size_is_named(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "sizeof", lambda structure: 1)
    with pytest.raises(KernelError, match="structure Norm, bytes in all: 16 in the native library, 1 in Python"):
        interface.bind(library)


def test_a_structure_of_one_side_alone_is_named(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "STRUCTURES", STRUCTURES[:-1])
    with pytest.raises(KernelError, match=r"the structures, LayersStep: .* missing in Python"):
        interface.bind(library)


@pytest.mark.parametrize("name", interface.CONSTANTS)
def test_another_constant_is_named(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(interface.CONSTANTS, name, -1)
    with pytest.raises(KernelError, match=f"the constants, {name}: .* in the native library, -1 in Python"):
        interface.bind(library)


def test_functions_check_their_arguments(library: ctypes.CDLL) -> None:
    """Their types come from the library's own description."""
    with pytest.raises(TypeError, match="at least 7 arguments"):
        library.kvlab_gated(None, 0)
    with pytest.raises(ctypes.ArgumentError, match="argument 2"):
        library.kvlab_gated(None, 1.5, 0, 0, None, 4, 1)
    assert library.kvlab_packed_linear_bytes(2**20, 2**14, 0, 2) == 2**35  # more than an int holds


def test_a_library_of_something_else_is_refused() -> None:
    with pytest.raises(KernelError, match="no library of kvlab's kernels"):
        interface.bind(ctypes.CDLL(None))
