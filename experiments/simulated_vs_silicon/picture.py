"""The picture of simulated over measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from kvlab.lab.figures import style

if TYPE_CHECKING:
    from experiments.simulated_vs_silicon.results import Result

_PANELS = (("tpot", "time per output token"), ("ttft", "time to first token"))


def draw(results: Sequence[Result]) -> Figure:
    """Both figures in milliseconds, a point for each row; faint, what the formula of one line says."""
    figure = style.new_figure(5.6, 11.0)
    handles = {}
    for at, (name, title) in enumerate(_PANELS):
        axes = figure.add_subplot(
            1, 2, at + 1, xlabel="measured, ms", ylabel="predicted, ms", xscale="log", yscale="log"
        )
        style.tidy(axes, grid="both")
        measured = [getattr(row, f"measured_{name}_ms") for row in results]
        formula = [getattr(row, f"formula_{name}_ms") for row in results]
        ends = [min(measured) / 1.3, max(measured) * 1.3]
        axes.fill_between(
            ends, [0.8 * end for end in ends], [1.25 * end for end in ends], color="#EFEFEF", zorder=0
        )
        axes.plot(ends, ends, color=style.FAINT, linewidth=1)
        handles["formula of one line"] = axes.scatter(measured, formula, s=9, color=style.CACHED, marker="x")
        kinds = sorted({(row.framework, row.device) for row in results})
        looks = product("o^", (*style.LINES, style.YELLOW))
        for kind, (marker, colour) in zip(kinds, looks, strict=False):
            rows = [row for row in results if (row.framework, row.device) == kind]
            xs, ys = ([getattr(row, f"{by}_{name}_ms") for row in rows] for by in ("measured", "simulated"))
            handles[" on ".join(kind)] = axes.scatter(
                xs, ys, s=15, marker=marker, color=colour, alpha=0.75, linewidths=0
            )
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        style.title(axes, f"{title}", "simulated over measured; shaded: within a fifth")
    figure.legend(handles.values(), handles.keys(), ncols=3, frameon=False, fontsize=8, loc="outside lower left")
    return figure
