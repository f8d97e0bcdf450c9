"""What a sweep plans, says and keeps, in this process: the command's main with its arguments."""

from __future__ import annotations

import gc
import io
import json
import re
import signal
import weakref
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvlab.config import KVConfig, ModelConfig, RunConfig, TrackingConfig, WorkloadConfig
from kvlab.lab.campaigns.sweep import history
from kvlab.lab.campaigns.sweep.plan import read_plan
from kvlab.lab.campaigns.sweep.results import best, medians, status_of
from kvlab.lab.results import provenance
from kvlab.lab.results.provenance import config_digest, sweep_digest
from kvlab.lab.run import execute, serve
from kvlab.lab.terminal import Terminal
from kvlab.lab.tracking import open_store
from kvlab.lab.tracking.process import is_alive, this_process
from kvlab.lab.tracking.search import TrackedRun
from tests.support.commands import Lab
from tests.support.plans import compose_run
from tests.support.runs import context_of

OTHERS = f"warning: results of kvlab {version('kvlab')} are kept, and this is 9.9, which may compute others\n"


@pytest.fixture
def bare(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab.with_store(tmp_path)


def config(**changes: object) -> RunConfig:
    base = {"model": ModelConfig(name="m"), "workload": WorkloadConfig(name="w")}
    return RunConfig(**{**base, **changes})  # type: ignore[arg-type]


# The digest


def test_the_digest_leaves_out_what_measures_nothing() -> None:
    same = config(
        tracking=TrackingConfig(uri="sqlite:///x.db", experiment="other"),
        run_name="mine",
        tags={"who": "me"},
        optimize="duration_s",
        resume=True,
        repeats=3,
    )
    assert config_digest(same) == config_digest(config())
    assert config_digest(config(kv=KVConfig(block_size=32))) != config_digest(config())
    assert config_digest(config(seed=1)) != config_digest(config())


def test_repeats_have_digests_of_their_own_and_one_in_common() -> None:
    first, second = config(), config(repeat=1)
    assert config_digest(first) != config_digest(second)
    assert config_digest(first, any_repeat=True) == config_digest(second, any_repeat=True)


def test_a_workload_file_counts_with_its_content(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    digests = []
    for text in ("a", "b", "a"):
        file.write_text(text)
        digests.append(config_digest(config(workload=WorkloadConfig(name="w", source="jsonl", path=str(file)))))
    assert digests[0] == digests[2] != digests[1]


def test_the_digest_of_a_sweep_is_that_of_its_points_in_any_order() -> None:
    assert sweep_digest(["a", "b"]) == sweep_digest(["b", "a"]) != sweep_digest(["a", "b", "b"])


def test_a_process_is_known_by_host_number_and_start() -> None:
    here = this_process()
    host, pid, start = here.rsplit(":", 2)
    assert is_alive(here) is True
    assert is_alive(f"{host}:{pid}:{float(start) - 1000:.0f}") is False  # its number was given again
    assert is_alive(f"elsewhere:{pid}:{start}") is None
    assert is_alive(None) is None


# Results


def result(name: str, status: str = "finished", **metrics: float) -> dict[str, object]:
    return {"name": name, "group": name[0], "status": status, "error": None, "metrics": metrics, "settings": {}}


def test_the_best_is_the_least_latency_and_the_most_throughput_by_the_median_of_its_repeats() -> None:
    # One lucky repeat of b does not make it the best.
    rows = [result(name, duration_s=value) for name, value in (("a1", 2.0), ("a2", 2.0), ("a3", 9.0))]
    rows += [result(name, duration_s=value) for name, value in (("b1", 1.0), ("b2", 3.0), ("b3", 3.0))]
    assert best(rows, "duration_s") == "duration_s = 2 (a)"
    rows = [
        result("a1", "finished", **{"throughput/output_tokens_per_s": 1.0}),
        result("b1", "finished", **{"throughput/output_tokens_per_s": 2.0}),
    ]
    assert best(rows, None) == "throughput/output_tokens_per_s = 2 (b)"
    assert best(rows, "latency/ttft_ms_p50") is None


def test_a_point_is_as_bad_as_its_worst_repeat_and_has_the_figures_of_those_that_finished() -> None:
    (row,) = medians([result("a1", x=1.0), result("a2", "failed"), result("a3", x=3.0)])
    assert (row["status"], row["metrics"]) == ("failed", {"x": 2.0})


def test_what_does_not_fit_is_no_failure() -> None:
    assert status_of([result("a"), result("b", "out_of_memory")]) == "finished"
    assert status_of([result("a"), result("b", "failed")]) == "failed"
    assert status_of([result("a", "failed"), result("b", "interrupted")]) == "interrupted"


# The command


@pytest.mark.slow
def test_repeats_take_turns_and_are_tagged(lab: Lab) -> None:
    ended = lab.here("-m", "kv.num_blocks=8,9", "repeats=2", "optimize=latency/e2el_ms_p50")
    assert ended.code == 0, ended.output
    assert "2 points, 2 times each: 4 jobs, time unknown until the first is done" in ended.output
    assert "job 3 of 4: kv.num_blocks=8 repeat=1" in ended.output
    assert re.search(r"2 of 4 jobs done, best so far latency/e2el_ms_p50 = .*, about \d+:\d\d left", ended.output)
    plan = read_plan(lab.base / "out")
    assert plan is not None
    assert [point.name for point in plan.points] == [
        f"kv.num_blocks={blocks} repeat={repeat}" for repeat in (0, 1) for blocks in (8, 9)
    ]
    children = lab.children()
    assert sorted(run.tags["kvlab.repeat"] for run in children) == ["0", "0", "1", "1"]
    assert len({run.tags["kvlab.config_digest"] for run in children}) == 4
    summaries = [json.loads(file.read_text()) for file in (lab.base / "out").glob("*/summary.json")]
    assert {s["config_digest"] for s in summaries} == {run.tags["kvlab.config_digest"] for run in children}
    assert len({s["workload_digest"] for s in summaries}) == 1  # the same requests each time


@pytest.mark.slow
def test_what_is_done_is_taken_over_wherever_it_ran(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab.here("kv.num_blocks=8", directory="single").code == 0
    first = lab.here("-m", "kv.num_blocks=8,9", "resume=true", directory="first")
    assert "1 run done before: 1 job, about 0:0" in first.output
    assert OTHERS not in first.output
    monkeypatch.setattr(provenance, "version", lambda name: "9.9")
    again = lab.here("-m", "kv.num_blocks=8,9", "resume=true", directory="again")
    assert again.code == 0
    assert OTHERS in again.output
    assert "2 runs done before: 0 jobs" in again.output
    assert "2 runs: 2 finished; 2 of them done before" in again.output
    assert len([run for run in lab.runs() if run.finished and run.tags.get("kvlab.kind") != "sweep"]) == 2
    (parent,) = lab.parents()  # the second continued the first
    (single,) = (run for run in lab.runs() if "mlflow.parentRunId" not in run.tags and run.run_id != parent.run_id)
    assert parent.tags["kvlab.done_before"] == single.run_id
    assert parent.state == "FINISHED"
    done = lab.here("kv.num_blocks=8", "resume=true", directory="none")
    assert (done.code, f"done before: run {single.run_id}" in done.output) == (0, True)
    assert OTHERS in done.output


@pytest.mark.slow
def test_a_sweep_goes_on_behind_a_point_that_fails_and_says_so_at_the_end(lab: Lab) -> None:
    # Every pass fails, so no request of that point completes; the last one contradicts itself.
    ended = lab.here(
        "-m",
        "debug=faults",
        "debug.faults.kind=forward",
        "debug.faults.rate=0,1",
        "scheduler.max_batched_tokens=512,8",
    )
    assert ended.code == 1, ended.output
    assert "Traceback" not in ended.output
    assert "4 runs: 1 finished, 3 failed" in ended.output
    assert "scheduler.max_batched_tokens=8: failed: scheduler.max_batched_tokens=8: is less than" in ended.output
    assert [run.state for run in lab.parents()] == ["FAILED"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_runs_ends_the_sweep(
    bare: Lab, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvlab.lab.campaigns.sweep.status.SweepProgress.report", lambda _: signal.raise_signal(number)
    )
    ended = bare.here("-m", "kv.num_blocks=8,9,10", "tracking=off")
    assert ended.code == 130, ended.output
    assert "3 runs: 1 finished, 2 interrupted or not run" in ended.output
    assert "Traceback" not in ended.output
    assert not (bare.base / "out" / "1").exists()


def test_two_sweeps_in_one_process_share_nothing(lab: Lab) -> None:
    handler = signal.getsignal(signal.SIGINT)
    first = lab.here("-m", "kv.num_blocks=8,9", "tracking=off", directory="first")
    second = lab.here("-m", "kv.num_blocks=1", "seed=0,1", "tracking=off", directory="second")
    assert (first.code, second.code) == (0, 0)
    assert "2 runs: 2 finished" in first.output
    assert "2 runs: 2 did not fit in memory" in second.output
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_run_that_the_store_did_not_take_is_in_the_exit_code_of_its_sweep(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlab.errors import TrackingError
    from kvlab.lab.tracking import MlflowTracker

    def refuse(*_: object) -> None:
        raise TrackingError("the store is full")

    monkeypatch.setattr(MlflowTracker, "log_series", refuse)
    ended = lab.here("-m", "kv.num_blocks=8,9")
    assert ended.code == 1, ended.output
    assert "2 runs: 2 finished" in ended.output
    assert [run.state for run in lab.parents()] == ["FINISHED"]


def test_optimize_that_no_run_has_lists_what_there_is(lab: Lab) -> None:
    ended = lab.here("-m", "kv.num_blocks=8,9", "tracking=off", "optimize=throughput/outputs")
    assert ended.code == 1
    assert "error: optimize=throughput/outputs: no run has it; there are: capacity/kv_bytes" in ended.output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["-m", "repeats=1,2"], "repeats=1,2: is one for a whole sweep"),
        (["repeats=2", "repeat=1"], "repeat=1: repeats=2 counts them itself"),
        (["repeats=0"], "repeats=0: must be a number, at least 1"),
        (["-m", "hydra.sweeper.within_s=-1"], "hydra.sweeper.within_s=-1: must be more than 0 seconds; null sets"),
        (["-m", "hydra.sweeper.within_s=nan"], "hydra.sweeper.within_s=nan: must be more than 0"),
        (["-m", "kv.num_blocks=interval(1,9)"], "kv.num_blocks=interval(1,9): has no end of values"),
        (["-m", "hydra/sweeper=basic", "kv.num_blocks=8,9"], "hydra/sweeper=basic: a sweep needs kvlab's own"),
        (["-m", "hydra/launcher=joblib", "kv.num_blocks=8,9"], "pip install 'hydra-joblib-launcher"),
        (["-m", "hydra/launcher=submitit_slurm", "kv.num_blocks=8,9"], "pip install 'hydra-submitit-launcher"),
        (["-m", "hydra/launcher=ray", "kv.num_blocks=8,9"], "pip install 'ray"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_a_sentence(
    bare: Lab, overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlab.cli.launchers.find_spec", lambda name: None)
    ended = bare.here(*overrides)
    assert ended.code == 2, ended.output
    assert ended.output.startswith("error: ")
    assert words in ended.output
    assert len(ended.output.splitlines()) == 1
    assert not bare.base.joinpath("store.db").exists()


def test_what_replaces_the_values_that_a_file_sweeps_is_said(bare: Lab) -> None:
    ended = bare.here("sweep=block_size", "kv.block_size=32", "kv.memory=1MiB", "dry_run=true")
    said = "warning: sweep=block_size sweeps kv.block_size=1,8,16,32,64,128,256; kv.block_size=32 of the command "
    assert ended.output.startswith(f"{said}line replaces that\nerror: dry_run=true: ")  # and nothing of kv.memory


@pytest.mark.parametrize(
    ("ended", "closed"),
    [
        ("sweep:1:1", {"own", "lost", "elsewhere"}),  # the sweep is over: whatever it was
        (None, {"lost"}),  # a search that others may be at work on
    ],
)
def test_runs_of_lost_workers_are_closed_beside_one_that_is_still_at_work(
    ended: str | None, closed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = {"sweep:1:1": True, "worker:2:1": True, "worker:3:1": False}
    monkeypatch.setattr(history, "is_alive", alive.get)
    marked: list[str] = []
    monkeypatch.setattr(history, "mark_interrupted", lambda _store, run_id, _why: marked.append(run_id))
    runs = {"own": "sweep:1:1", "at work": "worker:2:1", "lost": "worker:3:1", "elsewhere": "other:4:1"}
    children = [
        TrackedRun(name, name, "RUNNING", None, {}, {}, tags={"kvlab.process": process})
        for name, process in runs.items()
    ]
    looked_up = history.History(store=None, tracking=TrackingConfig())  # type: ignore[arg-type]
    monkeypatch.setattr(history.History, "_children", lambda *_: children)
    assert looked_up.close_open_runs(children[0], exclusive=False, ended=ended) == len(closed)
    assert set(marked) == closed


@pytest.mark.slow
def test_a_sweep_that_still_runs_is_not_resumed(lab: Lab) -> None:
    assert lab.here("-m", "kv.num_blocks=8,9").code == 0
    # As if the sweep were still open: this process is alive.
    (parent,) = lab.parents()
    store = open_store(TrackingConfig(uri=lab.uri), lab.base)
    store.call("update_run", parent.run_id, status="RUNNING")
    ended = lab.here("-m", "kv.num_blocks=8,9", "resume=true")
    assert ended.code == 2
    assert "resume=true: 'sweep kv.num_blocks' of this sweep is still running, as process" in ended.output
    store.call("set_tag", parent.run_id, "kvlab.process", "elsewhere:12:1")
    ended = lab.here("-m", "kv.num_blocks=8,9", "resume=true", directory="again")
    assert ended.code == 0
    assert "'sweep kv.num_blocks' was left running on another machine, elsewhere, as process 12" in ended.output


def test_a_point_leaves_no_engine_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next point, or another engine, needs its memory."""
    config = compose_run(
        "model=qwen3_tiny", "kv.num_blocks=64", "workload.num_requests=2", "tracking=off", "figures=false"
    )
    start, engines = serve.start_engine, list[weakref.ref[object]]()

    def started(*args: Any) -> object:
        engines.append(weakref.ref(engine := start(*args)))
        return engine

    monkeypatch.setattr(execute, "start_engine", started)
    gc.disable()
    try:
        execute.execute(replace(context_of(config, tmp_path, Terminal(file=io.StringIO())), in_sweep=True))
    finally:
        gc.enable()
    assert [engine() for engine in engines] == [None]
