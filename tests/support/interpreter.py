"""Triton's interpreter, without what it does again and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Leave out what has no effect. What kernels compute stays as it is."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        return
    from triton.runtime import interpreter

    _replace_functions_once(patch, interpreter)
    _describe_types_once(patch, interpreter)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # each operation's overflow is computed, and nobody asks for it
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _replace_functions_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """A launch replaces the functions of `triton.language`. The interpreter does so ahead of each call of a device
    function, too, though they are replaced already.
    """
    from triton import language

    replace_functions: Callable[[Any], Any] = interpreter._patch_lang
    modules = language, language.core
    needs: dict[Any, set[int]] = {}  # by function: the modules that it names
    replaced: set[int] = set()  # in this launch

    def replace_once(function: Any) -> Any:
        needed = needs.get(function)
        if needed is None:
            used = {id(value) for value in function.__globals__.values()}
            needed = needs[function] = {id(module) for module in modules} & used
        if needed and needed <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = replace_functions(function)
        restore = scope.restore
        replaced.update(needed)

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _describe_types_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Each operation describes its result anew: its type by a name, its shape by constants."""
    from triton.language import core

    numpy_type, new_block, new_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}  # by name of Triton's
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def known_numpy_type(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    def known_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = element_ty.name, *sizes
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def known_shape(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape not in shapes:
            new_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    patch.setattr(interpreter, "_get_np_dtype", known_numpy_type)
    patch.setattr(core.block_type, "__init__", known_block)
    patch.setattr(core.tensor, "__init__", known_shape)
