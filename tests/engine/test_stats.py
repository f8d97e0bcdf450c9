"""engine.stats(): any thread may ask at any time, and gets what the engine was after a step."""

from __future__ import annotations

import threading

from kvlab.core import StepOutput
from kvlab.engine.clock import WallClock
from kvlab.engine.protocol import EngineStats
from kvlab.engine.service import Engine
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.engines import make_engine, request
from tests.support.executors import RecordingExecutor
from tests.support.pools import sharing_pool


class WatchedExecutor(RecordingExecutor):
    """Waits until another thread has looked at the engine in the middle of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        self.looked.clear()
        assert self.looked.wait(30)
        return super().execute(step, view)


def test_other_threads_see_no_step_in_the_middle() -> None:
    executor = WatchedExecutor()
    engine = make_engine(sharing_pool(12), executor, admission_reserve=0.0)
    told = {engine.stats()}
    for index in range(12):
        engine.submit(request(f"r{index}", 10 + index, 12, prompt_of=f"p{index % 3}"))
        told.add(engine.stats())
    seen: set[EngineStats] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.0001):
            seen.add(engine.stats())
            executor.looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    while engine.has_work():
        engine.step()
        told.add(engine.stats())
    done.set()
    thread.join()
    assert seen <= told
    assert len(seen) > 3
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_in_use, stats.output_tokens) == (0, 0, 0, 144)
    assert stats.preemptions  # memory was short, so that every count moved
    assert stats.hit_rate


def test_a_long_step_is_not_waited_for() -> None:
    asked, answered = threading.Event(), threading.Event()

    class Stuck(RecordingExecutor):
        def execute(self, step: StepInput, view: CacheView) -> StepResult:
            asked.set()
            assert answered.wait(30)
            return super().execute(step, view)

    engine = Engine(make_engine(executor=Stuck(), clock=WallClock()))
    found: list[EngineStats] = []

    def ask() -> None:
        asked.wait(30)
        found.append(engine.stats())
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert len(list(engine.generate(request("a", 5, 3)))) == 3
    thread.join()
    assert (found[0].running, found[0].waiting, found[0].batches) == (0, 1, 0)  # ahead of the first step
    assert engine.stats().batches == 3


def test_no_request_is_counted_twice_while_a_callback_changes_the_queue() -> None:
    engine = make_engine(max_batch_size=1)
    seen: list[tuple[int, int]] = []

    def callback(output: StepOutput) -> None:
        if len(seen) == 0:
            engine.submit(request("third", 4, 1))
        elif len(seen) == 1:
            engine.abort("second")
        seen.append((engine.stats().running, engine.stats().waiting))

    engine.submit(request("first", 4, 3), callback)
    engine.submit(request("second", 4, 3))
    for _ in range(3):
        engine.step()
    # In the first step the snapshot is the one from before it: nobody runs, all three wait.
    assert seen == [(0, 3), (1, 1), (1, 1)]


def test_steps_that_only_free_memory_are_no_batches() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, 2))
    records = []
    while engine.has_work():
        records.append(engine.step())
    assert len(records) == 3
    assert engine.stats().batches == 2


def test_the_hit_rate_is_of_all_prompt_tokens_so_far() -> None:
    engine = make_engine(sharing_pool())
    assert engine.stats().hit_rate is None
    for name in "ab":
        engine.submit(request(name, 9, 1, prompt_of="common"))
        while engine.has_work():
            engine.step()
    assert (engine.stats().prompt_tokens, engine.stats().hit_tokens) == (18, 8)
    assert engine.stats().hit_rate == 8 / 18
