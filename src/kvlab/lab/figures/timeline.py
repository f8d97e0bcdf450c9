"""A line for each request: when it was queued, in prefill, decoding, preempted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.core import RequestRecord
from kvlab.lab.figures import style
from kvlab.lab.requests import request_phases

MOST_ROWS = 400


def shown_requests(records: Sequence[RequestRecord], most: int = MOST_ROWS) -> tuple[list[RequestRecord], int]:
    """Requests in the order of their arrival, and how many of them one stands for: every n-th where there are more
    than `most`.
    """
    every = max(-(-len(records) // most), 1)
    ordered = sorted(records, key=lambda each: (each.arrival_s, each.scheduled_s or float("inf")))
    return ordered[::every], every


def timeline_figure(records: Sequence[RequestRecord]) -> Figure:
    """A line for each request, from its arrival to its end."""
    shown, every = shown_requests(records)
    figure = style.new_figure(min(max(2.4 + 0.085 * len(shown), 3.0), 5.6))
    axes = figure.add_subplot()
    style.tidy(axes, grid="x")
    axes.set_xlabel("time, s")
    axes.set_ylabel("request, by arrival")
    done = sum(record.completed for record in records)
    again = sum(record.preemptions > 0 for record in records)
    heading = f"{done:,} of {len(records):,} requests completed"
    note = "a line is a request" if every == 1 else f"every {_ordinal(every)} request is shown"
    if again:
        note += f"; {again:,} were preempted and computed again"
    style.title(axes, heading, note)
    if not shown:
        style.nothing(axes, "no request arrived")
        return figure
    bars: dict[str, list[Any]] = {phase: [] for phase in style.PHASES}
    thickness = 0.8 if len(shown) <= 100 else 1.0
    for number, record in enumerate(shown):
        low, high = 1 + every * (number - thickness / 2), 1 + every * (number + thickness / 2)
        for phase, start, end in request_phases(record):
            bars[phase].append([(start, low), (end, low), (end, high), (start, high)])
    for phase, boxes in bars.items():
        if boxes:
            axes.add_collection(PolyCollection(boxes, facecolors=style.PHASES[phase], linewidths=0))
    end = max(record.finished_s for record in shown)
    axes.set_xlim(min(0.0, *(record.arrival_s for record in shown)), max(end * 1.01, 1e-3))
    axes.set_ylim(max(len(records), 1) + 0.6, 0.4)
    style.whole(axes.yaxis)
    _marks(axes, shown, every, {phase for phase, boxes in bars.items() if boxes})
    return figure


def _marks(axes: Any, shown: Sequence[RequestRecord], every: int, phases: set[str]) -> None:
    """First tokens and requests that did not complete, with the legend."""
    handles: list[Any] = [Patch(color=style.PHASES[name], label=name) for name in style.PHASES if name in phases]
    ends = [None if record.completed else record.finished_s for record in shown]
    tall = max(11.0 - len(shown) / 8, 2.0)  # points
    for marker, label, size, times in (
        ("|", "first token", tall, [record.first_token_s for record in shown]),
        ("x", "did not complete", 4, ends),
    ):
        marks = [(time, 1 + number * every) for number, time in enumerate(times) if time is not None]
        if marks:
            options: Any = {"marker": marker, "color": style.BLACK, "linestyle": "none", "markeredgewidth": 1.2}
            axes.plot(*zip(*marks, strict=True), markersize=size, clip_on=False, **options)
            handles.append(Line2D([], [], markersize=8 if marker == "|" else 5, label=label, **options))
    style.legend(axes, handles=handles, columns=6, bbox_to_anchor=(0, -0.5 / axes.figure.get_figheight() - 0.03))


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
