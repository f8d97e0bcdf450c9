"""Triton's interpreter, without what it does again and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Have a launch replace the functions of `triton.language` once. The interpreter does so ahead of each call of a
    device function, too, though they are replaced already: a third of the time of a launch.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        return
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    modules = language, language.core
    replaced: set[int] = set()  # in this launch

    def replace_once(function: Any) -> Any:
        needed = {at for at, module in enumerate(modules) if _has(function.__globals__, module)}
        if needed <= replaced and needed:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = replace(function)
        restore = scope.restore
        replaced.update(needed)

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _has(variables: dict[str, Any], module: Any) -> bool:
    return any(value is module for value in variables.values())
