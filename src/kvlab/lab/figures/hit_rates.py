"""What eviction policies find again over the size of the pool, and how far apart uses of a block are."""

from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.prefix_replay.curves import ReplayCurves
from kvlab.lab.prefix_replay.replay import BELADY


def hit_rate_figure(curves: ReplayCurves) -> Figure:
    """A curve for each policy over a logarithmic axis of sizes, belady's in black, the ceiling across. Below it the
    reuse distances of blocks, with the sizes of the pools drawn in.
    """
    figure = style.new_figure(7.6)
    axes, below = figure.subplots(2, 1, height_ratios=[3, 2])
    axes.set(xlabel=f"blocks of {curves.block_size} tokens in the pool", ylabel="prompt tokens found, %")
    style.tidy(axes, grid="both")
    _draw_distances(below, curves)
    policies = [name for name in curves.hit_rates if name != BELADY]
    colours = dict(zip(policies, cycle(style.LINES[:-1]), strict=False)) | {BELADY: style.BLACK}
    for (name, rates), marker in zip(curves.hit_rates.items(), cycle(style.MARKERS), strict=False):
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
    highest = max(curves.ceiling, *(max(rates) for rates in curves.hit_rates.values()))
    axes.set_ylim(0, max(106 * highest, 1))
    style.legend(axes, columns=4, below=-0.18)
    return figure


def _draw_distances(axes: Axes, curves: ReplayCurves) -> None:
    """The pools that blocks of prompts need to be found, in classes; what the largest pool lacks in red."""
    reuse, most = curves.reuse, curves.num_blocks[-1]
    looked_up = reuse.first + sum(reuse.blocks)
    style.tidy(axes)
    new = 100 * reuse.first / max(looked_up, 1)
    title = f"{new:.0f} % of prompts' blocks are new, the others are found in a pool of"
    style.title(axes, title, "with lru: one more than the other blocks used in between; dashed: the sizes above")
    if not sum(reuse.blocks):
        style.nothing(axes, "no block comes again")
        return
    axes.set(xlabel="blocks (reuse distance + 1)", ylabel="% of prompts' blocks")
    for start, end, blocks in zip(reuse.edges, reuse.edges[1:], reuse.blocks, strict=False):
        colour = style.VERMILION if start > most else style.SKY
        axes.bar(start, 100 * blocks / looked_up, end - start, align="edge", color=colour, linewidth=0)
    for size in curves.num_blocks:
        axes.axvline(size, color=style.FAINT, linewidth=1, linestyle=(0, (5, 2)))
    style.logarithmic(axes.xaxis, 1, max(reuse.edges[-1], most))
