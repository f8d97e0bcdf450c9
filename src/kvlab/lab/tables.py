"""What a run says on the terminal: its configuration, its figures, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.tree import Tree

from kvlab.config import format_bytes
from kvlab.lab.directions import direction


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: a metric and how to write it."""

    label: str
    metric: str
    unit: str = ""
    digits: int = 1

    def text(self, metrics: Mapping[str, float]) -> str:
        """The metric's value for people; a dash where it has none."""
        value = metrics.get(self.metric)
        if value is None:
            return "-"
        if self.unit == "bytes":
            return format_bytes(value)
        return f"{value:,.{self.digits}f}{' ' + self.unit if self.unit else ''}"


SECTIONS: dict[str, list[Row]] = {
    "capacity": [
        Row("KV cache", "capacity/kv_bytes", "bytes"),
        Row("token slots", "capacity/token_slots", digits=0),
        Row("sequences at once, planned", "capacity/planned_running", digits=0),
        Row("sequences at once, peak", "capacity/peak_running", digits=0),
        Row("sequences at once, mean", "capacity/mean_running"),
    ],
    "throughput": [
        Row("duration", "duration_s", "s", 2),
        Row("output tokens", "throughput/output_tokens_per_s", "tok/s"),
        Row("prompt + output tokens", "throughput/total_tokens_per_s", "tok/s"),
        Row("of what the machine could do", "efficiency/roofline_share", "%"),
    ],
    "latency": [
        Row("first token, p50", "latency/ttft_ms_p50", "ms", 0),
        Row("first token, p99", "latency/ttft_ms_p99", "ms", 0),
        Row("per output token, p50", "latency/tpot_ms_p50", "ms", 1),
        Row("whole request, p50", "latency/e2el_ms_p50", "ms", 0),
        Row("whole request, p99", "latency/e2el_ms_p99", "ms", 0),
    ],
    "waste": [
        Row("blocks in use, mean", "kv/block_utilization_mean", "%"),
        Row("token slots in use, mean", "kv/token_utilization_mean", "%"),
        Row("unused part of blocks in use", "kv/internal_fragmentation_mean", "%"),
        Row("tokens computed in prefill", "tokens/prefill", digits=0),
        Row("prompt tokens found in the cache", "kv/prefix_hit_tokens", digits=0),
        Row("blocks saved by sharing, peak", "kv/shared_blocks_peak", digits=0),
        Row("cached blocks evicted", "kv/evicted_blocks", digits=0),
        Row("preemptions", "requests/preemptions", digits=0),
        Row("tokens computed twice", "tokens/recomputed", digits=0),
        Row("their share of all computed", "tokens/recomputed_share", "%"),
    ],
    "requests": [
        Row("completed", "requests/completed", digits=0),
        Row("failed", "requests/failed", digits=0),
        Row("refused", "requests/refused", digits=0),
    ],
}


def config_tree(config: Mapping[str, Any], choices: Mapping[str, str]) -> Tree:
    """The configuration as a tree: a branch per group with the choice made, settings below."""
    tree = Tree("[bold]run[/]")
    for key, value in config.items():
        if isinstance(value, Mapping) and key in choices:
            branch = tree.add(f"[bold]{key}[/]: [cyan]{choices[key]}[/]")
            branch.add("  ".join(f"[dim]{name}[/]={_short(item)}" for name, item in value.items()))
        elif value not in (None, {}):
            tree.add(f"[bold]{key}[/]: {_short(value)}")
    return tree


def summary_table(name: str, metrics: Mapping[str, float]) -> Table:
    """A run's figures."""
    return _table([(name, metrics)], compare=False)


def comparison_table(runs: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """Runs side by side; for two, how many times the first's figure the second's is."""
    return _table(runs, compare=len(runs) == 2)


def points_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The points of a sweep, a row each: their `settings`, each in a column of its own, and the figures that tell
    most. A point without settings has its `name` there.
    """
    rows = [
        Row("KV cache", "capacity/kv_bytes", "bytes"),
        Row("at once, peak", "capacity/peak_running", digits=0),
        Row("output tok/s", "throughput/output_tokens_per_s"),
        Row("first token p50, ms", "latency/ttft_ms_p50", digits=0),
        Row("per token p50, ms", "latency/tpot_ms_p50"),
        Row("token slots used, %", "kv/token_utilization_mean"),
        Row("preemptions", "requests/preemptions", digits=0),
        Row("computed twice, %", "tokens/recomputed_share"),
    ]
    keys = list(dict.fromkeys(key for point in points for key in point.get("settings", {})))
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    ends = [key.rpartition(".")[2] for key in keys]
    for key, end in zip(keys, ends, strict=True):
        label = end if ends.count(end) == 1 else key
        table.add_column(label, overflow="fold", min_width=len(label))
    if not keys:
        table.add_column("point", overflow="fold")
    for row in rows:
        table.add_column(row.label, justify="right")
    table.add_column("")
    for point in points:
        settings = point.get("settings", {})
        cells = [settings.get(key, "") for key in keys] or [point["name"]]
        ended = "" if point["status"] == "finished" else point["status"].replace("_", " ")
        table.add_row(*cells, *(row.text(point["metrics"]) for row in rows), ended)
    return table


def profile_table(metrics: Mapping[str, float], parts: Iterable[str]) -> Table:
    """Where a step's time goes."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("part of a step")
    table.add_column("ms, mean", justify="right")
    table.add_column("share, %", justify="right")
    for part in parts:
        time, share = Row(part, f"profile/{part}_ms_mean", digits=3), Row(part, f"profile/{part}_share")
        table.add_row(part, time.text(metrics), share.text(metrics))
    return table


def paging_sentence(contiguous: Mapping[str, float], paged: Mapping[str, float]) -> str:
    """What a contiguous and a paged run with the same bytes show, in a sentence made of their figures."""
    peak, output = "capacity/peak_running", "throughput/output_tokens_per_s"
    waste = "kv/internal_fragmentation_mean"
    needed = (peak, output, waste)
    if not all(metric in run for metric in needed for run in (contiguous, paged)):
        return "One of the two runs has no figures to compare."
    size = format_bytes(contiguous["capacity/kv_bytes"])
    return (
        f"In the same {size}, paged blocks ran {paged[peak]:.0f} sequences at once against {contiguous[peak]:.0f} "
        f"({paged[peak] / contiguous[peak]:.1f} times) and produced {paged[output] / contiguous[output]:.2f} times "
        f"the tokens per second; {paged[waste]:.0f} % of the memory of running sequences held no token, against "
        f"{contiguous[waste]:.0f} % in contiguous slots."
    )


def _table(runs: Sequence[tuple[str, Mapping[str, float]]], *, compare: bool) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right")
    if compare:
        table.add_column("ratio", justify="right")
    for section, rows in SECTIONS.items():
        table.add_row(f"[bold]{section}[/]")
        for row in rows:
            cells = [row.text(metrics) for _, metrics in runs]
            table.add_row(f"  {row.label}", *cells, *([_ratio(row, runs)] if compare else []))
    return table


def _ratio(row: Row, runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    first, second = (metrics.get(row.metric) for _, metrics in runs)
    more_is_better = direction(row.metric).more_is_better
    if not first or second is None or more_is_better is None:
        return ""
    ratio = second / first
    better = ratio > 1 if more_is_better else ratio < 1
    style = "dim" if 0.98 < ratio < 1.02 else "green" if better else "red"
    return f"[{style}]{ratio:.2f}x[/]"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_short(item)}" for name, item in value.items()) + "}"
    return "-" if value is None else str(value)
