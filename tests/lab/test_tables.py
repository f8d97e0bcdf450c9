"""Tables on the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import RenderableType

from kvlab.cli.compose import compose_run
from kvlab.lab.results.catalogue import CATALOGUE
from kvlab.lab.results.tables import comparison_table, config_tree, memory_sentence, points_table
from kvlab.lab.run.execute import RunContext, execute
from kvlab.lab.terminal import Terminal
from tests.support.runs import FEW_STEPS

SLOTS = {
    "capacity/kv_bytes": 2.0**27,
    "capacity/peak_running": 8.0,
    "throughput/output_tokens_per_s": 100.0,
    "latency/ttft_ms_p50": 200.0,
    "kv/internal_fragmentation_mean": 81.0,
    "requests/failed": 0.0,
}
BLOCKS = SLOTS | {
    "capacity/peak_running": 48.0,
    "throughput/output_tokens_per_s": 190.0,
    "latency/ttft_ms_p50": 300.0,
    "kv/internal_fragmentation_mean": 3.0,
}
SHARED = BLOCKS | {"capacity/peak_running": 60.0, "throughput/output_tokens_per_s": 240.0}


def printed(shown: RenderableType, width: int = 120, *, colour: bool = False) -> str:
    file = io.StringIO()
    system = "standard" if colour else None
    Terminal(file=file, width=width, force_terminal=colour, color_system=system).print(shown)
    return file.getvalue()


def cells(text: str, label: str) -> list[str]:
    """The cells of the row with this label."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(label))
    return [cell.strip() for cell in re.split("[│┃]", line)][1:]


def test_one_run_has_its_figures_and_a_dash_where_there_is_none() -> None:
    text = printed(comparison_table([("paged", BLOCKS)]))
    assert cells(text, "output tokens") == ["190.0 tok/s"]
    assert cells(text, "KV cache") == ["128.0 MiB"]
    assert cells(text, "duration") == ["-"]


def test_two_runs_have_the_ratio_of_the_second_to_the_first() -> None:
    text = printed(comparison_table([("slots", SLOTS), ("blocks", BLOCKS)]))
    assert cells(text, "┃")[-3:] == ["slots", "blocks", "ratio"]
    assert cells(text, "output tokens") == ["100.0 tok/s", "190.0 tok/s", "1.90x"]
    assert cells(text, "sequences at once, peak") == ["8", "48", "6.00x"]
    assert cells(text, "KV cache")[-1] == ""  # neither more nor less of it is better
    assert cells(text, "failed")[-1] == ""  # no ratio to 0


def test_of_three_runs_the_second_and_the_third_have_their_ratio_to_the_first() -> None:
    runs = [("contiguous", SLOTS), ("paged", BLOCKS), ("paged with sharing", SHARED)]
    text = printed(comparison_table(runs))
    assert cells(text, "┃")[-5:] == ["contiguous", "paged", "ratio", "paged with sharing", "ratio"]
    assert cells(text, "output tokens") == ["100.0 tok/s", "190.0 tok/s", "1.90x", "240.0 tok/s", "2.40x"]
    assert cells(text, "duration") == ["-", "-", "", "-", ""]


def test_a_long_name_leaves_room_for_the_labels() -> None:
    name = "kv=paged kv.prefix_sharing=true workload=multi_turn"
    text = printed(comparison_table([(name, SLOTS), (name, BLOCKS), (name, SHARED)]), width=116)
    assert "  prompt tokens found in the cache " in text
    assert max(map(len, text.splitlines())) <= 116


@pytest.mark.parametrize(
    ("label", "colour"), [("sequences at once, peak", "32"), ("first token, p50", "31"), ("completed", None)]
)
def test_a_ratio_is_green_where_it_is_better_and_red_where_it_is_worse(label: str, colour: str | None) -> None:
    text = printed(comparison_table([("slots", SLOTS), ("blocks", BLOCKS)]), colour=True)
    (line,) = (line for line in text.splitlines() if label in line)
    assert re.findall(r"\x1b\[(3[12])m", line) == ([colour] if colour else [])


def test_a_sentence_compares_two_runs_in_the_same_memory() -> None:
    assert memory_sentence([("slots", SLOTS), ("blocks", BLOCKS)]) == (
        "In the same 128.0 MiB, blocks ran 48 sequences at once against 8 of slots (6.0 times) and produced 1.90 "
        "times the tokens per second. Of the memory of running sequences 81 % "
        "in slots and 3 % in blocks held no token."
    )


def test_a_sentence_compares_any_number_with_the_first() -> None:
    without = {name: value for name, value in SHARED.items() if not name.startswith("kv/")}
    assert memory_sentence([("slots", SLOTS), ("blocks", BLOCKS), ("with sharing", without)]) == (
        "In the same 128.0 MiB, blocks ran 48 sequences at once against 8 of slots (6.0 times) and produced 1.90 "
        "times the tokens per second; with sharing 60 (7.5 times) and 2.40 times."
    )


