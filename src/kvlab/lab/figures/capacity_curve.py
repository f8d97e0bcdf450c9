"""How many sequences fit, over their mean length: what the planner computes, and what runs measured."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from math import ceil, log2
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from kvlab.kv.groups import LayerGroup
from kvlab.lab.capacity import CapacityCurve, capacity_curve
from kvlab.lab.figures import style
from kvlab.lab.results.records import RunRecord

_MARKERS, _DASHES = "osD^vP", ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


class MeasuredCapacity(NamedTuple):
    """The most sequences that a run had at once, and their mean length in tokens. `choice` is what the run chose in
    the group kv, such as a backend without prefix sharing.
    """

    backend: str
    choice: str
    mean_tokens: float
    sequences: float


def capacity_figure(records: Sequence[RunRecord]) -> Figure | None:
    """The planner's curves for the cache that most of the runs had, with those runs' measurements on them; None
    where no run recorded how large its cache was.
    """
    sized = [(size, record) for record in records if (size := _cache_size(record)) is not None]
    if not sized:
        return None
    [(common, _)] = Counter(size for size, _ in sized).most_common(1)
    chosen = [record for size, record in sized if size == common]
    kv_bytes, per_token, longest = common
    setting = chosen[0].config.get("kv.block_size")
    block = setting if isinstance(setting, int) else 16
    points = [point for record in chosen if (point := measured_capacity(record))]
    # Whole blocks, from a thirty-second of the longest or what was measured: between them the curve has steps that
    # a line would cut.
    halvings = log2(max(32.0, *(longest / point.mean_tokens for point in points)))
    steps = range(ceil(4 * halvings) + 2)
    lengths = sorted({max(1, round(longest * 2 ** (-step / 4) / block)) * block for step in steps})
    groups = next((_groups(record) for record in chosen if "kv_groups" in record.facts), ())
    sizes = {"max_seq_len": longest, "block_size": block}
    curves = capacity_curve(kv_bytes, per_token, **sizes, lengths=lengths, groups=groups)
    heading = f"Sequences that fit in {kv_bytes // per_token:,} token slots, by their mean length"
    others = len(records) - len(chosen)
    note = f"{others} of {len(records)} runs had another cache, and are not shown" if others else ""
    return draw_capacity(curves, points, heading, note)


def measured_capacity(record: RunRecord) -> MeasuredCapacity | None:
    """The most sequences that a run had at once, and the mean of their stored tokens when they stored most; of
    groups of layers, which store a token more than once or not at all, the mean of their lengths.
    """
    tokens_of = "context_tokens" if "kv_groups" in record.facts else "pool.tokens_stored"
    columns = [record.steps().column(name).tolist() for name in ("running", tokens_of)]
    running, tokens = max(zip(*columns, strict=True), default=(0, 0))
    backend = str(record.config.get("kv.backend", record.name))
    choice = record.choices.get("kv", backend)
    return MeasuredCapacity(backend, choice, tokens / running, running) if running and tokens else None


def draw_capacity(
    curves: Sequence[CapacityCurve], measured: Sequence[MeasuredCapacity], heading: str, note: str = ""
) -> Figure:
    """A curve for each backend and points in its colour, on logarithmic axes."""
    figure, axes = style.new_axes(4.6, "mean length of a sequence, tokens", "sequences at once")
    backends = dict.fromkeys([*(curve.backend for curve in curves), *(point.backend for point in measured)])
    colours = dict(zip(backends, cycle(style.LINES), strict=False))
    for curve, dashes in zip(curves, cycle(_DASHES), strict=False):
        line: Any = {"color": colours[curve.backend], "linestyle": dashes, "linewidth": 1.8}
        axes.plot(curve.lengths, curve.sequences, label=f"{curve.backend}, planned", **line)
    choices = dict.fromkeys((point.backend, point.choice) for point in measured)
    for (backend, choice), marker in zip(choices, cycle(_MARKERS), strict=False):
        at = [(p.mean_tokens, p.sequences) for p in measured if (p.backend, p.choice) == (backend, choice)]
        mark: Any = {"linestyle": "none", "marker": marker, "markersize": 8, "markeredgecolor": "white"}
        mark |= {"markerfacecolor": colours[backend], "label": f"{choice}, most in a run"}
        axes.plot(*zip(*at, strict=True), **mark)
    style.title(axes, heading, note)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.minorticks_off()
    style.plain(axes.xaxis)
    style.plain(axes.yaxis)
    style.legend(axes, columns=4, below=-0.14)
    return figure


def _groups(record: RunRecord) -> tuple[LayerGroup, ...]:
    """A window of one token is that of states."""
    groups = record.facts["kv_groups"]
    return tuple(LayerGroup(tuple(range(layers)), window, window == 1) for layers, window in groups)


def _cache_size(record: RunRecord) -> tuple[int, int, int] | None:
    """Bytes of the cache, bytes of a token, and the longest sequence, where the run recorded them."""
    sizes = (
        record.metrics.get("capacity/kv_bytes"),
        record.facts.get("kv_bytes_per_token"),
        record.config.get("model.max_seq_len"),
    )
    return (int(sizes[0]), int(sizes[1]), int(str(sizes[2]))) if all(sizes) else None  # type: ignore[arg-type]
