"""Who else uses the processor, on a machine whose clocks the tests move."""

from __future__ import annotations

import os
import time
from collections import namedtuple

import psutil
import pytest

from kvlab.engine.threads import Cores
from kvlab.lab import machine
from kvlab.lab.machine import CpuWatch, oversubscription

Times = namedtuple("Times", "user nice system idle iowait steal guest")
Own = namedtuple("Own", "user system children_user children_system")


class Processor:
    """Two cores that this process may use, and one that it may not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.own = 100.0, 0.0
        self.busy = [50.0, 50.0, 50.0]
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.wait)
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [self.times(busy) for busy in self.busy])
        monkeypatch.setattr(
            psutil.Process, "cpu_times", lambda _: Own(*[self.own * share for share in (0.25, 0.25, 0.375, 0.125)])
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def times(self, busy: float) -> Times:
        return Times(busy * 0.5, busy * 0.25, busy * 0.125, 1e5 - busy, 7.0, busy * 0.125, 3.0)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    return Processor(monkeypatch)


def test_what_this_process_uses_is_not_others(processor: Processor) -> None:
    watch = CpuWatch()
    processor.now, processor.own = 102.0, 1.5
    processor.busy = [52.0, 51.0, 50.0]
    assert watch.busy_cores() == pytest.approx((3.0 - 1.5) / 2.0)


def test_what_a_process_of_its_own_uses_is_not_others(processor: Processor) -> None:
    watch = CpuWatch(os.getpid())
    processor.now, processor.own = 102.0, 1.0
    processor.busy = [52.0, 51.0, 50.0]
    assert watch.busy_cores() == pytest.approx((3.0 - 1.0 - 0.5) / 2.0)


def test_cores_that_this_process_may_not_use_do_not_matter(processor: Processor) -> None:
    watch = CpuWatch()
    processor.now += 1.0
    processor.busy[2] += 1.0
    assert watch.busy_cores() == 0


def test_too_short_a_look_is_made_longer(processor: Processor) -> None:
    watch = CpuWatch()
    processor.now += 0.05
    assert watch.busy_cores(least_s=0.2) == 0
    assert processor.now == pytest.approx(100.2)


@pytest.mark.parametrize(
    ("threads", "busy", "advice"),
    [
        (4, 0.0, None),
        (4, 0.2, None),
        (2, 2.1, None),
        (4, 1.0, "executor.threads=3"),
        (4, 3.9, "executor.threads=1"),
        (1, 4.0, "wait until they are done"),
        (8, 0.0, "executor.threads=4"),  # two threads to a core
    ],
)
def test_shared_cores_are_reported(
    monkeypatch: pytest.MonkeyPatch, threads: int, busy: float, advice: str | None
) -> None:
    monkeypatch.setattr(machine, "visible_cores", lambda: Cores(4, 8))
    given = oversubscription(threads, busy)
    assert given is None if advice is None else given is not None and advice in given
