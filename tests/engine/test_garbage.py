"""The garbage collector's settings while requests are served, and afterwards."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from kvlab.cli.compose import compose_run
from kvlab.engine import garbage
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.executors import torch as torch_executor
from kvlab.engine.garbage import gc_frozen

pytestmark = pytest.mark.usefixtures("no_requests_are_served")


def test_the_last_of_several_users_restores_the_settings() -> None:
    before = gc.get_threshold()
    first, second = gc_frozen(), gc_frozen()
    with first:
        frozen, during = gc.get_freeze_count(), gc.get_threshold()
        assert frozen > 0
        assert during > before
        second.__enter__()
    assert (gc.get_freeze_count() > 0, gc.get_threshold()) == (True, during)
    assert gc.isenabled()
    second.__exit__(None, None, None)
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_an_error_within_restores_them_too() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), gc_frozen():
        raise ZeroDivisionError
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


@pytest.mark.parametrize(("grown", "collections"), [(1.5, [0]), (1.1, [])])
def test_the_end_of_a_burst_collects_where_objects_are_a_quarter_more(
    grown: float, collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freezing sets Python's own count back: cycles that live through a burst would stay for ever. A collection of
    all that a session of tests has takes seconds.
    """
    frozen: list[int] = []  # at each collection: what it leaves out
    monkeypatch.setattr(gc, "collect", lambda: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(garbage, "_alive", round(sys.getallocatedblocks() / grown))
    with gc_frozen():
        assert frozen == []
    assert frozen == collections


def test_memory_of_loading_is_given_back_before_the_cache_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    allocate = torch_executor.build_storage

    def build_storage(*parts: Any) -> Any:
        calls.append("cache allocated")
        return allocate(*parts)

    monkeypatch.setattr(torch_executor, "return_memory", lambda: calls.append("memory given back"))
    monkeypatch.setattr(torch_executor, "build_storage", build_storage)
    small = ["model=qwen3_tiny", "executor.device=cpu", "kv.num_blocks=8", "kv.block_size=16"]
    build_engine(plan_engine(compose_run(small).config))
    assert calls == ["memory given back", "cache allocated"]
