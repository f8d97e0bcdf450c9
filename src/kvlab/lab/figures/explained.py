"""What `kvlab explain` draws: what became of prompts' tokens over time, and what requests' time went into."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvlab.lab.explain.lives import Cause
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.figures import style
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.prompt_tokens import Reason

_BARS = 40
_MOST_REQUESTS = 25
_OF_REASONS = {
    Reason.FOUND: style.GREEN,
    Reason.FIRST_SEEN: style.CACHED,
    Reason.DIVERGED: style.FAINT,
    Reason.EVICTED: style.VERMILION,
    Reason.OTHER_SALT: style.PURPLE,
    Reason.TAIL: style.YELLOW,
    Reason.GROUPS: style.SKY,
    Reason.NOT_SHARED: style.ORANGE,
}
_OF_CAUSES = {
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
            axes.bar(edges[:-1], share, width, base, align="edge", color=_OF_REASONS[reason], label=reason.value)
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


def request_terms_figure(explanation: Explanation, keys: Sequence[SampleKey]) -> Figure:
    """A bar for each request, from its arrival to its end; those of `keys` have their names in bold."""
    ordered = sorted(explanation.lives, key=lambda key: (explanation.records[key].arrival_s, key))
    asked = ordered.index(keys[0]) if keys else 0
    first = max(min(asked - _MOST_REQUESTS // 2, len(ordered) - _MOST_REQUESTS), 0)
    shown = ordered[first : first + _MOST_REQUESTS]
    height = 2.2 + 0.17 * len(shown)
    figure, axes = style.new_axes(height, "time, s", grid="x")
    bars = defaultdict[Cause, list[tuple[int, float, float]]](list)
    for row, key in enumerate(shown):
        for start_s, end_s, cause in explanation.intervals_of(key):
            bars[cause].append((row, start_s, end_s - start_s))
    handles: list[Any] = []
    for cause in Cause:
        if cause in bars:
            rows, starts, widths = zip(*bars[cause], strict=True)
            axes.barh(rows, widths, left=starts, height=0.8, color=_OF_CAUSES[cause], linewidth=0)
            handles.append(Patch(color=_OF_CAUSES[cause], label=cause.value))
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
