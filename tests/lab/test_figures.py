"""Pictures: the numbers behind them, and that they can be drawn of anything a run may leave."""

from __future__ import annotations

import dataclasses
import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from kvlab.core import RequestRecord, StepRecord
from kvlab.kv.journal import BlockEvent, BlockEvents
from kvlab.lab import figures
from kvlab.lab.artifacts import write_blocks
from kvlab.lab.capacity import CapacityCurve
from kvlab.lab.figures import blocks, style
from kvlab.lab.figures.capacity_curve import MeasuredCapacity, draw_capacity
from kvlab.lab.figures.interactive import heat_map_hover, page, pareto_hover, pool_map_hover, timeline_hover
from kvlab.lab.figures.latency import latency_figure
from kvlab.lab.figures.memory import memory_figure, memory_series
from kvlab.lab.figures.metric_charts import metric_figure
from kvlab.lab.figures.pareto import Measured, measured_points, pareto_figure, pareto_front
from kvlab.lab.figures.points import THROUGHPUT, Point, metric_grid, sweep_points, varied_keys
from kvlab.lab.figures.pool_map import pool_image, pool_map_figure
from kvlab.lab.figures.timeline import shown_requests, timeline_figure
from kvlab.lab.recording import draw_figures
from kvlab.lab.records import read_request, read_run, read_step, step_row
from kvlab.lab.requests import latencies_ms, request_phases
from kvlab.lab.trace import trace_events
from tests.lab.test_profile import run
from tests.support.records import memory

A, S, F, C, D = (BlockEvent(number) for number in range(5))


def step(index: int, **values: Any) -> StepRecord:
    """A step of a second with a batch; what is not given is 0."""
    common = {"index": index, "start_s": float(index), "end_s": index + 1.0, "batch_seqs": 1, "schedule_ms": 100.0}
    return read_step(common | {"blocks_total": 4, "block_token_slots": 16} | values)


def request(**values: Any) -> RequestRecord:
    """A completed request of three tokens, queued for a second."""
    common = {
        "request_id": "r",
        "sample": 0,
        "arrival_s": 1.0,
        "scheduled_s": 2.0,
        "first_token_s": 3.0,
        "end_s": 6.0,
        "token_times_s": [3.0, 4.0, 6.0],
        "finish_reason": "length",
        "preemptions": 0,
        "preempted_s": [],
        "resumed_s": [],
        "prompt_tokens": 8,
        "cached_tokens": 0,
    }
    return read_request(common | values)


def events(*entries: tuple[int, BlockEvent, int, int]) -> BlockEvents:
    """Block events of (step, event, block, sequence)."""
    table = np.array(entries, dtype=np.int32).reshape(-1, 4)
    return BlockEvents(table[:, 0], table[:, 1].astype(np.int8), table[:, 2], table[:, 3])


def png(figure: Any) -> bytes:
    """The figure as a file."""
    file = BytesIO()
    figure.savefig(file)
    return file.getvalue()


