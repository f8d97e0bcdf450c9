"""What tests of kvlab.Engine's own thread have in common: engines, waiting for it, and executors that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvlab.core import StepOutput
from kvlab.engine.clock import WallClock
from kvlab.engine.service import Engine
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.engines import assert_empty, make_engine, request
from tests.support.executors import RecordingExecutor, took_part

ASKED = [request("a", 21, 9), request("b", 3, 14), request("c", 16, 4)]


def library(**values: Any) -> Engine:
    return Engine(make_engine(clock=WallClock(), **values))


def tokens(outputs: list[StepOutput], name: str) -> list[int | None]:
    return [output.token_id for output in outputs if output.request_id == name]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60  # a busy machine
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def idle(engine: Engine) -> None:
    """Wait until the engine's own thread has ended; all memory is then free."""
    wait_until(lambda: engine._worker is None)
    assert not engine.has_work()
    assert_empty(engine.core)


class SlowExecutor(RecordingExecutor):
    """Takes some time for each step, so that something can happen meanwhile; remembers who called."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        self.threads.add(f"{threading.current_thread().name} {threading.get_ident()}")
        time.sleep(0.002)
        return super().execute(step, view)


class HeldExecutor(RecordingExecutor):
    """Waits for `release` before a pass with the request `held`, once that took part in `passes` of them."""

    def __init__(self, held: str, passes: int) -> None:
        super().__init__()
        self.held, self.passes_of_held = held, passes
        self.release = threading.Event()

    def passes_with_held(self) -> int:
        return sum(self.held in step for step in self.steps)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        if self.held in dict(took_part(step)) and self.passes_with_held() >= self.passes_of_held:
            assert self.release.wait(60)
        return super().execute(step, view)
