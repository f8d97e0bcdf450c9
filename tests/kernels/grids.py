"""Grids of settings in one test: thousands of cases would take longer to collect than to run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from itertools import combinations, product
from typing import Any

import pytest
import torch

Case = tuple[tuple[str, Any], ...]
# Where there is no GPU, torch.manual_seed keeps its caller's stack for one, which takes a hundred times as long.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def folded(test: Callable[..., None]) -> Callable[..., None]:
    """The test with all that `parametrize` gives it, one after another; a failure names its case.

    All cases for the architecture that this machine uses, and on a GPU. For other architectures and in Triton's
    interpreter, so many that each pair of two settings' values is among them. `KVLAB_KERNEL_CASES`: `all` cases,
    `pairs`, or `values`, so many that each value is among them, for every one.
    """
    grid = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    settings = [_settings(*mark.args) for mark in grid]

    @wraps(test)
    def each(*args: Any, request: pytest.FixtureRequest, **fixtures: Any) -> None:
        cases, skipped = _cases(request, settings), 0
        for case in cases:
            seed(0)
            values = dict(pair for setting in case for pair in setting)
            try:
                test(*args, **fixtures, **values)
            except pytest.skip.Exception:
                skipped += 1
                if skipped == len(cases):
                    raise
            except BaseException as error:
                error.add_note(f"in the case {values}")
                raise

    names = {name for setting in settings for name, _ in setting[0]}
    kept = [each for name, each in inspect.signature(test).parameters.items() if name not in names]
    asked = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
    each.__signature__ = inspect.Signature([*kept, asked])  # type: ignore[attr-defined]
    each.pytestmark = [mark for mark in test.pytestmark if mark not in grid]  # type: ignore[attr-defined]
    return each


def _settings(names: str | tuple[str, ...], values: Any) -> list[Case]:
    """The values of a setting, or of several that vary together, each with its name."""
    if isinstance(names, str):
        return [((names, value),) for value in values]
    return [tuple(zip(names, row, strict=True)) for row in values]


def _cases(request: pytest.FixtureRequest, settings: list[list[Case]]) -> list[tuple[Case, ...]]:
    architecture = getattr(request.node, "callspec", None) and request.node.callspec.params.get("cpu_architecture")
    usual = "all" if architecture == "native" or torch.cuda.is_available() else "pairs"
    whole, asked = list(product(*settings)), os.environ.get("KVLAB_KERNEL_CASES", usual)
    return whole if asked == "all" else _with_each(2 if asked == "pairs" else 1, whole)


def _with_each(count: int, whole: list[tuple[Case, ...]]) -> list[tuple[Case, ...]]:
    """Few of a grid's cases, which have each combination of the values of `count` settings: again and again the
    case with the most combinations that no chosen one has.
    """
    values = [sorted((name, str(value)) for setting in case for name, value in setting) for case in whole]
    if len(values[0]) < count:
        return whole
    sets = [set(combinations(each, count)) for each in values]
    missing, chosen = set().union(*sets), list[tuple[Case, ...]]()
    while missing:
        most = max(range(len(whole)), key=lambda at: len(sets[at] & missing))
        chosen.append(whole[most])
        missing -= sets[most]
    return chosen
