"""The tensors of a loaded model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from kvlab.kv.spec import KVSpec
from kvlab.models.rope import RotaryEmbedding


def loaded_bytes(model: Any) -> tuple[int, int]:
    """Bytes of a model's parameters and of its rotary tables, each tensor once, wherever it is kept."""
    rotary = [table for part in model._rotary for table in part.tables]
    mine = {id(table) for table in rotary}
    parameters = {id(tensor): tensor.nbytes for tensor in _tensors(model, set()) if id(tensor) not in mine}
    return sum(parameters.values()), sum(table.nbytes for table in rotary)


def _tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in seen or isinstance(thing, str | int | float | type | KVSpec | RotaryEmbedding):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif type(thing).__module__.startswith("kvlab.") or isinstance(thing, list | tuple | dict):
        for part in gc.get_referents(thing):
            yield from _tensors(part, seen)
    elif callable(thing):  # a partial or a bound method
        for part in (getattr(thing, "keywords", None), getattr(thing, "__self__", None)):
            yield from _tensors(part, seen)
