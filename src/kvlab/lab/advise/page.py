"""Advice as a page: one file that needs nothing beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from kvlab.lab.advise.advice import Advice, Figures
from kvlab.lab.advise.goal import Kind
from kvlab.lab.files import write_text
from kvlab.lab.prefix_replay.replay import BELADY
from kvlab.lab.report.pages import template

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 336.0, 26.0, 150.0  # of the curve, in units of its picture


class Bar(NamedTuple):
    """A value as a share of the largest beside it."""

    name: str
    share: float
    text: str
    is_today: bool = False


class Point(NamedTuple):
    """A number of devices on the curve."""

    x: float
    y: float
    devices: int
    value: str


class Curve(NamedTuple):
    """What so many devices give."""

    what: str
    points: list[Point]


def write_page(advice: Advice, path: Path) -> None:
    """Write it. Raises OutputError."""
    page = template("advice.html.j2").render(
        advice=advice,
        headroom=_headroom(advice),
        curve=_curve(advice),
        priced=advice.today.per_million is not None,
    )
    write_text(path, page)


def _headroom(advice: Advice) -> list[tuple[str, list[Bar]]]:
    room, found = advice.headroom, list[tuple[str, list[Bar]]]()
    if room.ceiling > 0:
        policies = {name: rate for name, rate in room.rates.items() if name != BELADY}
        shares = {"today, as served": room.now}
        if policies:
            best = max(policies, key=lambda name: policies[name])
            shares |= {f"the best policy ({best})": policies[best], "the optimum (Belady)": room.rates[BELADY]}
        shares["unlimited memory"] = room.ceiling
        bars = [
            Bar(name, rate / max(shares.values()), f"{100 * rate:.1f} %", name.startswith("today"))
            for name, rate in shares.items()
        ]
        title = f"Prompt tokens found in the prefix cache, by policy in one pool of {room.blocks:,} blocks"
        found.append((title, bars))
    seconds = {"today": room.mean_s, "alone on the devices": room.alone_s}
    longest = max(seconds.values())
    bars = [Bar(name, value / longest, f"{value:.3g} s", name == "today") for name, value in seconds.items()]
    found.append(("Mean time of a request", bars))
    if room.causes:
        most = max(room.causes.values())
        bars = [Bar(name, share / most, f"{100 * share:.1f} %") for name, share in room.causes.items()]
        found.append(("What that time goes into", bars))
    return found


def _curve(advice: Advice) -> Curve | None:
    if len(advice.frontier) < 2:
        return None
    what, digits = "goodput, requests per second", 2
    if advice.goal.kind is not Kind.LEVELS:
        what, digits = "output tokens per second", 0
    values = [_height(row) for row in advice.frontier]
    places = [math.log2(row.devices) for row in advice.frontier]
    most, width = max(values) or 1.0, (places[-1] - places[0]) or 1.0
    points = [
        Point(
            _LEFT + (_RIGHT - _LEFT) * (place - places[0]) / width,
            _BOTTOM - (_BOTTOM - _TOP) * value / most,
            row.devices,
            f"{value:,.{digits}f}",
        )
        for row, place, value in zip(advice.frontier, places, values, strict=True)
    ]
    return Curve(what, points)


def _height(row: Figures) -> float:
    return row.tokens_per_s if row.goodput_per_s is None else row.goodput_per_s
