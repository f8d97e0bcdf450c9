"""A workload before it runs: lengths, arrivals, and what its prompts have in common."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvlab.core import Request
from kvlab.lab.figures import style
from kvlab.workloads.prefixes import PrefixTree

_BINS = 60


def workload_figure(requests: Sequence[Request], tree: PrefixTree, unknown: str | None = None) -> Figure:
    """Distributions of prompt and output lengths, requests over time, and the hit rate of an endless cache; in its
    place why it is `unknown`, if it is.
    """
    figure = style.new_figure(5.6)
    outputs = np.array([request.expected_tokens for request in requests])
    for place, (name, lengths) in enumerate((("Prompts", np.array(tree.tokens)), ("Outputs", outputs)), start=1):
        axes = figure.add_subplot(2, 2, place, xlabel="tokens", ylabel="cumulative share, %", ylim=(0, 102))
        style.tidy(axes, grid="both")
        _lengths(axes, name, np.sort(lengths))
    arrivals = np.array([request.arrival_s for request in requests if request.follows is None])
    axes = figure.add_subplot(2, 2, 3, xlabel="s", ylabel="requests per s")
    style.tidy(axes)
    if arrivals.max() > 0:
        counts, edges = np.histogram(arrivals, bins=_BINS)
        axes.stairs(counts / np.diff(edges), edges, fill=True, color=style.SKY)
        mean = f"mean {style.number(len(arrivals) / arrivals.max())} per s"
        style.title(axes, "Arrivals", f"{mean},  the most {style.number(float((counts / np.diff(edges)).max()))}")
    else:
        style.title(axes, "Arrivals")
        style.nothing(axes, f"{len(arrivals):,} at once")
    axes = figure.add_subplot(2, 2, 4, xlabel="requests so far", ylabel="%", ylim=(0, 102))
    style.tidy(axes, grid="both")
    if unknown:
        style.title(axes, "Hit rate without a limit")
        style.nothing(axes, "unknown: no prompts, only their lengths")
        return figure
    hits, tokens = np.cumsum(tree.hit_tokens), np.cumsum(tree.tokens)
    chosen = style.spread(len(hits))
    axes.plot(chosen + 1, 100 * hits[chosen] / tokens[chosen], color=style.BLUE, linewidth=1.6)
    depth = f"shared prefixes of up to {max(tree.repeated):,} blocks of {tree.block_size} tokens"
    style.title(axes, f"Hit rate without a limit: {100 * tree.most_hit_rate:.1f} %", depth)
    return figure


def _lengths(axes: Any, name: str, lengths: NDArray[np.int64]) -> None:
    shares = 100 * np.arange(1, len(lengths) + 1) / len(lengths)
    chosen = style.spread(len(lengths))
    axes.step(lengths[chosen], shares[chosen], where="post", color=style.BLUE, linewidth=1.6)
    marks = [f"p{share} {style.number(np.percentile(lengths, share))}" for share in (50, 90, 99)]
    style.title(axes, name, f"mean {style.number(float(lengths.mean()))},  {',  '.join(marks)} tokens")
    if lengths[0] * 20 < lengths[-1]:
        style.logarithmic(axes.xaxis, float(lengths[0]), float(lengths[-1]))
    else:
        style.plain(axes.xaxis)
