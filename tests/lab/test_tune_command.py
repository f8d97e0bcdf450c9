"""`kvlab tune` in this process, from its words to its files."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlab.cli.tune
from kvlab.cli.compose import compose_run
from kvlab.config import TrackingConfig
from kvlab.lab.campaigns.tune.space import BATCH, BLOCK, BLOCKS, TOKENS, check_fits
from kvlab.lab.run.execute import RunContext, RunResult
from kvlab.lab.tracking import RunStatus
from tests.support.commands import TINY, call
from tests.support.tracking import empty_store

MIB = 2**20
METRIC = "throughput/output_tokens_per_s"


def tune(*arguments: str) -> tuple[int, str]:
    ended = call(kvlab.cli.tune.main, "optimize=throughput/output_tokens_per_s", *arguments, *TINY)
    return ended.code, ended.output


def test_a_trial_that_raises_has_failed_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def execute(context: RunContext) -> RunResult:
        ran.append(context.name)
        if len(ran) == 2:
            raise ZeroDivisionError("division by zero")
        return RunResult(context.name, RunStatus.FINISHED, {METRIC: 5.0})

    monkeypatch.setattr("kvlab.lab.campaigns.tune.trials.execute", execute)
    code, output = tune("trials=3", f"output={tmp_path}", "memory=68MiB", "tracking=off")
    assert code == 0, output
    assert "2 of 3 trials: ZeroDivisionError: division by zero, best so far" in output
    assert "3 of 3 trials: 5" in output


@pytest.mark.slow
def test_the_best_within_a_budget_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlab.lab.tracking import open_store
    from kvlab.lab.tracking.search import find_runs

    (tmp_path / "store.db").write_bytes(empty_store())
    where = [f"output={tmp_path}", f"tracking.uri=sqlite:///{tmp_path / 'store.db'}", "memory=68MiB"]
    code, output = tune("trials=3", *where)
    assert code == 0, output
    assert "throughput/output_tokens_per_s within 68.0 MiB: 3 trials" in output
    (command,) = [line for line in output.splitlines() if line.startswith("kvlab run ")]
    chosen = dict(text.split("=", 1) for text in command.split() if text.startswith(("kv.", "scheduler.")))
    assert set(chosen) == {BATCH, BLOCKS, BLOCK, TOKENS}
    check_fits(compose_run([*TINY, *(f"{key}={value}" for key, value in chosen.items())]).config, 68 * MIB)
    (folder,) = tmp_path.glob("throughput-*/search")
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "tune.html").read_text()
    assert "Trial by trial" in page
    assert "<script src=" not in page  # it needs no network

    monkeypatch.setattr("kvlab.lab.results.provenance.version", lambda name: "9.9")
    code, output = tune("trials=4", *where)
    assert "4 trials, 3 done before" in output
    assert output.count(" are kept, and this is 9.9, which may compute others\n") == 1
    runs = find_runs(open_store(TrackingConfig(uri=f"sqlite:///{tmp_path / 'store.db'}"), tmp_path), "kvlab", "")
    (parent,) = [run for run in runs if run.tags.get("kvlab.kind") == "tune"]
    children = [run for run in runs if run.tags.get("mlflow.parentRunId") == parent.run_id]
    assert [run.finished for run in children] == [True] * 4
    assert parent.metrics["throughput/output_tokens_per_s"] == max(
        run.metrics["throughput/output_tokens_per_s"] for run in children
    )
