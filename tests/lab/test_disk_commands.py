"""Commands on disks that are full, read-only or gone: what they print, and the exit code."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import kvlab.cli.advise
import kvlab.cli.report
import kvlab.cli.run
import kvlab.cli.tune
from kvlab.cli.output import lasting_output
from kvlab.lab.advise.adviser import Adviser
from kvlab.lab.files import claimed
from kvlab.lab.run import execute as execution
from tests.support.commands import TINY, Command, Lab, call
from tests.support.disk import disk, largest_file

FULL = "cannot be written: No space left on device; free some space there, or choose another directory"
TWO = ("-m", "kv.num_blocks=8,9", "tracking=off")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    return Lab(tmp_path)


def serving(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something when the requests of each run begin to be served."""
    serve: Any = vars(execution)["serve"]

    def act_and_serve(*arguments: Any) -> Any:
        act()
        return serve(*arguments)

    monkeypatch.setattr(execution, "serve", act_and_serve)


def is_told(ended: Command, *texts: str) -> None:
    assert "Traceback" not in ended.output
    for text in texts:
        assert text in ended.output, ended.output


class TestARun:
    def test_whose_summary_cannot_be_written_prints_its_table_and_ends_with_1(self, lab: Lab) -> None:
        with disk(lab.base / "out", match="summary.json"):
            ended = lab.here("tracking=off")
        assert ended.code == 1
        is_told(ended, f"warning: {lab.base}/out/summary.json: {FULL}", "output tokens", "tok/s")
        left = sorted(file.name for file in ended.directory.iterdir())
        assert left == ["config.yaml", "requests.parquet", "steps.parquet"]

    def test_without_a_place_for_its_files_is_not_started(self, lab: Lab) -> None:
        with disk(lab.base / "out", 1, onwards=True):
            ended = lab.here("tracking=off")
        assert ended.code == 2
        is_told(ended, f"error: hydra.run.dir={lab.base}/out: {FULL}")
        assert "tok/s" not in ended.output

    def test_whose_output_cannot_be_printed_is_served_and_written(self, lab: Lab) -> None:
        """Really: its standard output is a full disk."""
        told = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, open("/dev/full", "w") as full:
            patch.setattr(sys, "argv", ["kvlab run", *lab.arguments("tracking=off")])
            with redirect_stdout(full), redirect_stderr(told), pytest.raises(SystemExit, match="1"):
                kvlab.cli.run.main()
        assert told.getvalue() == (
            "warning: /dev/full cannot be written: No space left on device; the rest is not printed\n"
        )
        assert Command(1, "", lab.base / "out").summary["status"] == "finished"

    def test_whose_directory_another_command_writes_to_is_not_started(self, lab: Lab) -> None:
        with claimed("hydra.run.dir", lab.base / "out"):
            ended = lab.here("tracking=off")
        assert ended.code == 2
        is_told(ended, f"error: hydra.run.dir={lab.base}/out: another command writes there; name another directory")
        assert lab.here("tracking=off").code == 0

    def test_whose_output_is_closed_ends_with_1(self) -> None:
        told = io.StringIO()
        closed: Any = None  # as Python has it behind `kvlab run >&-`
        with redirect_stdout(closed), redirect_stderr(told), pytest.raises(SystemExit, match="1"), lasting_output():
            print("a table\nand its end")
        assert told.getvalue() == "warning: output cannot be written: it is closed; the rest is not printed\n"

    def test_whose_working_directory_is_removed_while_it_serves(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab = Lab.with_store(lab.base)
        (lab.base / "here").mkdir()
        monkeypatch.chdir(lab.base / "here")
        serving(monkeypatch, (lab.base / "here").rmdir)
        ended = lab.here()
        is_told(ended, "tok/s", f"mlflow ui --backend-store-uri {lab.uri}")
        assert ended.code == 0
        again = lab.here("tracking=off", directory="again")
        assert again.code == 2
        is_told(again, "error: hydra.run.dir=.: the working directory was removed; change to another one")


class TestASweep:
    def test_whose_disk_fills_up_has_the_table_of_all_its_points(self, lab: Lab) -> None:
        with disk(lab.base / "out", match="out/(1|report)"):
            ended = lab.here(*TWO)
        assert ended.code == 1
        is_told(
            ended, f"warning: {lab.base}/out/1: summary.json, config.yaml, ", f"warning: {lab.base}/out/report/sw"
        )
        is_told(ended, "2 runs: 2 finished", "kv.num_blocks=9")
        assert (lab.base / "out" / "0" / "summary.json").is_file()

    def test_that_cannot_keep_its_plan_is_not_started(self, lab: Lab) -> None:
        with disk(lab.base / "out", match="sweep.json"):
            ended = lab.here(*TWO)
        assert ended.code == 2
        is_told(ended, f"error: {lab.base}/out/sweep.json: {FULL}")
        assert list((lab.base / "out").iterdir()) == []

    def test_whose_directory_another_sweep_writes_to_is_not_started(self, lab: Lab) -> None:
        others: list[Command] = []
        with pytest.MonkeyPatch.context() as patch:
            serving(patch, lambda: others.append(lab.apart(*TWO, "resume=true")))
            ended = lab.here(*TWO)
        assert [other.code for other in others] == [2, 2]
        is_told(others[0], f"error: hydra.sweep.dir={lab.base}/out: another command writes there; name another dir")
        assert ended.code == 0
        assert lab.here(*TWO).code == 0

    def test_that_cannot_keep_its_plan_closes_its_parent_run(self, lab: Lab) -> None:
        lab = Lab.with_store(lab.base)
        with disk(lab.base / "out", match="sweep.json"):
            assert lab.here("-m", "kv.num_blocks=8,9").code == 2
        (parent,) = lab.parents()
        assert (parent.state, parent.tags["kvlab.error"]) == ("FAILED", f"{lab.base}/out/sweep.json: {FULL}")

    def test_that_cannot_fetch_what_was_done_before_has_its_figures(self, lab: Lab) -> None:
        lab = Lab.with_store(lab.base)
        assert lab.here("kv.num_blocks=8", directory="before").code == 0
        with disk(lab.base / "out", match="out/1"):
            ended = lab.here("-m", "kv.num_blocks=8,9", "resume=true")
        assert ended.code == 1
        is_told(ended, f"warning: {lab.base}/out/1: {FULL}", "2 runs: 2 finished; 1 of them done before")

    def test_whose_directory_is_removed_goes_on(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        def remove() -> None:
            if not (lab.base / "out" / "0").exists():
                shutil.rmtree(lab.base / "out")

        serving(monkeypatch, remove)
        ended = lab.here(*TWO)
        assert ended.code == 0
        is_told(ended, "2 runs: 2 finished")
        assert (lab.base / "out" / "0" / "summary.json").is_file()
        assert (lab.base / "out" / "1" / "summary.json").is_file()


class TestAStore:
    """Runs that are tracked in an SQLite file, with the run's files beside it."""

    def test_whose_disk_is_full_of_files_has_the_run_as_finished(self, lab: Lab) -> None:
        lab = Lab.with_store(lab.base)
        with disk(lab.base, match="mlartifacts.*(summary.json|steps.parquet)"):
            ended = lab.here()
        assert ended.code == 1
        is_told(ended, "warning: tracking.artifacts: ", f": steps.parquet, summary.json: {FULL}", "tok/s")
        assert ended.summary["run_id"]
        assert ended.tracked.data.tags["kvlab.status"] == "finished"
        stored = {file.name for file in (lab.base / "mlartifacts").rglob("*") if file.is_file()}
        assert stored == {"config.yaml", "requests.parquet"}

    def test_that_is_full_when_the_run_ends(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Really: the file may not grow from the first step on."""
        lab = Lab.with_store(lab.base)
        with ExitStack() as opened:
            size = (lab.base / "store.db").stat().st_size
            serving(monkeypatch, lambda: opened.enter_context(largest_file(size)))
            ended = lab.here()
        assert ended.code == 1
        is_told(
            ended, f"warning: tracking.uri={lab.uri}: ", "disk", "; use tracking.uri=sqlite:///<file>, ", "tok/s"
        )
        assert "[SQL" not in ended.output
        assert (ended.directory / "summary.json").is_file()

    def test_that_is_removed_while_requests_are_served(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        lab = Lab.with_store(lab.base)
        serving(monkeypatch, (lab.base / "store.db").unlink)
        ended = lab.here()
        assert ended.code == 1
        is_told(ended, f"warning: tracking.uri={lab.uri}: the file was removed from its disk; use tracking.uri=")
        is_told(ended, "tok/s")
        assert (ended.directory / "summary.json").is_file()


class TestAReport:
    def test_each_file_is_tried_and_the_table_printed(self, lab: Lab) -> None:
        lab.here("tracking=off")
        with disk(lab.base / "told", match="report.md|figures"):
            ended = call(kvlab.cli.report.main, "out", "output=told")
        assert ended.code == 1
        is_told(ended, f"told/report.md: {FULL}", "tok/s", "report: told/report.html")
        assert [file.name for file in (lab.base / "told").iterdir()] == ["report.html"]

    def test_a_gate_that_is_violated_is_told_on_a_full_disk(self, lab: Lab) -> None:
        lab.here("tracking=off")
        gate = "fail_if=throughput/output_tokens_per_s > 0"
        with disk(lab.base / "told", match="report"):
            ended = call(kvlab.cli.report.main, "out", "output=told", "figures=false", gate)
        assert ended.code == 3
        is_told(ended, f"told: report.md, report.html: {FULL}")


class TestASearch:
    """kvlab tune, of two trials."""

    @staticmethod
    def search(*overrides: str) -> Command:
        few = ["optimize=throughput/output_tokens_per_s", "memory=66MiB", "output=found"]
        return call(kvlab.cli.tune.main, *few, *TINY, "tracking=off", *overrides)

    def test_whose_files_cannot_be_written_prints_the_best_command(self, lab: Lab) -> None:
        with disk(lab.base / "found", match="trials.csv|tune.png|tune.html"):
            ended = self.search("trials=1")
        assert ended.code == 1
        is_told(ended, "best: throughput/output_tokens_per_s = ", "kvlab run model=qwen3_tiny")
        is_told(ended, "/search: trials.csv, tune.png, tune.html: cannot be written: No space left on device")

    def test_whose_database_is_gone_goes_on_in_memory(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        serving(monkeypatch, lambda: (lab.base / "found" / "tune.db").unlink(missing_ok=True))
        ended = self.search("trials=2")
        assert ended.code == 1
        is_told(ended, f"warning: storage=sqlite:///{lab.base}/found/tune.db: ", "; the search goes on without it")
        is_told(ended, "2 of 2 trials: ", "best: throughput/output_tokens_per_s = ")
        assert len(list((lab.base / "found").glob("*/*/summary.json"))) == 2, "no trial ran twice"

    def test_without_a_place_for_its_files_is_not_started(self, lab: Lab) -> None:
        (lab.base / "found").touch()
        ended = self.search()
        assert ended.code == 2
        is_told(ended, "found", "error: ")


class TestAdvice:
    """kvlab advise, of a few requests on a simulated device."""

    @staticmethod
    def advise(*overrides: str) -> Command:
        few = "hardware=l4 model=qwen3_tiny model.max_seq_len=256 workload.num_requests=20 workload.prompt_len=20"
        words = [*few.split(), "workload.output_len=4", "minutes=0.1", "keep=kv.dtype,executor.weights"]
        return call(kvlab.cli.advise.main, *words, "output=advice", "tracking=off", *overrides)

    def test_whose_files_cannot_be_written_is_printed(self, lab: Lab) -> None:
        with disk(lab.base / "advice", match=r"simulations|advice\.(json|html)"):
            ended = self.advise()
        assert ended.code == 1
        is_told(
            ended, "Today, on ", "how sure: ", "simulations.jsonl, advice.json, advice.html: cannot be written: "
        )
        assert "page: " not in ended.output

    def test_that_is_interrupted_says_that_it_goes_on(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        def stopped(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Adviser, "advise", stopped)
        ended = self.advise()
        assert ended.code == 130
        assert ended.output.startswith(
            "interrupted: what was simulated is kept; the same command goes on from there"
        )


class TestEveryWrite:
    """Each of the writes of a command fails once."""

    @pytest.mark.slow
    def test_every_write_may_fail(self, lab: Lab) -> None:
        with disk(lab.base / "whole") as faults:
            assert lab.here(*TWO, directory="whole").code == 0
        points = set[Path]()
        for number, path in enumerate(faults.asked):
            if path.is_relative_to(lab.base / "whole" / "1"):  # as those of the first point
                continue
            if path.is_relative_to(lab.base / "whole" / "0"):  # tests/lab/test_disk.py has all of a run's
                if path in points:
                    continue
                points.add(path)
            with disk(lab.base / "out", number):  # the same folder each time, so that it is composed once
                ended = lab.here(*TWO)
            is_told(ended)
            if ended.code != 2:
                is_told(ended, "2 runs: 2 finished")
            assert not [file for file in (lab.base / "out").rglob(".*") if file.is_file()]
            shutil.rmtree(lab.base / "out", ignore_errors=True)
