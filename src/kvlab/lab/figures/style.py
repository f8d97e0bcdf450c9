"""What all figures have in common: colours, sizes, words.

Colours are Okabe and Ito's (2008), which people who see few colours tell apart, and viridis or cividis for amounts.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # of curves, strongest first
SEQUENCES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)  # of sequences in a map
CACHED, FREE, SHARED = "#C9C9C9", "#FFFFFF", "#1A1A1A"
INK, FAINT = "#222222", "#8A8A8A"
AMOUNTS = "viridis"
WIDTH, DPI = 8.4, 110  # inches and dots: 924 pixels, a README's width

PHASES = {"queued": CACHED, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILION}


def new_figure(height: float = 4.6, width: float = WIDTH) -> Figure:
    """An empty figure of its own, outside pyplot's state."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def title(axes: Axes, text: str, note: str = "") -> None:
    """A heading above the axes at the left, with a note in small print below it."""
    axes.set_title(text + ("\n" if note else ""), loc="left", fontsize=11.5, fontweight="bold", color=INK)
    if note:
        small = axes.annotate(
            note,
            (0, 1),
            xytext=(0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=9,
            color="#555555",
        )
        small.set_in_layout(False)  # or a long one would make the axes narrow


def tidy(axes: Axes, *, grid: Literal["", "x", "y", "both"] = "y") -> None:
    """A light frame, thousands with commas, a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=9, color=FAINT, labelcolor=INK)
    if grid:
        axes.grid(axis=grid, color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)


def legend(axes: Any, *args: Any, columns: int = 6, **options: Any) -> None:
    """A legend below the axes, where it hides nothing."""
    options = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "borderaxespad": 0.0} | options
    axes.legend(
        *args,
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.4,
        handletextpad=0.5,
        **options,
    )


def nothing(axes: Axes, text: str) -> None:
    """Say why there is nothing to see."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=11)


def number(value: float) -> str:
    """A number for people: three digits that count, thousands with commas."""
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def plain(axis: Any) -> None:
    """Ticks as plain numbers, on a logarithmic axis too."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def whole(axis: Any) -> None:
    """Ticks at whole numbers alone, written plainly."""
    axis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    plain(axis)


def logarithmic(axis: Any, low: float, high: float) -> None:
    """Ticks of a logarithmic axis from `low` to `high`: few enough to be read, numbers written out."""
    decades = math.log10(high / low)
    steps = (1.0, 3.0) if decades < 2.3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, length: int = 42) -> str:
    """A name that fits: its middle left out where it is long."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def thin(
    times: NDArray[np.float64], *series: NDArray[np.float64], most: int = 2000
) -> tuple[NDArray[np.float64], ...]:
    """Times and series with at most `most` points, the lowest and the highest of each stretch kept.

    A stretch gives its two extremes at its first and its middle time, so that neither a peak nor a gap is lost.
    """
    if len(times) <= most:
        return (times, *series)
    stretches = np.array_split(np.arange(len(times)), most // 2)
    kept_at = np.array([times[i] for each in stretches for i in (each[0], each[len(each) // 2])])
    kept = [
        np.array([extreme(values[each]) for each in stretches for extreme in (np.min, np.max)]) for values in series
    ]
    return (kept_at, *kept)


def capital(text: str) -> str:
    """The text with its first letter as a capital."""
    return text[:1].upper() + text[1:]
