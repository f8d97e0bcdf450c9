"""What a run prints on the terminal: its configuration, its figures, and runs side by side."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvlab.config import format_bytes
from kvlab.lab.results.catalogue import CATALOGUE, Metric, metric, sections
from kvlab.lab.terminal import marked

Metrics = Mapping[str, float]
_WIDEST = 24  # characters of a setting's values in a table of points; longer ones are folded


def config_tree(config: Mapping[str, Any], choices: Mapping[str, str]) -> Tree:
    """The configuration as a tree: a branch per group with the choice made, settings below."""
    tree = Tree(marked("[bold]run[/]"))
    for key, value in config.items():
        if isinstance(value, Mapping) and key in choices:
            branch = tree.add(marked("[bold]{}[/]: [cyan]{}[/]", key, choices[key]))
            settings = [marked("[dim]{}[/]={}", name, _short(item)) for name, item in value.items()]
            branch.add(Text("  ").join(settings))
        elif value not in (None, {}):
            tree.add(marked("[bold]{}[/]: {}", key, _short(value)))
    return tree


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def comparison_table(
    runs: Sequence[tuple[str, Metrics]], *, known_only: bool = False, brief: bool = False
) -> Table:
    """The figures of a run, or of several side by side; with `known_only` those that one of them has, with `brief`
    those that are not 0 in all. Each but the first has its ratio to the first beside it, green where it is better.
    """
    table = new_table("")
    for number, (name, _) in enumerate(runs):
        table.add_column(name, justify="right", overflow="fold", max_width=18 if len(runs) > 2 else None)
        if number:
            table.add_column("ratio", justify="right")

    def is_shown(entry: Metric) -> bool:
        values = [metrics.get(entry.name) for _, metrics in runs]
        if brief:
            return any(values)
        return not (entry.optional or known_only) or any(value is not None for value in values)

    for section, entries in sections().items():
        shown = [entry for entry in entries if entry.in_table and is_shown(entry)]
        if shown:
            table.add_row(Text(section, "bold"))
        for entry in shown:
            first, *others = [metrics.get(entry.name) for _, metrics in runs]
            cells = [cell for value in others for cell in (entry.text(value), _ratio(entry, first, value))]
            table.add_row(f"  {entry.label}", entry.text(first), *cells)
    return table


def points_table(points: Sequence[Mapping[str, Any]], width: int, optimized: str | None = None) -> Table:
    """The points of a sweep, a row each: their `settings`, each in a column of its own, and the metrics: the
    `optimized` one first, then those that the catalogue has a column for and that are not 0 in all, as many as
    `width` characters hold; the others are named below. A point without settings has its `name` there.
    """
    columns = _settings_columns(points) or {"point": [point["name"] for point in points]}
    ended = ["" if point["status"] == "finished" else point["status"].replace("_", " ") for point in points]
    table = new_table()
    room = width - _width("", ended)
    for label, cells in columns.items():
        own = max(len(label), min(_WIDEST, max(map(cell_len, cells))))
        table.add_column(label, overflow="fold", width=own)
        room -= own + len(" | ")
    left_out = []
    shown = {entry.column: entry for entry in CATALOGUE.values() if entry.column}
    if optimized is not None:
        first = metric(optimized)
        shown = {first.column or first.axis: first} | shown
    for heading, entry in shown.items():
        if not any(point["metrics"].get(entry.name) for point in points):
            continue
        cells = [entry.text(point["metrics"].get(entry.name), unit=False) for point in points]
        room -= _width(heading, cells)
        if room < 0:
            left_out.append(heading)
            continue
        table.add_column(heading, justify="right")
        columns[heading] = cells
    if any(ended):
        table.add_column("")
        columns[""] = ended
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    if left_out:
        table.caption = f"no room in {width} characters: {'; '.join(left_out)}"
        table.caption_justify = "left"
    return table


def _settings_columns(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A column for each setting of points, by the end of its key where no other key has that."""
    settings = [point.get("settings", {}) for point in points]
    keys = list(dict.fromkeys(key for own in settings for key in own))
    ends = [key.rpartition(".")[2] for key in keys]
    return {
        end if ends.count(end) == 1 else key: [own.get(key, "") for own in settings]
        for key, end in zip(keys, ends, strict=True)
    }


def _width(heading: str, cells: Iterable[str]) -> int:
    """The characters that a column needs with its border, its heading folded between words."""
    return max(map(cell_len, [*heading.split(), *cells])) + len(" | ")


def profile_table(metrics: Metrics, parts: Iterable[str]) -> Table:
    """Where a step's time goes."""
    table = new_table("part of a step", "ms, mean", "share, %")
    for part in parts:
        names = (f"profile/{part}_ms_mean", f"profile/{part}_share")
        table.add_row(part, *(metric(name).text(metrics.get(name), unit=False) for name in names))
    return table


def memory_sentence(runs: Sequence[tuple[str, Metrics]]) -> str:
    """How many sequences the runs had at once in the same memory, and how fast that made them, each against the
    first. Empty where their memory is not the same, all ran as many sequences, or figures are missing.
    """
    size, peak, output = "capacity/kv_bytes", "capacity/peak_running", "throughput/output_tokens_per_s"
    figures = [[metrics.get(name) or 0.0 for name in (size, peak, output)] for _, metrics in runs]
    sizes, peaks, _ = zip(*figures, strict=True) if len(runs) > 1 else ((), (), ())
    if len(set(peaks)) < 2 or not all(map(all, figures)) or not math.isclose(min(sizes), max(sizes), rel_tol=0.02):
        return ""
    (first, _), *others = runs
    parts: list[str] = []
    for (name, _), (_, count, rate) in zip(others, figures[1:], strict=True):
        ran, times = f"{name} ran {count:.0f}", f"({count / peaks[0]:.1f} times)"
        speed = f"{rate / figures[0][2]:.2f} times"
        compared = f"sequences at once against {peaks[0]:.0f} of {first} {times} and produced {speed} the tokens"
        parts.append(f"{name} {count:.0f} {times} and {speed}" if parts else f"{ran} {compared} per second")
    sentence = f"In the same {format_bytes(sizes[0])}, {'; '.join(parts)}."
    unused = [(name, metrics.get("kv/internal_fragmentation_mean")) for name, metrics in runs]
    if any(share is None for _, share in unused):
        return sentence
    *some, last = (f"{share:.0f} % in {name}" for name, share in unused)
    return f"{sentence} Of the memory of running sequences {', '.join(some)} and {last} held no token."


def new_table(*headings: str | Text, **options: Any) -> Table:
    """A table whose columns behind the first are numbers; `options` are of every column."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, **{"justify": "right" if number else "left", **options})
    return table


def _ratio(entry: Metric, first: float | None, value: float | None) -> Text | str:
    more_is_better = entry.direction.more_is_better
    if not first or value is None or more_is_better is None:
        return ""
    ratio = value / first
    style = "dim" if 0.98 < ratio < 1.02 else "green" if (ratio > 1) == more_is_better else "red"
    return Text(f"{ratio:.2f}x", style)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_short(item)}" for name, item in value.items()) + "}"
    return "-" if value is None else str(value)
