"""Figures can be drawn of anything that a run may leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvlab.core import RequestRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineSeries
from kvlab.lab.capacity import CapacityCurve
from kvlab.lab.figures import left_out, run_figures
from kvlab.lab.figures.blocks import GridSize
from kvlab.lab.figures.capacity_curve import MeasuredCapacity, draw_capacity
from kvlab.lab.figures.fleet import fleet_figure
from kvlab.lab.figures.interactive import heat_map_hover, pareto_hover, pool_map_hover, timeline_hover
from kvlab.lab.figures.latency import latency_figure
from kvlab.lab.figures.memory import memory_figure, told_columns, told_memory_figure
from kvlab.lab.figures.metric_charts import metric_figure
from kvlab.lab.figures.pareto import pareto_figure
from kvlab.lab.figures.points import THROUGHPUT, Point, Points
from kvlab.lab.figures.pool_map import PICTURE, pool_map_figure, run_grids
from kvlab.lab.figures.timeline import timeline_figure
from kvlab.lab.results.columns import series_table
from kvlab.lab.results.records import RunRecord
from kvlab.lab.run.trace import trace_events
from kvlab.run_files import SERIES
from tests.support.drawn import A, events, png, request, step


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

    def test_a_replica_that_died_has_nothing_until_it_is_back(self) -> None:
        held = {"blocks_in_use": 3, "waiting": 2}
        steps = [step(0, **held), step(1, replica=1, **held), step(8, replica=1, **held), step(9, **held)]
        figure = fleet_figure(StepLog.of(steps), 2, deaths=[(4.0, 1)])
        maps = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
        for drawn, value in zip(maps, (75, 2), strict=True):
            columns = drawn[1].reshape(10, -1).mean(axis=1)  # of a second each
            assert np.allclose(columns, [0, value, value, value, 0, 0, 0, 0, value, value])

    def test_what_replicas_pulled_is_not_called_found(self) -> None:
        steps = StepLog.of([step(0), step(1, replica=1)])
        said = [
            [axes.get_title(loc="left") for axes in fleet_figure(steps, 2, is_split=split).axes]
            for split in (True, False)
        ]
        assert "found or pulled,\n% of prompts" in said[0]
        assert "found in the\nprefix cache, %" in said[1]

    def test_memory_without_a_step_with_one_and_with_many(self) -> None:
        many = [step(n, blocks_in_use=n % 4, tokens_in_use=n, running=1, waiting=n) for n in range(5000)]
        for steps in ([], self.STEPS[:1], self.STEPS, many):
            assert png(memory_figure(steps))
        assert "slot" in memory_figure(self.STEPS, unit="slot").axes[0].get_title(loc="left")

    def test_a_pool_of_which_little_is_used_is_drawn_as_far_as_it_is(self) -> None:
        """As of a trace of few requests on a large device."""
        recorded = events(*((n % 2, A, n, n // 50) for n in range(100)))
        for blocks, is_far in ((10_000, True), (400, False)):
            steps = [step(n, blocks_total=blocks, blocks_in_use=40, tokens_in_use=9) for n in range(2)]
            above, (pool_map,) = (
                memory_figure(steps).axes[0],
                pool_map_figure(*run_grids(recorded, StepLog(steps), [PICTURE])).axes,
            )
            names = [line.get_label() for line in above.lines]
            assert (above.get_ylim()[1] < 50, "capacity" in names) == (is_far, not is_far)
            assert pool_map.get_ylim() == ((100, 0) if is_far else (400, 0))
            used = fleet_figure(StepLog.of(steps), 1).axes[0]
            assert used.images[0].get_clim() == pytest.approx((0, 0.4 if is_far else 100))
            assert used.get_title(loc="left").startswith("At most 0.4 %" if is_far else "At most 10 %")
            titles = [axes.get_title(loc="left") for axes in (above, pool_map)]
            assert titles[0].startswith(
                "At most 0.4 % of 10,000 blocks" if is_far else "At most 10 % of 400 blocks"
            )
            assert titles[1].startswith("100 of 10,000 blocks of the pool" if is_far else "400 blocks of the pool")

    @pytest.mark.parametrize(
        ("columns", "panels"),
        [
            ({"running": [0, 2, 1]}, ["sequences"]),
            ({"kv_usage": [0.0, 0.5, 0.25], "preemptions": [3, 3, 5]}, ["% of the KV cache"]),
            (
                {
                    "kv_usage": [0, 0.5, 0],
                    "waiting": [1, 0, 0],
                    "prefix_queries": [7, 9, 9],
                    "prefix_hits": [0, 1, 1],
                },
                ["% of the KV cache", "sequences", "tokens"],
            ),
            ({"running": [0, 2, 1], "prefix_queries": [7, 7, 7], "prefix_hits": [1, 1, 1]}, ["sequences"]),
        ],
    )
    def test_what_an_engine_told_of_its_memory(self, columns: dict[str, list[float]], panels: list[str]) -> None:
        figure = told_memory_figure(EngineSeries([0.0, 0.5, 1.0], columns))
        assert [axes.get_ylabel() for axes in figure.axes] == panels
        heading = "At most 50 % of the KV cache in use" if "kv_usage" in columns else "The engine's sequences"
        assert figure.axes[0].get_title(loc="left").strip() == heading
        assert png(figure)

    def test_a_run_of_an_engine_that_told_of_its_memory_has_a_figure_of_it(self, tmp_path: Path) -> None:
        run = RunRecord("", None, "finished", None, {}, {}, {}, {}, tmp_path)
        assert "memory" in left_out(run)
        pq.write_table(series_table(EngineSeries([0.0, 0.5], {"kv_usage": [0.0, 0.25]})), tmp_path / SERIES)
        told = RunRecord("", None, "finished", None, {}, {}, {}, {}, tmp_path)
        assert "memory" not in left_out(told)
        heading = run_figures(told)["memory"].axes[0].get_title(loc="left").strip()
        assert heading == "At most 25 % of the KV cache in use"

    def test_preemptions_that_an_engine_told_are_marked_where_they_were_first_seen(self) -> None:
        series = EngineSeries(
            [0.0, 0.5, 1.0], {"running": [1, 2, 2], "waiting": [0, 0, 1], "preemptions": [4, 4, 6]}
        )
        (axes,) = told_memory_figure(series).axes
        marks = {str(line.get_label()): line.get_xdata() for line in axes.lines}
        assert list(marks) == ["waiting", "running", "preemption (2 in all)"]
        assert list(np.asarray(marks["preemption (2 in all)"])) == [1.0, 1.0]

    def test_an_engine_that_told_counters_alone_has_no_figure_of_memory(self) -> None:
        assert told_columns(EngineSeries([0.0], {"preemptions": [1]})) == {}
        assert told_columns(EngineSeries()) == {}

    def test_a_map_says_what_it_cannot_show(self) -> None:
        (axes,) = pool_map_figure(None).axes
        assert axes.texts

    def test_a_map_of_ten_thousand_blocks(self) -> None:
        recorded = events(*((n % 2, A, n, n // 50) for n in range(10_000)))
        steps = [step(each.index, blocks_total=10_000) for each in self.STEPS]
        picture, page = run_grids(recorded, StepLog(steps), [PICTURE, GridSize(200, 320)])
        assert png(pool_map_figure(picture))
        assert len(pool_map_hover(page, []).to_json()) < 3_000_000

    def test_sweeps_of_two_amounts_of_one_and_of_names(self) -> None:
        two = [Point({"a": a, "b": b}, {THROUGHPUT: 1.0 * a * b}) for a in (1, 2) for b in (3, 4)]
        one = [Point({"a": a}, {THROUGHPUT: 1.0 * a}, "failed" if a == 16 else "finished") for a in (1, 1, 4, 16)]
        names = [Point({"order": name}, {THROUGHPUT: 5.0}) for name in ("fcfs", "priority")]
        failed = [Point({"a": a, "b": b}, {}, "failed") for a in (1, 2) for b in (3, 4)]
        for points, images in ((two, 1), (one, 0), (names, 0), (failed, 1), (one[:2], 0)):
            figure = metric_figure(Points(points))
            assert png(figure)
            assert len(figure.axes[0].images) == images
        assert heat_map_hover(Points(two).grid(("a", "b"), THROUGHPUT)).to_json()

    @pytest.mark.parametrize(("key", "said"), [("kv.eviction", False), ("workload", True), ("workload.rate", True)])
    def test_a_front_over_points_of_other_work_says_so(self, key: str, said: bool) -> None:
        points = [Point({key: n}, {"latency/tpot_ms_p50": 1.0 * n, THROUGHPUT: 9.0 * n}) for n in (1, 2)]
        texts = [text.get_text() for text in pareto_figure(Points(points)).axes[0].texts]
        assert any(f"those of another {key} do other work" in text for text in texts) == said

    def test_a_front_and_capacity_with_and_without_points(self) -> None:
        points = [Point({"a": a}, {"latency/tpot_ms_p50": 1.0 * a, THROUGHPUT: 9.0 * a}) for a in (1, 2, 3)]
        for some in ([], points):
            assert png(pareto_figure(Points(some)))
            assert pareto_hover(Points(some)).to_json()
        curves = [CapacityCurve(name, (256, 512), (8, 4)) for name in ("contiguous", "paged", "mine")]
        measured = [MeasuredCapacity(name, name, 300, 6) for name in ("paged", "elsewhere")]
        measured.append(MeasuredCapacity("paged", "paged_unshared", 400, 5))
        assert png(draw_capacity(curves, [], "planned"))
        (axes,) = draw_capacity(curves, measured, "both").axes
        drawn = {line.get_label(): line for line in axes.lines}
        assert set(drawn) == {f"{name}, planned" for name in ("contiguous", "paged", "mine")} | {
            "paged, most in a run",
            "elsewhere, most in a run",
            "paged_unshared, most in a run",
        }
        marks = [drawn[f"{name}, most in a run"] for name in ("paged", "paged_unshared")]
        assert {mark.get_markerfacecolor() for mark in marks} == {drawn["paged, planned"].get_color()}
        assert len({mark.get_marker() for mark in marks}) == 2
        assert len({line.get_color() for line in drawn.values() if line.get_linestyle() != "None"}) == 3


def test_a_trace_of_more_requests_than_it_shows_has_so_many_tracks() -> None:
    recorded = list(trace_events("x", [step(0)], [request() for _ in range(1500)]))
    assert len({event["id"] for event in recorded if event["ph"] == "b"}) == 1000


def test_one_repeat_far_from_the_others_does_not_squeeze_the_bars(recwarn: pytest.WarningsRecorder) -> None:
    values = {"static": [100.0, 101.0, 5000.0], "continuous": [200.0, 205.0, 260.0]}
    points = [Point({"policy": name}, {THROUGHPUT: value}) for name, found in values.items() for value in found]
    figure = metric_figure(Points(points))
    assert png(figure)
    assert not [str(warning.message) for warning in recwarn if "layout" in str(warning.message)]
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 400
    assert axes.get_window_extent().width > figure.bbox.width / 2
    assert "101 (a repeat: 5,000)" in [text.get_text().strip() for text in axes.texts]


def test_of_latencies_the_least_is_named_and_of_rates_the_most() -> None:
    points = [
        Point({"a": a, "b": b}, {"latency/ttft_ms_p50": 1.0 * a * b, THROUGHPUT: 1.0 * a * b})
        for a in (1, 2)
        for b in (3, 4)
    ]
    notes = [
        metric_figure(Points(points), name).axes[0].texts[-1].get_text()
        for name in ("latency/ttft_ms_p50", THROUGHPUT)
    ]
    assert notes == ["least: 3 at a=1, b=3", "most: 8 at a=2, b=4"]
