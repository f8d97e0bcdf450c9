"""Storms: a short one for each kind of fault, and that they find what is broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

import pytest

from kvlab.core import FinishReason, StepOutput
from kvlab.engine.outputs import OutputProcessor
from kvlab.engine.service import Call
from kvlab.kv.copy_on_write import CopyOnWrite
from kvlab.kv.occupancy import Occupancy
from tests.engine.storm import FAULTS, POOLS, StormConfig, StormFailure, run


@pytest.mark.parametrize(("fault", "pool"), list(zip(FAULTS, cycle(POOLS), strict=False)))
def test_every_stream_ends_once_and_right(fault: str, pool: str) -> None:
    counts = run(0, 40, StormConfig(fault, pool))
    assert counts["length"] > 0
    assert counts["steps"] > 0


def nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """In its place nothing is done."""
    return lambda *_, **__: None


def twice(method: Callable[..., Any]) -> Callable[..., Any]:
    """An end that is told again."""

    def finish(self: OutputProcessor, sequence: Any, reason: FinishReason, *rest: Any, **named: Any) -> None:
        told = self._on_output.get(sequence.request.request_id)
        method(self, sequence, reason, *rest, **named)
        if told is not None:
            with suppress(RuntimeError):  # the reader's event loop is closed
                told(StepOutput(sequence.request.request_id, None, reason, index=sequence.index))

    return finish


@pytest.mark.parametrize(
    ("owner", "method", "broken", "found"),
    [
        (Call, "close", nothing, "left behind: calls"),
        (OutputProcessor, "finish", twice, "told after its end"),
        (CopyOnWrite, "find", lambda _: lambda *_: [], "other tokens"),
        (Occupancy, "release", nothing, "left behind: memory"),
    ],
    ids=["who leaves aborts nothing", "two ends", "no copy on write", "memory is not given back"],
)
def test_a_broken_engine_is_found(
    owner: type,
    method: str,
    broken: Callable[[Callable[..., Any]], Callable[..., Any]],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, broken(getattr(owner, method)))
    with pytest.raises(StormFailure, match=rf"(?s)--config sampler-private --seed 3.*{found}"):
        run(3, 60, StormConfig("sampler", "private"))
