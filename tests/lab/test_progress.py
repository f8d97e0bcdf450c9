"""The line of a run in progress."""

from __future__ import annotations

import io

import pytest

from kvlab.core import Request, SamplingParams
from kvlab.lab.run import progress
from kvlab.lab.run.drive import drive
from kvlab.lab.terminal import Terminal
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
