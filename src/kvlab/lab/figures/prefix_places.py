"""Where prefixes are: what routers find of a fleet's ceiling, and which replicas have the hottest prefixes."""

from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvlab.lab.figures import style
from kvlab.lab.figures.points import Points

_COLUMNS = 400  # moments of the map
_MOST_ROWS = 64
_RATE, _CEILING = "kv/prefix_hit_rate", "fleet/hit_rate_ceiling"


def router_hits_figure(points: Points) -> Figure | None:
    """A bar for each router, or router and what else differs: the share of prompt tokens that were found, the most
    first, against what one cache for all would find that is never full. None where routers do not differ or no run
    says what that is.
    """
    keys, ceilings = points.varied_keys(), points.values(_CEILING)
    rates = {
        label: 100 * median(values)
        for label, some in points.by_settings(keys).items()
        if (values := some.values(_RATE))
    }
    if "fleet.router" not in keys or not ceilings or not rates:
        return None
    ordered = sorted(rates, key=lambda label: -rates[label])
    figure, axes = style.new_axes(1.4 + 0.3 * len(ordered), "prompt tokens found in prefix caches, %", grid="x")
    names = [style.shorten(label.removeprefix("router="), 40) for label in ordered]
    values, most = [rates[label] for label in ordered], 100 * max(ceilings)
    axes.barh(names, values, color=style.BLUE, height=0.7)
    for place, value in enumerate(values):
        place_of: Any = {"textcoords": "offset points", "va": "center", "ha": "right"}
        axes.annotate(f"{value:.1f}", (value, place), (-4, 0), color="white", fontsize=9, **place_of)
    line: Any = {"color": style.VERMILION, "linestyle": (0, (5, 2)), "linewidth": 1.6}
    for ceiling in sorted(set(ceilings)):
        axes.axvline(100 * ceiling, **line)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([most, *values]) or 1)  # where nothing was found
    best = (
        f"{100 * values[0] / most:.0f} % of what there is to find is found behind {names[0]}"
        if most
        else "nothing comes again"
    )
    style.title(axes, best, f"dashed: one cache for all replicas that is never full, {most:.1f} %")
    return figure


def prefix_places_figure(table: Any, replicas: int, end_s: float) -> Figure:
    """A map of the hottest prefixes, each with a row for every replica: the share of it that this one has cached,
    over time. `table` is that of prefixes.parquet.
    """
    columns = {name: table[name].to_numpy() for name in table.column_names}
    shown = min(int(columns["prefix"].max()) + 1, max(_MOST_ROWS // replicas, 1))
    times = np.linspace(0, max(end_s, 1e-3), _COLUMNS, endpoint=False)
    shares, labels = np.zeros((shown * replicas, _COLUMNS)), []
    for prefix in range(shown):
        own = columns["prefix"] == prefix
        for replica in range(replicas):
            here = own & (columns["replica"] == replica)
            if here.any():
                held = np.append(0, columns["tokens"][here])
                now = held[np.searchsorted(columns["at_s"][here], times, side="right")]
                shares[prefix * replicas + replica] = 100 * now / columns["of_tokens"][here][0]
        tokens, requests = (int(columns[name][own][0]) if own.any() else 0 for name in ("of_tokens", "requests"))
        labels.append(f"{tokens:,} tokens,\n{requests:,} requests")
    figure = style.new_figure(max(1.6 + 0.085 * len(shares), 3.0))
    axes = figure.add_subplot(xlabel="time, s", ylabel=f"prefix, a row for each of {replicas} replicas")
    style.amounts(figure, axes, shares, end_s, "% of the prefix cached", top=100, aspect=20)
    for line in np.arange(1, shown) * replicas - 0.5:
        axes.axhline(line, color="white", linewidth=2)
    axes.set_yticks((np.arange(shown) + 0.5) * replicas - 0.5, labels)
    copies = (shares.reshape(shown, replicas, _COLUMNS) > 50).sum(axis=1)
    mean = float(copies[copies > 0].mean()) if copies.any() else 0.0
    style.title(axes, f"While it is cached, a hot prefix is on {mean:.1f} of {replicas} replicas in the mean")
    return figure
