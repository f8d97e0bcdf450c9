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
    replaced: set[int] = set()  # in this launch

    def replace_once(function: Any) -> Any:
        used = {id(value) for value in function.__globals__.values()}
        needed = {id(module) for module in modules} & used
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
