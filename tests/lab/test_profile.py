"""Where a step's time goes: parts add up, the trace nests, and the run is none the wiser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import kvlab.cli.roofline
import kvlab.lab.machine_rates
from kvlab.cli.recorded import find_run
from kvlab.config import RunConfig
from kvlab.lab.results.roofline import MachineRates
from kvlab.lab.run import trace
from kvlab.lab.run.execute import RunResult, execute
from kvlab.lab.run.profile import Part, ProfiledStep, Profiler, Span
from kvlab.lab.run.trace import trace_events
from kvlab.lab.terminal import Terminal
from tests.lab.test_metrics import step
from tests.support.plans import compose_run
from tests.support.runs import context_of

SETTINGS = (
    "model=qwen3_tiny",
    "tracking=off",
    "executor=cpu",
    "executor.dtype=float32",
    "executor.threads=1",
    "model.max_seq_len=64",
    "workload.num_requests=4",
    "workload.prompt_len={min: 9, max: 24}",
    "workload.output_len={min: 4, max: 8}",
)
RATES = MachineRates(read_bytes_per_s=1e9, flops_per_s=1e10)


@contextmanager
def known_machine() -> Iterator[None]:
    """The machine as if it had been measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvlab.lab.machine_rates, "known_rates", lambda _: RATES)
        yield


def run(directory: Path, *overrides: str) -> tuple[RunResult, str]:
    config: RunConfig = compose_run(*SETTINGS, *overrides)
    said = StringIO()
    with known_machine():
        return execute(context_of(config, directory, Terminal(file=said, width=200))), said.getvalue()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult, str]:
    directory = tmp_path_factory.mktemp("profiled")
    return directory, *run(directory, "debug=profile")


def test_parts_are_shares_of_the_whole(profiled: tuple[Path, RunResult, str]) -> None:
    _, result, said = profiled
    shares = [result.metrics[f"profile/{part}_share"] for part in Part]
    assert sum(shares) == pytest.approx(100)
    assert min(shares) > 0
    for part in Part:
        assert part in said


def test_the_trace_has_each_step_with_its_parts_within_it(profiled: tuple[Path, RunResult, str]) -> None:
    directory, result, _ = profiled
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    parts = [event for event in events if event.get("cat") == "part"]
    assert len(steps) == result.metrics["engine/steps"]
    layers = 2
    for each in steps:
        within = [
            p["name"]
            for p in parts
            if each["ts"] <= p["ts"] and p["ts"] + p["dur"] <= each["ts"] + each["dur"] + 0.01
        ]
        assert within.count("attention") == layers
        assert within.count("scheduling") == within.count("sampling") == 1
        assert within.count("linear") == 4 * layers + 1
    assert len(parts) == sum(
        len([p for p in parts if p["name"] == part]) for part in Part if part is not Part.OTHER
    )
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"sequences", "KV blocks"}


def test_a_profiled_run_produces_the_same_tokens(profiled: tuple[Path, RunResult, str], tmp_path: Path) -> None:
    directory, _, _ = profiled
    result, _ = run(tmp_path)
    assert not [name for name in result.metrics if name.startswith("profile/")]
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "execution" in names
    assert "attention" not in names
    first, second = (pq.read_table(d / "requests.parquet")["output_token_ids"] for d in (directory, tmp_path))
    assert first.to_pylist() == second.to_pylist()


def test_a_runs_roofline_is_found_in_its_files(
    profiled: tuple[Path, RunResult, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, result, _ = profiled
    share = result.metrics["efficiency/roofline_share"]
    assert share > 0
    monkeypatch.setattr(sys, "argv", ["roofline", f"run={directory}"])
    threads = torch.get_num_threads()
    with known_machine():
        kvlab.cli.roofline.main()
    torch.set_num_threads(threads)
    shown = re.search(
        rf"{share:.1f} % of the roofline; steps with prompts ([\d.]+) %, decode steps ([\d.]+) %",
        capsys.readouterr().out,
    )
    assert shown is not None
    prompts, decodes = map(float, shown.groups())
    assert min(prompts, decodes) - 0.1 <= share <= max(prompts, decodes) + 0.1
    assert prompts != decodes


@pytest.mark.parametrize(("crowded", "kept"), [(None, True), ("cores are shared", False)])
def test_rates_measured_beside_others_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], crowded: str | None, kept: bool
) -> None:
    measured: list[bool] = []

    def measuring(keep: bool) -> MachineRates:
        measured.append(keep)
        return RATES

    monkeypatch.setattr("kvlab.lab.machine.oversubscription", lambda threads, busy: crowded)
    monkeypatch.setattr(kvlab.lab.machine_rates, "known_rates", lambda dtype: None)
    monkeypatch.setattr(kvlab.lab.machine_rates, "measure", lambda dtype: measuring(False))
    monkeypatch.setattr(kvlab.lab.machine_rates, "measure_and_keep", lambda dtype: measuring(True))
    monkeypatch.setattr(sys, "argv", ["roofline"])
    kvlab.cli.roofline.main()
    assert measured == [kept] * len(kvlab.lab.machine_rates.measurable())  # float32, bfloat16, integers
    assert len(measured) > 1
    assert ("not kept: cores are shared" in capsys.readouterr().out) is not kept