class TestNumbers:
    """What is drawn, computed."""

    def test_a_requests_phases_have_no_gaps(self) -> None:
        assert request_phases(request()) == [("queued", 1, 2), ("prefill", 2, 3), ("decode", 3, 6)]

    def test_a_preempted_request_waits_and_is_computed_again(self) -> None:
        preempted = request(token_times_s=[3.0, 5.5, 6.0], preempted_s=[3.5], resumed_s=[5.0])
        assert request_phases(preempted)[2:] == [
            ("decode", 3, 3.5),
            ("preempted", 3.5, 5),
            ("prefill", 5, 5.5),
            ("decode", 5.5, 6),
        ]

    def test_a_request_preempted_before_its_first_token_is_in_prefill_until_then(self) -> None:
        preempted = request(preempted_s=[2.5], resumed_s=[2.75])
        assert request_phases(preempted)[1:4] == [
            ("prefill", 2, 2.5),
            ("preempted", 2.5, 2.75),
            ("prefill", 2.75, 3),
        ]

    def test_a_request_that_never_came_back_is_preempted_to_its_end(self) -> None:
        gone = request(token_times_s=[3.0], preempted_s=[4.0], finish_reason="aborted")
        assert request_phases(gone)[-1] == ("preempted", 4, 6)

    def test_a_request_that_was_never_admitted_is_queued_to_its_end(self) -> None:
        waiting = request(scheduled_s=None, token_times_s=None, finish_reason="aborted")
        assert request_phases(waiting) == [("queued", 1, 6)]

    def test_of_many_requests_one_in_so_many_is_shown_in_order_of_arrival(self) -> None:
        shown, every = shown_requests(
            [request(request_id=str(n), arrival_s=float(-n)) for n in range(1000)], most=400
        )
        assert every == 3
        assert [each.name for each in shown][:3] == ["999", "996", "993"]
        assert len(shown) == 334

    def test_latencies_are_those_of_the_metrics(self) -> None:
        found = latencies_ms([request(), request(finish_reason="failed"), request(token_times_s=[3.0], end_s=3.0)])
        assert found == {
            "ttft": [2000, 2000],
            "e2el": [5000, 2000],
            "tpot": [1500],
            "itl": [1000, 2000],
            "queue": [1000, 1000],
        }

    def test_memory_is_a_step_function_in_blocks(self) -> None:
        steps = [
            step(0, blocks_in_use=1, tokens_in_use=8, running=1),
            step(1, blocks_in_use=3, blocks_cached=1, tokens_in_use=40, waiting=2, preempted=2),
        ]
        series = memory_series(steps)
        assert series.at.tolist() == [0, 1, 2]
        assert series.in_use.tolist() == [1, 3, 3]
        assert series.tokens.tolist() == [0.5, 2.5, 2.5]
        assert series.preempted_at.tolist() == [1, 1]
        assert (series.capacity, series.block_tokens) == (4, 16)

    def test_thinning_keeps_peaks_and_gaps(self) -> None:
        values = np.full(100_000, 5.0)
        values[77_777], values[22_222] = 9.0, 1.0
        at, kept = style.thin(np.arange(100_000.0), values)
        assert len(at) == len(kept) <= 2000
        assert (kept.max(), kept.min()) == (9, 1)
        assert (np.diff(at) >= 0).all()

    def test_a_block_is_followed_from_holder_to_holder(self) -> None:
        told = events(
            (0, A, 0, 5), (1, S, 0, 6), (2, F, 0, 5), (3, F, 0, 6), (3, C, 0, -1), (5, D, 0, -1), (5, A, 0, 7)
        )
        found = blocks.stretches(told, 8)
        assert list(zip(found.holder.tolist(), found.start.tolist(), found.end.tolist(), strict=True)) == [
            (5, 0, 1),
            (blocks.SHARED, 1, 2),
            (6, 2, 3),
            (blocks.CACHED, 3, 5),
            (7, 5, 8),
        ]

    def test_a_sequence_that_came_and_went_within_a_step_is_not_lost(self) -> None:
        found = blocks.stretches(events((2, A, 1, 3), (2, F, 1, 3)), 4)
        grid = blocks.pool_grid(found, 2, [0, 1, 2, 3], 4.0, most_columns=4)
        assert grid.cells.tolist() == [[-1] * 4, [-1, -1, 3, -1]]

    def test_no_used_block_is_lost_in_a_pool_of_ten_thousand(self) -> None:
        told = events((0, A, 5003, 1), (1, F, 5003, 1), (1, A, 9999, 2), (2, F, 9999, 2), (2, C, 9999, -1))
        found = blocks.stretches(told, 100_000)
        grid = blocks.pool_grid(found, 10_000, np.arange(100_000.0).tolist(), 100_000.0)
        assert grid.blocks_per_row == 25
        assert grid.cells.shape == (400, 800)
        assert grid.cells[5003 // 25, 0] == 1
        assert grid.cells[399, 0] == 2  # used beats cached within a cell
        assert grid.cells[399, 1] == blocks.CACHED
        assert grid.in_use[5003 // 25, 0] == pytest.approx(1 / 25)
        assert grid.cached[399, 1] == pytest.approx(1 / 25)

    def test_where_a_row_is_many_blocks_few_in_use_are_pale_but_not_white(self) -> None:
        found = blocks.stretches(events((0, A, 0, 0)), 1)
        few = pool_image(blocks.pool_grid(found, 100, [0], 1.0, most_rows=1, most_columns=1))[0, 0]
        alone = pool_image(blocks.pool_grid(found, 1, [0], 1.0, most_columns=1))[0, 0]
        assert alone.sum() < few.sum() < 3 * 255 - 60

    def test_neighbours_get_different_colours(self) -> None:
        cells = np.arange(70).reshape(70, 1).repeat(3, axis=1)
        chosen = blocks.colour_numbers(cells, 7)
        assert all(chosen[n] != chosen[n + 1] for n in range(69))
        assert set(chosen.values()) == set(range(7))

    def test_block_events_are_written_and_read_back(self, tmp_path: Path) -> None:
        told = events((0, A, 3, 1), (0, S, 3, 0), (4, C, 3, -1))
        write_blocks(tmp_path, told)
        (tmp_path / "summary.json").write_text("{}")
        back = read_run(tmp_path).blocks()
        assert back is not None
        for name in ("step", "event", "block", "sequence"):
            assert getattr(back, name).tolist() == getattr(told, name).tolist()
        assert pq.read_table(tmp_path / "blocks.parquet")["event"].to_pylist() == ["allocated", "shared", "cached"]
        (tmp_path / "blocks.parquet").unlink()
        assert read_run(tmp_path).blocks() is None

    def test_a_grid_takes_the_median_of_repeats_and_knows_what_failed(self) -> None:
        points = [
            Point({"a": a, "b": b}, {THROUGHPUT: a * b + extra}, status)
            for a, b, extra, status in (
                (2, 10, 0.0, "finished"),
                (2, 10, 4.0, "finished"),
                (1, 10, 0.0, "finished"),
                (1, 5, 0.0, "failed"),
            )
        ]
        grid = metric_grid(points, "a", "b", THROUGHPUT)
        assert (grid.rows, grid.columns) == ([1, 2], [5, 10])
        np.testing.assert_equal(grid.values, [[math.nan, 10], [math.nan, 22]])
        np.testing.assert_equal(grid.failed, [[1, 0], [math.nan, 0]])

    def test_bookkeeping_is_not_what_was_varied(self) -> None:
        points = [Point({"kv.num_blocks": n, "seed": n, "repeat": n, "tags.x": n, "same": 1}, {}) for n in (1, 2)]
        assert varied_keys(points) == ["kv.num_blocks"]

    def test_the_front_is_what_no_other_beats(self) -> None:
        a, b, c, d = (Measured(name, x, y) for name, x, y in (("a", 1, 1), ("b", 2, 3), ("c", 3, 2), ("d", 2, 2)))
        assert pareto_front([d, c, b, a]) == [a, b]

    def test_repeats_are_one_point_of_the_front(self) -> None:
        points = [
            Point({"a": a, "repeat": repeat}, {"latency/tpot_ms_p50": x, THROUGHPUT: y})
            for a, repeat, x, y in ((1, 0, 10, 100), (1, 1, 30, 300), (2, 0, 5, 50))
        ]
        assert measured_points(points) == [Measured("a=1", 20, 200), Measured("a=2", 5, 50)]


class TestDrawing:
    """Whatever a run left, it is drawn."""

    STEPS = (step(0, blocks_in_use=1, running=1), step(1, blocks_in_use=2, preempted=1, waiting=1, blocks_cached=1))

    @pytest.mark.parametrize(
        "records",
        [
            [],
            [request()],
            [request(finish_reason="failed", first_token_s=None, token_times_s=[])],
            [request(arrival_s=n / 2000, preempted_s=[4.0], resumed_s=[5.0]) for n in range(2000)],
        ],
        ids=["no request", "one request", "none completed", "two thousand"],
    )
    def test_requests(self, records: list[RequestRecord]) -> None:
        for figure in (timeline_figure(records), latency_figure(records)):
            assert png(figure).startswith(b"\x89PNG")
        assert timeline_hover(records).to_json()

    def test_memory_without_a_step_with_one_and_with_many(self) -> None:
        many = [step(n, blocks_in_use=n % 4, tokens_in_use=n, running=1, waiting=n) for n in range(5000)]
        for steps in ([], self.STEPS[:1], self.STEPS, many):
            assert png(memory_figure(steps))
        assert "slot" in memory_figure(self.STEPS, unit="slot").axes[0].get_title(loc="left")

    def test_a_map_says_what_it_cannot_show(self) -> None:
        for told in (None, events()):
            (axes,) = pool_map_figure(told, self.STEPS).axes
            assert axes.texts

    def test_a_map_of_ten_thousand_blocks(self) -> None:
        told = events(*((n % 2, A, n, n // 50) for n in range(10_000)))
        steps = [step(each.index, blocks_total=10_000) for each in self.STEPS]
        assert png(pool_map_figure(told, steps))
        assert len(pool_map_hover(told, steps, []).to_json()) < 3_000_000

    def test_sweeps_of_two_amounts_of_one_and_of_names(self) -> None:
        two = [Point({"a": a, "b": b}, {THROUGHPUT: 1.0 * a * b}) for a in (1, 2) for b in (3, 4)]
        one = [Point({"a": a}, {THROUGHPUT: 1.0 * a}, "failed" if a == 16 else "finished") for a in (1, 1, 4, 16)]
        names = [Point({"order": name}, {THROUGHPUT: 5.0}) for name in ("fcfs", "priority")]
        failed = [Point({"a": a, "b": b}, {}, "failed") for a in (1, 2) for b in (3, 4)]
        for points, images in ((two, 1), (one, 0), (names, 0), (failed, 1), (one[:2], 0)):
            figure = metric_figure(points)
            assert png(figure)
            assert len(figure.axes[0].images) == images
        grid = metric_grid(two, "a", "b", THROUGHPUT)
        assert heat_map_hover(grid, "a", "b").to_json()

    def test_a_front_and_capacity_with_and_without_points(self) -> None:
        points = [Point({"a": a}, {"latency/tpot_ms_p50": 1.0 * a, THROUGHPUT: 9.0 * a}) for a in (1, 2, 3)]
        for some in ([], points):
            assert png(pareto_figure(some))
            assert pareto_hover(some).to_json()
        curves = [CapacityCurve(name, (256, 512), (8, 4)) for name in ("contiguous", "paged", "mine")]
        measured = [MeasuredCapacity(name, name, 300, 6) for name in ("paged", "elsewhere")]
        measured.append(MeasuredCapacity("paged", "paged_unshared", 400, 5))
        assert png(draw_capacity(curves, [], "planned"))
        (axes,) = draw_capacity(curves, measured, "both").axes
        drawn = {line.get_label(): line for line in axes.lines}
        assert set(drawn) == {f"{name}, planned" for name in ("contiguous", "paged", "mine")} | {
            "paged, measured",
            "elsewhere, measured",
            "paged_unshared, measured",
        }
        marks = [drawn[f"{name}, measured"] for name in ("paged", "paged_unshared")]
        assert {mark.get_markerfacecolor() for mark in marks} == {drawn["paged, planned"].get_color()}
        assert len({mark.get_marker() for mark in marks}) == 2
        assert len({line.get_color() for line in drawn.values() if line.get_linestyle() != "None"}) == 3


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose memory does not hold all that runs."""
    directory = tmp_path_factory.mktemp("pressed")
    pressure = "workload.system_len=16 workload.output_len.min=20 workload.output_len.max=24 kv.num_blocks=14"
    result, said = run(directory, *pressure.split(), "kv.block_size=8", "scheduler.admission_reserve=0")
    assert result.metrics["requests/preemptions"] > 0
    assert "warning: the run's figures" not in said
    return directory


class TestARun:
    """A real one, under pressure."""

    def test_leaves_its_pictures(self, pressed: Path) -> None:
        files = {file.name: file for file in (pressed / "figures").iterdir()}
        assert set(files) == {"memory.png", "pool_map.png", "timeline.png", "latency.png", "hover.html"}
        assert all(file.stat().st_size < 300_000 for name, file in files.items() if name.endswith(".png"))
        text = files["hover.html"].read_text()
        assert text.count("plotly.js v") == 1
        assert "<script src=" not in text

    def test_its_block_events_add_up_to_its_step_log(self, pressed: Path) -> None:
        record, told = read_run(pressed), read_run(pressed).blocks()
        assert told is not None
        steps = record.steps()
        found = blocks.stretches(told, len(steps))
        for each in steps[:-1]:
            if each.batch_seqs:
                alive = (found.start <= each.index) & (found.end > each.index)
                held = alive & (found.holder != blocks.CACHED)
                assert held.sum() == memory(each).blocks_in_use, each.index
        assert set(told.sequence.tolist()) <= set(range(-1, len(record.requests())))
        assert (found.holder == blocks.SHARED).any()
        assert (found.holder == blocks.CACHED).any()
        assert not (found.holder == blocks.UNKNOWN).any()

    def test_knows_when_each_sequence_was_preempted_and_came_back(self, pressed: Path) -> None:
        records = read_run(pressed).requests()
        for each in records:
            assert all(gone < back for gone, back in zip(each.preempted_s, each.resumed_s, strict=True))
        assert any(each.preempted_s for each in records)

    def test_its_trace_is_in_the_trace_event_format(self, pressed: Path) -> None:
        trace = json.loads((pressed / "trace.json").read_text())
        assert set(trace) == {"displayTimeUnit", "traceEvents"}
        open_: dict[int, list[str]] = {}
        for event in trace["traceEvents"]:
            assert {"name", "ph", "pid"} <= event.keys()
            assert event["ph"] in "XCMbe"
            if event["ph"] != "M":
                assert event["ts"] >= 0
            if event["ph"] == "X":
                assert event["dur"] >= 0
                assert "tid" in event
            elif event["ph"] == "C":
                assert all(isinstance(value, int) for value in event["args"].values())
            elif event["ph"] == "b":
                open_.setdefault(event["id"], []).append(event["name"])
            elif event["ph"] == "e":
                assert open_[event["id"]].pop() == event["name"]
        assert len(open_) == 4
        assert not any(open_.values())
        steps = read_run(pressed).steps()
        shown = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
        assert len(shown) == sum(each.batch_seqs > 0 for each in steps)
        ends = {round(each["ts"] + each["dur"], 3) for each in shown}
        for part in (event for event in trace["traceEvents"] if event["name"] == "execution"):
            assert round(part["ts"] + part["dur"], 3) in ends
        assert {"scheduling", "execution", "preempted"} <= {event["name"] for event in trace["traceEvents"]}

    def test_runs_together_have_pictures_too(self, pressed: Path) -> None:
        record = read_run(pressed)
        other = dataclasses.replace(record, config={**record.config, "kv.num_blocks": 12})
        assert set(figures.sweep_figures([record, other])) == {"throughput", "pareto", "capacity"}
        longer = dataclasses.replace(other, config={**other.config, "kv.block_size": 16})
        names = {"throughput", "sequences", "pareto", "capacity"}
        assert set(figures.sweep_figures([record, other, longer])) == names
        assert figures.sweep_figures([record]) == {}
        html = page("two", figures.interactive_sweep([record, other]).values())
        assert html.count("plotly.js v") == 1

    def test_a_point_of_a_sweep_draws_no_page(self, pressed: Path, tmp_path: Path) -> None:
        files = figures.save_run_figures(read_run(pressed), tmp_path, hover=False)
        assert {file.suffix for file in files} == {".png"}

    def test_without_figures_it_leaves_none(self, tmp_path: Path) -> None:
        run(tmp_path, "figures=false")
        assert not {"figures", "blocks.parquet", "trace.json"} & {file.name for file in tmp_path.iterdir()}

    def test_a_picture_that_cannot_be_drawn_is_one_warning(self, tmp_path: Path) -> None:
        said = Console(record=True, width=300)
        (tmp_path / "summary.json").write_text("{}")
        (tmp_path / "steps.parquet").write_text("no table")
        draw_figures(tmp_path, said, hover=True)
        text = said.export_text()
        assert text.startswith("warning: the run's figures could not be drawn")
        assert len(text.strip().splitlines()) == 1


def test_a_trace_of_more_requests_than_it_shows_has_so_many_tracks() -> None:
    told = list(trace_events("x", [step(0)], [request() for _ in range(1500)]))
    assert len({event["id"] for event in told if event["ph"] == "b"}) == 1000


def test_one_repeat_far_from_the_others_does_not_squeeze_the_bars(recwarn: pytest.WarningsRecorder) -> None:
    values = {"static": [100.0, 101.0, 5000.0], "continuous": [200.0, 205.0, 260.0]}
    points = [Point({"policy": name}, {THROUGHPUT: value}) for name, found in values.items() for value in found]
    figure = metric_figure(points)
    assert png(figure)
    assert not [str(warning.message) for warning in recwarn if "layout" in str(warning.message)]
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 400
    assert axes.get_window_extent().width > figure.bbox.width / 2
    assert "101 (a repeat: 5,000)" in [text.get_text().strip() for text in axes.texts]


def test_a_choice_stands_for_all_that_it_decides(pressed: Path) -> None:
    record = dataclasses.replace(read_run(pressed), choices={"workload": "burst16"})
    settings = {"workload.name": "mixed32", "workload.arrival": "uniform", "workload.rate": 4.0}
    other = dataclasses.replace(record, config={**record.config, **settings}, choices={"workload": "mixed32"})
    assert [list(point.config) for point in sweep_points([record, other])] == [["workload"]] * 2


def test_a_metric_that_was_asked_for_is_drawn(pressed: Path) -> None:
    record = read_run(pressed)
    other = dataclasses.replace(record, config={**record.config, "kv.num_blocks": 12})
    drawn = figures.sweep_figures([record, other], ["kv/internal_fragmentation_mean", THROUGHPUT])
    (axes,) = drawn["kv_internal_fragmentation_mean"].axes
    assert axes.get_ylabel() == "unused part of blocks in use, %"


def test_a_run_calls_its_blocks_what_its_pool_does(pressed: Path) -> None:
    record = read_run(pressed)
    slots = dataclasses.replace(record, config={**record.config, "kv.backend": "contiguous"})
    for shown, unit in ((record, "block"), (slots, "slot"), (dataclasses.replace(record, config={}), "block")):
        drawn = figures.run_figures(shown)
        assert drawn["memory"].axes[0].get_ylabel() == f"{unit}s"
        assert drawn["pool_map"].axes[0].get_ylabel() == f"{unit} of the pool"


def test_a_run_of_an_engine_without_blocks_has_the_other_figures(pressed: Path, tmp_path: Path) -> None:
    for name in ("summary.json", "requests.parquet"):
        (tmp_path / name).write_bytes((pressed / name).read_bytes())
    steps = [dataclasses.replace(each, pool=None, counters=None) for each in read_run(pressed).steps()]
    pq.write_table(pa.Table.from_pylist([step_row(each) for each in steps]), tmp_path / "steps.parquet")
    files = figures.save_run_figures(read_run(tmp_path))
    assert {file.name for file in files} == {"timeline.png", "latency.png", "hover.html"}
    assert "There is no memory: its steps have no blocks." in files[-1].read_text()
    assert set(figures.sweep_figures([read_run(pressed), read_run(tmp_path)])) >= {"throughput", "capacity"}


def test_of_latencies_the_least_is_named_and_of_rates_the_most() -> None:
    points = [
        Point({"a": a, "b": b}, {"latency/ttft_ms_p50": 1.0 * a * b, THROUGHPUT: 1.0 * a * b})
        for a in (1, 2)
        for b in (3, 4)
    ]
    notes = [
        metric_figure(points, name).axes[0].texts[-1].get_text() for name in ("latency/ttft_ms_p50", THROUGHPUT)
    ]
    assert notes == ["least: 3 at a=1, b=3", "most: 8 at a=2, b=4"]
