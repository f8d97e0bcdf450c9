"""Requests as bars of what their time went into, one of them between those that came before and behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvlab.lab.explain.lives import Cause, Key
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.figures import style

_MOST = 25  # requests
_COLOURS = {
    Cause.FRONT_END: style.YELLOW,
    Cause.STEP: "#E3E3E3",
    Cause.TOKENS: "#B5B5B5",
    Cause.SEQUENCES: "#8A8A8A",
    Cause.BLOCKS: style.VERMILION,
    Cause.POLICY: "#D9C7A0",
    Cause.TIER: style.PURPLE,
    Cause.TRANSFER: style.PURPLE,
    Cause.RETURN: "#8C2D04",
    Cause.AGAIN: "#FDAE6B",
    Cause.PROMPT: style.ORANGE,
    Cause.OTHER_PROMPTS: style.SKY,
    Cause.OTHER_DECODES: style.GREEN,
    Cause.DECODE: style.BLUE,
    Cause.BETWEEN: "#555555",
    Cause.LOST: "#F2C4C4",
    Cause.UNEXPLAINED: style.BLACK,
}


def request_terms_figure(explanation: Explanation, keys: Sequence[Key]) -> Figure:
    """A bar for each request, from its arrival to its end; those of `keys` have their names in bold."""
    ordered = sorted(explanation.lives, key=lambda key: (explanation.records[key].arrival_s, key))
    asked = ordered.index(keys[0]) if keys else 0
    first = max(min(asked - _MOST // 2, len(ordered) - _MOST), 0)
    shown = ordered[first : first + _MOST]
    height = 2.2 + 0.17 * len(shown)
    figure, axes = style.new_axes(height, "time, s", grid="x")
    bars: dict[Cause, tuple[list[int], list[float], list[float]]] = {}
    for row, key in enumerate(shown):
        for start_s, end_s, cause in explanation.intervals_of(key):
            rows, starts, widths = bars.setdefault(cause, ([], [], []))
            rows.append(row)
            starts.append(start_s)
            widths.append(end_s - start_s)
    handles: list[Any] = []
    for cause in Cause:
        if cause in bars:
            rows, starts, widths = bars[cause]
            axes.barh(rows, widths, left=starts, height=0.8, color=_COLOURS[cause], linewidth=0)
            handles.append(Patch(color=_COLOURS[cause], label=cause.value))
    axes.set_yticks(range(len(shown)), [explanation.records[key].name for key in shown])
    for label, key in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if key in keys else "normal")
        label.set_fontsize(8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.margins(x=0.01)
    name = explanation.records[keys[0]].name if keys else "its slowest request"
    style.title(axes, f"what the time of {name} went into, and of its neighbours", "requests by arrival")
    style.legend(axes, handles=handles, below=-0.5 / height - 0.04, columns=3)
    return figure