def test_a_run_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # whose outputs/ and multirun/ it looks through
    monkeypatch.setattr(sys, "argv", ["roofline", "run=nowhere"])
    with pytest.raises(SystemExit):
        kvlab.cli.roofline.main()
    assert "run=nowhere: is no output directory" in capsys.readouterr().err


def test_a_simulated_run_has_no_roofline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", "figures=false")
    monkeypatch.setattr(sys, "argv", ["roofline", f"run={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        kvlab.cli.roofline.main()
    assert ended.value.code == 2
    assert f"run={tmp_path}: was simulated; name a run that computed" in capsys.readouterr().err


def test_a_run_is_found_by_its_id(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "summary.json").write_text(json.dumps({"run_id": f"id of {name}"}))
    assert find_run("id of b", tmp_path) == tmp_path / "outputs/b"


def test_a_run_on_a_busy_machine_says_so_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlab.lab.run.execute.oversubscription", lambda threads, busy: "cores are shared")
    monkeypatch.setattr(kvlab.lab.machine_rates, "known_rates", lambda dtype: None)
    measured = partial(pytest.fail, "measured beside others")
    monkeypatch.setattr(kvlab.lab.machine_rates, "measure_and_keep", lambda dtype: measured())
    config = compose_run(*SETTINGS, "figures=false")
    said = StringIO()
    result = execute(context_of(config, tmp_path, Terminal(file=said, width=200)))
    assert "warning: cores are shared" in said.getvalue()
    assert "efficiency/roofline_share" not in result.metrics


def profiled_step(start: float, *spans: Span) -> ProfiledStep:
    """Of 10 ms, the first of them for scheduling."""
    return ProfiledStep(step(start, start + 0.01, running=2), spans)


def test_what_no_part_took_is_other() -> None:
    spans = Span(Part.LINEAR, 0.002, 0.005), Span(Part.ATTENTION, 0.005, 0.006), Span(Part.LINEAR, 0.006, 0.007)
    seconds = profiled_step(0.0, *spans).seconds()
    assert seconds[Part.LINEAR] == pytest.approx(0.004)
    assert seconds[Part.ATTENTION] == pytest.approx(0.001)
    assert seconds[Part.SCHEDULING] == pytest.approx(0.001)
    assert seconds[Part.OTHER] == pytest.approx(0.004)
    assert seconds[Part.SAMPLING] == 0


def test_metrics_are_means_of_steps_and_shares_of_their_time() -> None:
    profiler = Profiler()
    assert profiler.metrics() == {}
    profiler.steps = [profiled_step(0.0, Span(Part.LINEAR, 0.002, 0.008)), profiled_step(0.1)]
    metrics = profiler.metrics()
    assert metrics["profile/linear_ms_mean"] == pytest.approx(3)
    assert metrics["profile/linear_share"] == pytest.approx(30)
    assert metrics["profile/scheduling_share"] == pytest.approx(10)
    assert metrics["profile/other_share"] == pytest.approx(60)


def test_spans_of_a_step_that_only_gave_memory_back_are_dropped() -> None:
    profiler = Profiler()
    assert profiler.measure(Part.LINEAR, sum, [1, 2]) == 3
    profiler.end_step(step(0, 1, running=0))
    profiler.end_step(step(1, 2))
    assert [each.spans for each in profiler.steps] == [()]


def test_a_long_trace_keeps_its_steps_and_leaves_parts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MAX_SLICES", 4)
    spans = [Span(Part.LINEAR, 0.002, 0.003)] * 2
    steps = [profiled_step(i, *spans) for i in range(3)]
    steps = [replace(each, record=replace(each.record, index=i)) for i, each in enumerate(steps)]
    events = trace_events("x", [each.record for each in steps], profiled=steps)
    slices = [event.get("cat") for event in events]
    assert slices.count("step") == 3
    assert slices.count("part") == 4


def test_replicas_have_threads_and_counters_of_their_own() -> None:
    """Their steps overlap, and slices of one thread have to nest."""
    first = profiled_step(0.0).record
    events = list(trace_events("x", [replace(first, replica=number) for number in range(3)]))
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {1: "replica 0", 2: "replica 1", 3: "replica 2"}
    assert [event["tid"] for event in events if event.get("cat") == "step"] == [1, 2, 3]
    assert [event["tid"] for event in events if event["name"] == "execution"] == [1, 2, 3]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {f"sequences, replica {number}" for number in range(3)} <= counters
    assert "sequences" not in counters
