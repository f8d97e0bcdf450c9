"""A row for each request: when it was queued, in prefill, decoding, preempted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.core import RequestRecord
from kvlab.lab.figures import style
from kvlab.lab.results.requests import request_phases

_MOST_ROWS = 400
_LEAST_ROWS = 60  # fewer can be told apart however short they are
_SHORT = 0.03  # of the whole time: requests that last less, on average, are drawn from their arrivals on


class Span(NamedTuple):
    """A phase of the request that is drawn in `row`."""

    row: int
    start_s: float
    end_s: float
    name: str  # of the request
    origin_s: float = 0.0  # the time at which its row begins


def shown_requests(records: Sequence[RequestRecord]) -> tuple[list[RequestRecord], int]:
    """Requests by arrival, every n-th where there are more than 400; and n."""
    every = max(-(-len(records) // _MOST_ROWS), 1)
    ordered = sorted(records, key=lambda record: (record.arrival_s, record.scheduled_s or float("inf")))
    return ordered[::every], every


def from_arrivals(shown: Sequence[RequestRecord]) -> bool:
    """Whether each row begins at its request's arrival: on an axis of the whole time the requests would be dots."""
    whole = max((record.finished_s for record in shown), default=0.0)
    lasted = sum(record.finished_s - record.arrival_s for record in shown)
    return len(shown) >= _LEAST_ROWS and lasted < _SHORT * whole * len(shown)


def phase_spans(shown: Sequence[RequestRecord], every: int) -> dict[str, list[Span]]:
    """The spans of each phase that occurs, in the order of the legend."""
    spans: dict[str, list[Span]] = {phase: [] for phase in style.PHASES}
    shifted = from_arrivals(shown)
    for index, record in enumerate(shown):
        for phase, start, end in request_phases(record):
            origin = record.arrival_s if shifted else 0.0
            spans[phase].append(Span(1 + index * every, start, end, record.name, origin))
    return {phase: some for phase, some in spans.items() if some}


def timeline_figure(records: Sequence[RequestRecord]) -> Figure:
    """A row for each request, from its arrival to its end: on one axis of time, or on one that begins with each
    arrival, where requests are short.
    """
    shown, every = shown_requests(records)
    shifted = from_arrivals(shown)
    label = "time since the request's arrival, s" if shifted else "time, s"
    height = min(max(2.4 + 0.085 * len(shown), 3.0), 5.6)
    figure, axes = style.new_axes(height, label, "request, by arrival", grid="x")
    done = sum(record.completed for record in records)
    again = sum(record.preemptions > 0 for record in records)
    note = "a row is a request" if every == 1 else f"every {_ordinal(every)} request is shown"
    if again:
        note += f"; {again:,} were preempted and computed again"
    style.title(axes, f"{done:,} of {len(records):,} requests completed", note)
    if not shown:
        style.nothing(axes, "no request arrived")
        return figure
    half = every * (0.8 if len(shown) <= 100 else 1.0) / 2
    handles: list[Any] = []
    for phase, spans in phase_spans(shown, every).items():
        boxes = [
            [(start - at, y - half), (end - at, y - half), (end - at, y + half), (start - at, y + half)]
            for y, start, end, _, at in spans
        ]
        axes.add_collection(PolyCollection(boxes, facecolors=style.PHASES[phase], linewidths=0))
        handles.append(Patch(color=style.PHASES[phase], label=phase))
    origins = [record.arrival_s if shifted else 0.0 for record in shown]
    end = max(record.finished_s - at for record, at in zip(shown, origins, strict=True))
    first = 0.0 if shifted else min(0.0, *(record.arrival_s for record in shown))
    axes.set_xlim(first, max(end * 1.01, 1e-3))
    axes.set_ylim(max(len(records), 1) + 0.6, 0.4)
    style.whole(axes.yaxis)
    tall = max(11.0 - len(shown) / 8, 2.0)  # points
    for marker, name, size, shown_size, times in (
        ("|", "first token", tall, 8, [record.first_token_s for record in shown]),
        ("x", "did not complete", 4, 5, [None if record.completed else record.finished_s for record in shown]),
    ):
        marks = [(time - origins[i], 1 + i * every) for i, time in enumerate(times) if time is not None]
        if marks:
            options: Any = {"marker": marker, "color": style.BLACK, "linestyle": "none", "markeredgewidth": 1.2}
            axes.plot(*zip(*marks, strict=True), markersize=size, clip_on=False, **options)
            handles.append(Line2D([], [], markersize=shown_size, label=name, **options))
    style.legend(axes, handles=handles, below=-0.5 / height - 0.03)
    return figure


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
