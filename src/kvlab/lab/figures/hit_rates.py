"""What eviction policies find again, over the size of the pool."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.prefix_replay.curves import ReplayCurves
from kvlab.lab.prefix_replay.replay import BELADY

_MARKERS = "osD^vPX"


def hit_rate_figure(curves: ReplayCurves) -> Figure:
    """A curve for each policy over a logarithmic axis of sizes, belady's in black, the ceiling across."""
    figure, axes = style.new_axes(
        4.6, f"blocks of {curves.block_size} tokens in the pool", "prompt tokens found, %"
    )
    policies = [name for name in curves.hit_rates if name != BELADY]
    colours = dict(zip(policies, cycle(style.LINES[:-1]), strict=False)) | {BELADY: style.BLACK}
    for (name, rates), marker in zip(curves.hit_rates.items(), cycle(_MARKERS), strict=False):
        line: Any = {"color": colours[name], "linewidth": 2.2 if name == BELADY else 1.6, "markersize": 5}
        axes.plot(curves.num_blocks, [100 * rate for rate in rates], marker=marker, label=name, **line)
    axes.axhline(100 * curves.ceiling, color=style.FAINT, linestyle=(0, (5, 2)), label="ceiling: never full")
    style.title(axes, f"Prompt tokens found again: {style.shorten(curves.workload)}, {curves.requests:,} requests")
    axes.set_xscale("log")
    if len(curves.num_blocks) <= 10:
        axes.set_xticks(curves.num_blocks)
        axes.minorticks_off()
        style.plain(axes.xaxis)
    else:
        style.logarithmic(axes.xaxis, curves.num_blocks[0], curves.num_blocks[-1])
    axes.set_ylim(bottom=0)
    style.legend(axes, columns=4, below=-0.14)
    return figure
