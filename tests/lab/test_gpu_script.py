"""`make gpu` where there is no GPU: all its parts in small, with nothing installed but what a GPU machine has."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.gpu.run import main

ROOT = Path(__file__).resolve().parents[2]
# What kvlab wants and a GPU machine lacks; filelock comes with transformers.
NOT_THERE = ("hydra", "hypothesis", "matplotlib", "mlflow", "omegaconf", "psutil", "pyarrow", "pytest_bdd", "rich")
LEAN = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

class Lean:
    @classmethod
    def find_spec(cls, name, *rest):
        return None if {{name, name.partition(".")[0]}} & set({NOT_THERE!r}) else find(name, *rest)

PathFinder.find_spec = Lean.find_spec
"""
# Parts of which one does not hold, and one ends in the midst; they import nothing that takes long.
FAILING = """
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

Row = make_dataclass("Row", ["case", "ok", "result", "figures"])

def kernels(sizes):
    yield Row("selected tests", False, "0 passed", {})

def parity(sizes):
    yield Row("the first", True, "the same", {})
    import a_module_that_is_not_there

sys.modules["experiments.gpu.parts"] = SimpleNamespace(PARTS={"kernels": kernels, "parity": parity})
sys.modules["experiments.gpu.sizes"] = SimpleNamespace(choose=str)
"""

# The whole of it in one process, which forks for each part what it has imported once.
FORKING = """
import os, subprocess, sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
import kvlab.kernels.triton.decode
from experiments.gpu import parts, run

class Forked:
    def __init__(self, command, stdout, **_):
        self.status, self.pid = None, os.fork()
        if not self.pid:
            os.setsid()
            os.dup2(stdout, 1)
            sys.argv = command[2:]
            os._exit(run.main())

    def wait(self, timeout=None):
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

run.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
sys.exit(run.main())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the whole of it would run"),
]


def run(directory: Path, *arguments: str, first: str = LEAN) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what comes before the last line of output, and that line's JSON. Parts have processes of their
    own, which run `first` as they start.
    """
    (directory / "sitecustomize.py").write_text(first)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(ROOT / "src")]))
        patch.setattr(sys, "argv", ["run", *arguments])
        status = main()
    return status, *told(printed.getvalue())


def told(printed: str) -> tuple[str, dict[str, Any]]:
    table, _, report = printed.strip().rpartition("\n")
    assert report.startswith("{"), table
    return table, json.loads(report)


@pytest.mark.long
def test_every_part_in_small(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAN)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", FORKING, "--select", "one_layer or test_nobody"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    table, report = told(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), table
    assert (report["device"], report["reduced"]) == ("cpu (interpreted)", True)
    assert "reduced form, kernels interpreted on a CPU" in table.splitlines()[0]
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "ok")
    assert list(parts) == ["kernels", "attention", "parity", "serving"]
    assert parts["kernels"]["rows"][0]["figures"]["passed"] >= 3
    decode = next(row["figures"] for row in parts["attention"]["rows"] if "triton" in row["case"])
    assert decode["kv_bytes"] == 2 * 48 * 8 * 128 * 2 * 2
    for row in parts["parity"]["rows"][1:]:
        assert row["figures"]["different"] == []
        assert row["figures"]["logit_error"] < 1e-4
    contiguous, paged = (row["figures"] for row in parts["serving"]["rows"])
    assert contiguous["kv_bytes"] == paged["kv_bytes"]
    assert paged["peak_running"] > contiguous["peak_running"] == 2
    assert paged["completed"] == contiguous["completed"] == paged["requests"]


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    status, table, report = run(tmp_path, "--parts", "kernels,parity", first=FAILING)
    assert (status, report["ok"]) == (1, False)
    kernels, parity = (report["parts"][name] for name in ("kernels", "parity"))
    assert (kernels["status"], kernels["rows"][0]["ok"]) == ("failed", False)
    assert "| kernels | selected tests | FAILED: 0 passed" in table
    # What came before the failure is kept.
    assert (parity["status"], parity["rows"][0]["ok"]) == ("failed", True)
    assert "No module named 'a_module_that_is_not_there'" in parity["error"]
    assert "| parity |  | FAILED, " in table


def test_kernel_tests_of_which_none_ran_do_not_hold(tmp_path: Path) -> None:
    from experiments.gpu.parts import row_of_tests

    none = '<testsuites><testsuite tests="0" failures="0" errors="0" skipped="0"/></testsuites>'
    (tmp_path / "none.xml").write_text(none)
    row = row_of_tests("none", 5, tmp_path)
    assert (row.ok, row.result) == (False, "0 passed, 0 failed, 0 skipped")


def test_what_the_budget_has_no_time_for_is_skipped(tmp_path: Path) -> None:
    status, table, report = run(tmp_path, "--budget", "10")
    assert status == 1
    assert {part["status"] for part in report["parts"].values()} == {"skipped"}
    assert "| serving |  | SKIPPED, 0 s, may take 120 s, and " in table
