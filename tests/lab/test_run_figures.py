"""The figures and the trace of a real run whose memory does not hold all that runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvlab.core.step_log import StepLog
from kvlab.lab import figures
from kvlab.lab.figures import blocks
from kvlab.lab.figures.arrival_rate import rate_figure
from kvlab.lab.figures.interactive import page
from kvlab.lab.figures.points import THROUGHPUT, Points
from kvlab.lab.figures.service_levels import service_level_figure
from kvlab.lab.results.columns import step_table
from kvlab.lab.results.records import RunRecord, read_run
from kvlab.lab.run.recording import draw_figures
from kvlab.lab.terminal import Terminal
from tests.lab.test_profile import run
from tests.support.drawn import png
from tests.support.records import memory


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
        record, recorded = read_run(pressed), read_run(pressed).blocks()
        assert recorded is not None
        steps = record.steps()
        found = blocks.stretches(recorded, len(steps))
        for each in steps[:-1]:
            if each.batch_seqs:
                alive = (found.start <= each.index) & (found.end > each.index)
                held = alive & (found.holder != blocks.CACHED)
                assert held.sum() == memory(each).blocks_in_use, each.index
        assert set(recorded.sequence.tolist()) <= set(range(-1, len(record.requests())))
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

    def test_service_levels_count_those_that_were_refused(self, pressed: Path) -> None:
        record = read_run(pressed)
        assert "service_levels" not in figures.run_figures(record)
        drawn = [service_level_figure(record.requests(), {"tpot": 3.6e6}, refused=count) for count in (0, 4)]
        titles = [figure.axes[0].get_title(loc="left") for figure in drawn]
        assert "100 % of 4 requests within tpot" in titles[0]
        assert "50 % of 8 requests" in titles[1]

    def test_over_the_arrival_rate_each_configuration_has_a_line(self, pressed: Path) -> None:
        record = read_run(pressed)

        def point(rate: float, kv: str, share: float, limit: float = 500.0) -> RunRecord:
            config = {**record.config, "workload.rate": rate, "kv.backend": kv, "slo.ttft_ms": limit}
            metrics = {**record.metrics, "slo/attainment": share, "slo/goodput_per_s": rate * share / 100}
            return dataclasses.replace(record, config=config, metrics=metrics, choices={})

        shares = {"contiguous": (100.0, 98.0, 20.0), "paged": (100.0, 100.0, 99.5)}
        points = [
            point(rate, kv, s) for kv, all_ in shares.items() for rate, s in zip((1, 2, 9), all_, strict=True)
        ]
        figure = figures.sweep_figures(points)["arrival_rate"]
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            "backend=contiguous: 99 % within the limits up to workload.rate=1",
            "backend=paged: 99 % within the limits at each rate",
        ]
        assert len(figure.axes) == 4
        marked = [text.get_text() for axes in figure.axes for text in axes.texts if axes.texts]
        assert [text for text in marked if "limit" in text] == ["limit 500"]
        assert png(figure)
        (one,) = rate_figure(points[:3]).legends  # type: ignore[union-attr]
        assert [text.get_text() for text in one.get_texts()] == ["99 % within the limits up to workload.rate=1"]
        assert rate_figure([point(1, "paged", 99.0), point(1, "contiguous", 99.0)]) is None

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

    def test_what_a_simulated_run_leaves_says_so(self, pressed: Path, tmp_path: Path) -> None:
        run(tmp_path, "executor=simulated", "hardware=l4", "kv.num_blocks=14")
        record, there = read_run(pressed), read_run(tmp_path)
        for file in (tmp_path / "trace.json", tmp_path / "figures/hover.html"):
            assert "simulated l4, timing roofline" in file.read_text(), file
        other = dataclasses.replace(there, config={**there.config, "kv.num_blocks": 12})
        for drawn in (figures.run_figures(there), figures.sweep_figures([there, other])):
            assert {figure.get_supxlabel() for figure in drawn.values()} == {"simulated l4, timing roofline"}
        assert {figure.get_supxlabel() for figure in figures.run_figures(record).values()} == {""}

    def test_what_runs_of_several_devices_leave_names_them_alone_and_cuts_nothing(self, pressed: Path) -> None:
        """Their limits go with the device, their caches are of several sizes, and the small print is long."""
        record = read_run(pressed)
        records = []
        for number, device in enumerate(("a100_sxm", "h100_sxm", "l40s"), 1):
            machine = f"simulated 2 x {device}, timing silicon (vllm 0.24.0 on {device})"
            config = {**record.config, "scheduler.max_batch_size": number, "model.max_seq_len": 2**16}
            metrics = {**record.metrics, "capacity/kv_bytes": number * record.metrics["capacity/kv_bytes"]}
            choices = {**record.choices, "hardware": device}
            facts = {**record.facts, "machine": machine}
            own = dataclasses.replace(record, config=config, metrics=metrics, choices=choices, facts=facts)
            records.append(own)
        assert [list(point.config) for point in Points.of(records)] == [["hardware"]] * 3
        drawn = figures.sweep_figures(records)
        lines = drawn["capacity"].get_supxlabel().splitlines()
        assert len(lines) == 2
        assert max(map(len, lines)) <= 150
        (axes,) = drawn["capacity"].axes
        assert "2 of 3 runs had another cache, and are not shown" in {text.get_text() for text in axes.texts}
        least = {str(line.get_label()): float(np.min(np.asarray(line.get_xdata()))) for line in axes.lines}
        assert least["paged, planned"] <= least["paged, most in a run"]

    def test_a_point_of_a_sweep_draws_no_page(self, pressed: Path) -> None:
        files = figures.save_run_figures(read_run(pressed), hover=False)
        assert {file.suffix for file in files} == {".png"}

    def test_without_figures_it_leaves_none(self, tmp_path: Path) -> None:
        run(tmp_path, "figures=false")
        assert not {"figures", "blocks.parquet", "trace.json"} & {file.name for file in tmp_path.iterdir()}

    def test_a_picture_that_cannot_be_drawn_is_one_warning(self, tmp_path: Path) -> None:
        said = Terminal(record=True, width=300)
        (tmp_path / "summary.json").write_text("{}")
        (tmp_path / "steps.parquet").write_text("no table")
        draw_figures(read_run(tmp_path), said, hover=True)
        text = said.export_text()
        assert text.startswith("warning: the run's figures could not be drawn")
        assert len(text.strip().splitlines()) == 1


def test_a_choice_stands_for_all_that_it_decides(pressed: Path) -> None:
    record = dataclasses.replace(read_run(pressed), choices={"workload": "burst16"})
    settings = {"workload.name": "mixed32", "workload.arrival": "uniform", "workload.rate": 4.0}
    other = dataclasses.replace(record, config={**record.config, **settings}, choices={"workload": "mixed32"})
    assert [list(point.config) for point in Points.of([record, other])] == [["workload"]] * 2


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
    pq.write_table(step_table(StepLog(steps)), tmp_path / "steps.parquet")
    files = figures.save_run_figures(read_run(tmp_path))
    assert {file.name for file in files} == {"timeline.png", "latency.png", "hover.html"}
    assert "There is no memory: its steps have no blocks." in files[-1].read_text()
    assert set(figures.sweep_figures([read_run(pressed), read_run(tmp_path)])) >= {"throughput", "capacity"}
