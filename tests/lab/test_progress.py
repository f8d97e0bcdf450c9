"""The line of a run in progress."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import pytest

from kvlab.core import Request, SamplingParams
from kvlab.lab.run import progress
from kvlab.lab.run.drive import drive
from kvlab.lab.terminal import Terminal
from tests.lab.test_any_engine import SlotEngine
from tests.support.engines import make_engine
from tests.support.pools import sharing_pool


def test_it_says_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
    console = Terminal(file=(shown := io.StringIO()), width=200)
    requests = [Request(f"r{index}", tuple(range(1, 11)), SamplingParams(4)) for index in range(3)]
    engine = make_engine(sharing_pool(), max_batch_size=2)
    with progress.show_progress(engine, requests, console) as show:
        drive(engine, requests, on_step=show)
    first, *_, last = shown.getvalue().splitlines()
    assert "2 running 1 waiting KV 17 %" in first  # 3 + 3 blocks less the 2 that they share, and 24 in all
    assert first.endswith("prefix hits 40 % 1 batch")
    assert last.endswith("0 running 0 waiting KV 0 % 0:00 left prefix hits 53 % 8 batches")


def test_time_left_is_the_users_where_time_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second of the engine's and ten of the user's."""
    ticks = (float(10 * count) for count in itertools.count())
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=ticks.__next__))
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
    console = Terminal(file=(shown := io.StringIO()), width=200)
    requests = [Request("r", (1,), SamplingParams(11))]
    engine = SlotEngine(1)
    with progress.show_progress(engine, requests, console) as show:
        drive(engine, requests, on_step=show)
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines[5].startswith("0:06 ")
    assert "0:56 left" in lines[5]  # five steps, and some more for what a decode is guessed to cost
