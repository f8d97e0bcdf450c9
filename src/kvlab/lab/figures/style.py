"""What all figures have in common: colours, sizes, axes, legends.

The colours are those of Okabe and Ito (2008), chosen for colour-blind readers, and viridis for amounts.
"""

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)  # of curves, strongest first
SEQUENCES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)  # of sequences in a map
CACHED, FREE, SHARED, PINNED = "#C9C9C9", "#FFFFFF", "#1A1A1A", "#A50F15"
INK, FAINT = "#222222", "#8A8A8A"
AMOUNTS = "viridis"
MARKERS = "osD^vPX"
WIDTH, DPI = 8.4, 110  # inches and dots: 924 pixels, a README's width

PHASES = {"queued": CACHED, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILION}
GridLines = Literal["", "x", "y", "both"]  # the axes that have lines across the figure


def new_figure(height: float = 4.6, width: float = WIDTH) -> Figure:
    """An empty figure of its own, outside pyplot's state."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(height: float, x: str, y: str = "", *, grid: GridLines = "both") -> tuple[Figure, Axes]:
    """A figure with one pair of axes and their labels."""
    figure = new_figure(height)
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    tidy(axes, grid=grid)
    return figure, axes


def percent(share: float) -> str:
    """A share, which is no 0 unless there is none."""
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.01 else f"{100 * share:.1g} %"


def title(axes: Axes, text: str, note: str = "") -> None:
    """A heading with a capital, above the axes at the left, and a note in small print below it."""
    heading = text[:1].upper() + text[1:] + ("\n" if note else "")
    axes.set_title(heading, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    if note:
        small = axes.annotate(note, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=9, color="#555555")
        small.set_in_layout(False)  # or a long note would make the axes narrow


def tidy(axes: Axes, *, grid: GridLines = "y") -> None:
    """A light frame, thousands with commas, a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=9, color=FAINT, labelcolor=INK)
    if grid:
        axes.grid(axis=grid, color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)


def amounts(
    figure: Figure, axes: Axes, values: NDArray[np.float64], end_s: float, label: str, *, top: float, aspect: float
) -> None:
    """A map of rows over time: from 0 to `top`, with the scale of its colours beside it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    placed: Any = {"aspect": "auto", "interpolation": "none", "extent": (0, end_s, len(values) - 0.5, -0.5)}
    image = axes.imshow(values, cmap=AMOUNTS, vmin=0, vmax=top, **placed)
    colour_bar(figure, axes, image, aspect).set_label(label, fontsize=9)


def colour_bar(figure: Figure, axes: Axes, image: Any, aspect: float) -> Any:
    """The scale of an image's colours, at its right."""
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=aspect)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9)
    return bar


def legend(axes: Any, *args: Any, below: float, columns: int = 6, **options: Any) -> None:
    """A legend below the axes, where it hides nothing, at `below` of their height."""
    spacing = {"borderaxespad": 0.0, "handlelength": 1.4, "columnspacing": 1.4, "handletextpad": 0.5}
    place = {"loc": "upper left", "bbox_to_anchor": (0, below)}
    axes.legend(*args, ncols=columns, frameon=False, fontsize=9, **place, **spacing, **options)


def nothing(axes: Axes, text: str) -> None:
    """Say why there is nothing to draw."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=11)


def number(value: float) -> str:
    """A number for people: three significant digits, thousands with commas."""
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def plain(axis: Any) -> None:
    """Ticks as plain numbers, on a logarithmic axis too."""
    axis.set_major_formatter("{x:,.10g}")


def whole(axis: Any) -> None:
    """Ticks at whole numbers alone, written plainly."""
    axis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    plain(axis)


def logarithmic(axis: Any, low: float, high: float) -> None:
    """Make an axis from `low` to `high` logarithmic: with few enough ticks to be read, numbers written out."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 200 * low else (1.0,), numticks=12))
    axis.set_minor_formatter(NullFormatter())
    plain(axis)


def spread(count: int, most: int = 2000) -> NDArray[np.int64]:
    """The numbers from 0 to before `count`, of many no more than `most`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def shorten(text: str, length: int = 42) -> str:
    """A name that fits: its middle left out where it is long."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def thin(
    times: NDArray[np.float64], *series: NDArray[np.float64], most: int = 2000
) -> tuple[NDArray[np.float64], ...]:
    """Times and series with at most `most` points. Of each part of the time the lowest and the highest value stay,
    at its first and its middle time, so that neither a peak nor a gap is lost.
    """
    if len(times) <= most:
        return (times, *series)
    parts = np.array_split(np.arange(len(times)), most // 2)
    kept = ([extreme(values[part]) for part in parts for extreme in (np.min, np.max)] for values in series)
    return (times[[i for part in parts for i in (part[0], part[len(part) // 2])]], *map(np.array, kept))
