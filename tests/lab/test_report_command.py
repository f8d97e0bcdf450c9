"""kvlab report: where runs come from, exit codes, sentences for mistakes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvlab.cli import report as command
from kvlab.config import TrackingConfig
from kvlab.lab.tracking import RunStatus, start_run
from tests.support.recorded import CONFIG, THROUGHPUT, record_run, record_sweep
from tests.support.tracking import empty_store

POINTS = {"contiguous": {"kv__backend": "contiguous"}, "paged": {}}
RATES = {"contiguous": [100.0, 90.0, 95.0], "paged": [80.0, 72.5, 75.5]}


@pytest.fixture
def run_report(tmp_path, monkeypatch, capsys):
    """Runs the command in a temporary folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments), "figures=false"])
        code: Any = 0
        try:
            command.main()
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def test_a_sweep_reports_into_its_own_folder(run_report, tmp_path):
    record_sweep(tmp_path / "sweep", POINTS, RATES)
    code, out, _ = run_report(tmp_path / "sweep")
    assert code == 0
    assert "kv=paged is slower than kv=contiguous" in out
    assert (tmp_path / "sweep" / "report" / "report.html").is_file()
    assert (tmp_path / "sweep" / "report" / "report.md").is_file()


def test_sets_of_runs_joined_by_commas(run_report, tmp_path):
    runs = [record_run(tmp_path / str(n), 100 + n).directory for n in range(4)]
    code, out, _ = run_report(f"{runs[0]},{runs[1]}", f"{runs[2]},{runs[3]}", f"output={tmp_path / 'out'}")
    assert code == 0
    assert "2 and 1 more is " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: there is no such directory"),
        (["abcdef12"], "abcdef12: no run with this id is in outputs/ or multirun/; tracking.uri=sqlite:///"),
        (["filter=status = 'x'"], "tracking.uri=sqlite:///"),
        (["run", "fail_if=faster"], "fail_if=faster: is no condition"),
        (["run", "metric=speed"], "metric=speed: unknown; did you mean metrics?"),
        (["run", "other"], "not the same work: workload.num_requests differ"),
        (["run,"], "is empty"),
        (["by=kv"], "name runs"),
    ],
)
def test_a_mistake_is_one_sentence(run_report, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    record_run(tmp_path / "run")
    record_run(tmp_path / "other", workload__num_requests=7, facts={"workload_digest": "d1"})
    code, _, errors = run_report(*arguments)
    assert code == 2
    assert errors.startswith("error: ")
    assert said in errors
    assert "Traceback" not in errors


def test_ids_are_found_in_the_output_directories(run_report, tmp_path):
    for name in ("a", "b"):
        record_run(tmp_path / "outputs" / name, facts={"run_id": f"0123456{name}" + "0" * 24})
    code, out, _ = run_report("0123456a")
    assert code == 0
    assert "100.0 tok/s" in out
    code, _, errors = run_report("012345")
    assert code == 2
    assert "2 runs' ids begin so" in errors


@pytest.mark.slow
def test_runs_of_the_tracking_store(run_report, tmp_path):
    (tmp_path / "store.db").write_bytes(empty_store())
    config = TrackingConfig(uri=f"sqlite:///{tmp_path / 'store.db'}")
    uri = f"tracking.uri={config.uri}"
    sweep = start_run(config, root=tmp_path, run_name="sweep", params={}, tags={"kvlab.kind": "sweep"})
    ids = []
    for backend, rates in RATES.items():
        for repeat, rate in enumerate(rates):
            settings = CONFIG | {"kv.backend": backend, "repeat": repeat}
            run = start_run(
                config,
                root=tmp_path,
                run_name=backend,
                params=settings,
                tags={"choice.kv": backend, "x": "y", "workload.digest": "d0"},
                parent_run_id=sweep.run_id,
            )
            run.log_metrics({THROUGHPUT: rate})
            if repeat == 0:  # the others were killed before they had stored their files
                record_run(tmp_path / "files", rate, kv__backend=backend)
                run.log_artifacts(tmp_path / "files")
            run.finish(RunStatus.FINISHED)
            ids.append(run.run_id)
    sweep.finish(RunStatus.FINISHED)
    assert sweep.run_id is not None
    for argument in (sweep.run_id[:12], sweep.run_id, "filter=tags.x = 'y'"):
        code, out, errors = run_report(argument, uri)
        assert (code, errors) == (0, "")
        assert "kv=paged is slower than kv=contiguous" in out
        assert "3 pairs" in out
    code, out, _ = run_report(ids[0], ids[3], uri)
    assert code == 0
    assert "greedy outputs of kv=paged: equal for 2 requests" in out
    assert "no run of experiment kvlab" in run_report("filter=tags.x = 'z'", uri)[2]
    assert "tracking.uri=sqlite" in run_report("filter=nonsense", uri)[2]
    assert run_report("ffffff", uri)[0] == 2
