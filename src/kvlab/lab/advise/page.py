"""Advice as a page: one file that needs nothing beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvlab.lab.advise.advice import Advice
from kvlab.lab.advise.text import change_rows, frontier_rows
from kvlab.lab.files import write_text
from kvlab.lab.prefix_replay.replay import BELADY
from kvlab.lab.report.pages import template


class Bar(NamedTuple):
    """A value as a share of the largest beside it."""

    name: str
    share: float
    text: str
    is_today: bool


def write_page(advice: Advice, path: Path) -> None:
    """Write it. Raises OutputError."""
    tables = {"changes": list(change_rows(advice)), "frontier": list(frontier_rows(advice))}
    page = template("advice.html.j2").render(
        advice=advice, headroom=_headroom(advice), devices=_devices(advice), **tables
    )
    write_text(path, page)


def _headroom(advice: Advice) -> list[tuple[str, list[Bar]]]:
    room, found = advice.headroom, list[tuple[str, list[Bar]]]()
    if room.ceiling > 0:
        shares = {"today, as served": room.now}
        if policies := room.policies:
            best = max(policies, key=policies.__getitem__)
            shares |= {f"the best policy ({best})": policies[best], "the optimum (Belady)": room.rates[BELADY]}
        shares["unlimited memory"] = room.ceiling
        title = f"Prompt tokens found in the prefix cache, by policy in one pool of {room.blocks:,} blocks"
        found.append((title, _bars(shares, "{:.1%}", "today, as served")))
    seconds = {"today": room.mean_s, "alone on the devices": room.alone_s}
    found.append(("Mean time of a request", _bars(seconds, "{:.3g} s", "today")))
    if room.causes:
        found.append(("What that time goes into", _bars(room.causes, "{:.1%}")))
    return found


def _devices(advice: Advice) -> tuple[str, list[Bar]] | None:
    """What so many devices give; None: there are no others."""
    if len(advice.frontier) < 2:
        return None
    what, text = "output tokens per second", "{:,.0f}"
    if advice.goal.limits:
        what, text = "goodput, requests per second", "{:,.2f}"
    values = {
        f"{row.devices}": row.tokens_per_s if row.goodput_per_s is None else row.goodput_per_s
        for row in advice.frontier
    }
    return f"Devices, with the plan's other changes: {what}", _bars(values, text, f"{advice.today.devices}")


def _bars(values: Mapping[str, float], text: str, today: str = "") -> list[Bar]:
    """Values as `text` writes them; that of today's settings by its name."""
    most = max(values.values()) or 1.0
    return [Bar(name, value / most, text.format(value), name == today) for name, value in values.items()]