@pytest.mark.parametrize(
    "other",
    [
        {},
        BLOCKS | {"capacity/kv_bytes": 2.0**28},
        BLOCKS | {"capacity/peak_running": 8.0},
        BLOCKS | {"throughput/output_tokens_per_s": 0.0},
    ],
    ids=["no figures", "other memory", "as many sequences", "nothing produced"],
)
def test_there_is_no_sentence_where_there_is_nothing_to_say(other: dict[str, float]) -> None:
    assert memory_sentence([("slots", SLOTS), ("other", other)]) == ""
    assert memory_sentence([("slots", SLOTS)]) == memory_sentence([]) == ""


def test_points_of_a_sweep_are_rows_with_their_settings() -> None:
    points = [
        {"name": str(size), "settings": {"kv.block_size": str(size)}, "status": status, "metrics": BLOCKS}
        for size, status in ((8, "finished"), (16, "out_of_memory"))
    ]
    text = printed(points_table(points, 200), width=200)
    assert cells(text, "16") == ["128.0 MiB", "48", "190.0", "300", "out of memory"]
    named = printed(points_table([{"name": "alone", "status": "failed", "metrics": {}}], 200), width=200)
    assert cells(named, "alone")[0] == "failed"


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_table_of_points_has_no_more_columns_than_have_room(width: int) -> None:
    metrics = {entry.name: 123456.0 for entry in CATALOGUE.values() if entry.column}
    text = printed(points_table([{"name": "alone", "status": "finished", "metrics": metrics}], width), width=width)
    assert "…" not in text
    (row,) = (line for line in text.splitlines() if "alone" in line)
    left_out = " ".join(text.partition("characters: ")[2].split()).split("; ")
    assert left_out[-1] == "computed twice, %"
    assert row.count("│") + len(left_out) == len(metrics)


def test_service_levels_are_shown_where_a_run_has_them() -> None:
    limited = BLOCKS | {"slo/goodput_per_s": 2.5, "slo/attainment": 90.0}
    text = printed(comparison_table([("free", BLOCKS), ("limited", limited)]))
    assert cells(text, "goodput, requests within limits")[:2] == ["-", "2.50 req/s"]
    assert "attainment, per token" not in text
    assert "service levels" not in printed(comparison_table([("free", BLOCKS)]))
    points = [{"name": "a", "status": "finished", "metrics": found} for found in (BLOCKS, limited)]
    assert "goodput" in printed(points_table(points, 220), width=220)
    assert "goodput" not in printed(points_table(points[:1], 220), width=220)


def test_what_is_optimized_has_the_first_column() -> None:
    points = [{"name": "a", "status": "finished", "metrics": BLOCKS | {"latency/ttft_ms_p99": 1234.5, "own": 2.0}}]
    assert "p99" not in printed(points_table(points, 200), width=200)
    for name, heading in (("latency/ttft_ms_p99", "first token, p99"), ("own", "own")):
        first = printed(points_table(points, 200, name), width=200).split("┃")[1]
        assert heading in first
    (column,) = [name for name, entry in CATALOGUE.items() if entry.column == "output tok/s"]
    text = printed(points_table(points, 200, column), width=200)
    assert text.count("output tok/s") == 1


@pytest.mark.parametrize("name", ["[/red]", "[bold]", "a[b]c", "[link=x]"])
def test_names_that_look_like_markup_are_printed_as_they_are(name: str) -> None:
    settings = {"settings": {f"tags.{name}": name}, "name": name, "status": "finished", "metrics": {}}
    for shown in (
        comparison_table([(name, SLOTS)]),
        comparison_table([(name, SLOTS), (name, BLOCKS)]),
        points_table([settings], 200),
        points_table([{"name": name, "status": "finished", "metrics": {}}], 200),
        config_tree({"run_name": name, "kv": {"backend": name}, "tags": {"x": name}}, {"kv": name}),
    ):
        assert name in printed(shown, width=200)


@pytest.mark.parametrize("in_sweep", [False, True])
def test_a_run_may_have_a_name_that_looks_like_markup(tmp_path: Path, in_sweep: bool) -> None:
    composed = compose_run([*FEW_STEPS, "run_name='[/red]'", "+tags.side='[/blue]'"])
    said = io.StringIO()
    context = RunContext(
        composed,
        directory=tmp_path,
        console=Terminal(file=said, width=200),
        name="[/red]",
        in_sweep=in_sweep,
        heading="1 of 2: [/red]" if in_sweep else None,
    )
    assert execute(context).status == "finished"
    assert "[/red]" in said.getvalue()


def test_a_brief_table_leaves_out_what_is_zero_in_all() -> None:
    runs = [("slots", SLOTS | {"requests/preemptions": 0.0}), ("blocks", BLOCKS | {"requests/preemptions": 3.0})]
    text = printed(comparison_table(runs, brief=True))
    assert cells(text, "preemptions")[:2] == ["0", "3"]
    assert not re.search("failed|refused|duration|requests", text)
    assert "failed" in printed(comparison_table(runs))


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0.00 req/s"), (0.0081, "0.0081 req/s"), (0.1, "0.10 req/s"), (3.14159, "3.14 req/s")]
)
def test_a_rate_of_a_log_of_weeks_is_not_rounded_to_nothing(value: float, said: str) -> None:
    assert CATALOGUE["slo/goodput_per_s"].text(value) == said
