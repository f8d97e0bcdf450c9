"""Records of requests, steps and block events, a line each, for figures to draw."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

from kvlab.core import RequestRecord, StepRecord
from kvlab.kv.journal import BlockEvent, BlockEvents
from kvlab.lab.results.columns import read_request, read_step

A, S, F, C, D = (BlockEvent(number) for number in range(5))


def step(index: int, **values: Any) -> StepRecord:
    """A step of a second with a batch; what is not given is 0."""
    common = {"index": index, "start_s": float(index), "end_s": index + 1.0, "batch_seqs": 1, "schedule_ms": 100.0}
    return read_step(common | {"blocks_total": 4, "block_token_slots": 16} | values)


def request(**values: Any) -> RequestRecord:
    """A completed request of three tokens, queued for a second."""
    common = {
        "request_id": "r",
        "sample": 0,
        "arrival_s": 1.0,
        "scheduled_s": 2.0,
        "first_token_s": 3.0,
        "end_s": 6.0,
        "token_times_s": [3.0, 4.0, 6.0],
        "finish_reason": "length",
        "preemptions": 0,
        "preempted_s": [],
        "resumed_s": [],
        "prompt_tokens": 8,
        "cached_tokens": 0,
    }
    return read_request(common | values)


def events(*entries: tuple[int, BlockEvent, int, int]) -> BlockEvents:
    """Block events of (step, event, block, sequence)."""
    table = np.array(entries, dtype=np.int32).reshape(-1, 4)
    return BlockEvents(table[:, 0], table[:, 1].astype(np.int8), table[:, 2], table[:, 3])


def png(figure: Any) -> bytes:
    """The figure as a file."""
    file = BytesIO()
    figure.savefig(file)
    return file.getvalue()


def in_few_dots(patch: pytest.MonkeyPatch) -> None:
    """Let figures be drawn small and without a layout, which is half of the work and changes nothing of what is in
    them.
    """
    patch.setattr("kvlab.lab.figures.style.DPI", 30)
    patch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)
