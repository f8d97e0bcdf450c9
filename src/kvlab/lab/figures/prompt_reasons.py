"""What became of prompts' tokens over time: found in the cache, or computed and why."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from kvlab.lab.explain.prompt_tokens import Reason
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.figures import style

_BARS = 40
_COLOURS = {
    Reason.FOUND: style.GREEN,
    Reason.FIRST_SEEN: style.CACHED,
    Reason.DIVERGED: style.FAINT,
    Reason.EVICTED: style.VERMILION,
    Reason.OTHER_SALT: style.PURPLE,
    Reason.TAIL: style.YELLOW,
    Reason.GROUPS: style.SKY,
    Reason.NOT_SHARED: style.ORANGE,
}


def prompt_reasons_figure(explanation: Explanation) -> Figure:
    """What became of the tokens of prompts that were admitted in each part of the run, in percent; and how many."""
    figure = style.new_figure(4.8)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    style.tidy(axes)
    style.tidy(below)
    prompts = list(explanation.prompts.values())
    last = max((prompt.at_s for prompt in prompts), default=0.0) or 1.0
    edges = np.linspace(0, last, min(_BARS, max(len(prompts), 1)) + 1)
    times = [prompt.at_s for prompt in prompts]
    places = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(edges) - 2)
    tokens = {reason: np.zeros(len(edges) - 1) for reason in Reason}
    for place, prompt in zip(places, prompts, strict=True):
        for reason, count in prompt.tokens.items():
            tokens[reason][place] += count
    whole = np.sum(list(tokens.values()), axis=0)
    base, width = np.zeros_like(whole), np.diff(edges)
    for reason in Reason:
        if tokens[reason].any():
            share = 100 * np.divide(tokens[reason], whole, out=np.zeros_like(whole), where=whole > 0)
            axes.bar(edges[:-1], share, width, base, align="edge", color=_COLOURS[reason], label=reason.value)
            base += share
    below.bar(edges[:-1], whole, width, align="edge", color=style.FAINT)
    axes.set(ylabel="% of prompt tokens", ylim=(0, 100))
    below.set(ylabel="tokens", xlabel="time, s")
    share = 100 * tokens[Reason.FOUND].sum() / max(whole.sum(), 1)
    heading = f"{share:.0f} % of prompt tokens were found in the prefix cache"
    style.title(axes, heading, "by when prompts were admitted")
    style.plain(below.yaxis)
    style.plain(below.xaxis)
    style.legend(below, *axes.get_legend_handles_labels(), below=-0.75, columns=2)
    return figure
