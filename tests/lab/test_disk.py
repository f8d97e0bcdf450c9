"""Disks that are full, read-only or gone: requests go on, figures are printed, every other file is whole."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from kvlab.cli.compose import compose_run
from kvlab.core import StepRecord
from kvlab.errors import ConfigError, OutputError
from kvlab.lab import figures
from kvlab.lab.files import attempt, check_directory, replacing, sentences, write_text
from kvlab.lab.machine import CpuWatch
from kvlab.lab.results.log import RunLog
from kvlab.lab.run import execute as execution
from kvlab.lab.run import serve as serving
from kvlab.lab.run.drive import drive
from kvlab.lab.run.execute import RunContext, RunResult, execute
from kvlab.lab.run.reporter import Reporter
from kvlab.lab.settings import Composition
from kvlab.lab.terminal import Terminal
from tests.support.disk import disk, largest_file
from tests.support.runs import FEW_STEPS

FILES = {
    "summary.json",
    "config.yaml",
    "requests.parquet",
    "steps.parquet",
    "blocks.parquet",
    "trace.json",
    "figures/memory.png",
    "figures/hover.html",
}
_CHECKS = 3  # writes of the check before the run: the directory, and a file in it


@pytest.fixture(scope="module")
def composed() -> Composition:
    few = [text for text in FEW_STEPS if text != "figures=false"]
    return compose_run([*few, "figures=true", "kv.num_blocks=64"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time beside the run and its files: drawing, watching other processes, printing the settings."""
    monkeypatch.setattr(figures, "run_figures", lambda record: {"memory": Figure(figsize=(1, 1))})
    monkeypatch.setattr(figures, "interactive_run", lambda record: {})
    monkeypatch.setattr(Reporter, "announce", lambda reporter, plan: None)
    monkeypatch.setattr(CpuWatch, "busy_cores", lambda watch: 0.0)


def run(composed: Composition, directory: Path, *, in_sweep: bool = False) -> tuple[RunResult, str]:
    """The run and what it printed."""
    said = Terminal(file=io.StringIO(), width=300)
    context = RunContext(composed, directory, said, "small", in_sweep)
    result = execute(context)
    return result, said.file.getvalue()  # type: ignore[attr-defined]


def whole_files(directory: Path) -> set[str]:
    """The files below a directory, each read to its end; nothing half-written is among them."""
    found = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    for name in found:
        if name.endswith(".json"):
            json.loads((directory / name).read_text())
        elif name.endswith(".parquet"):
            pq.read_table(directory / name)
        elif name.endswith(".png"):
            assert (directory / name).read_bytes().endswith(b"IEND\xaeB`\x82")
        elif name.endswith(".html"):
            assert (directory / name).read_text().rstrip().endswith("</html>")
    return found


def check(result: RunResult, said: str, directory: Path) -> set[str]:
    """The run ended well and said what is missing. Returns what that is."""
    assert result.status == "finished"
    assert "output tokens" in said
    assert "Traceback" not in said
    missing = FILES - whole_files(directory)
    assert whole_files(directory) <= FILES  # nothing is left beside them
    told = " ".join(result.unwritten)
    assert all(Path(name).name in told for name in missing)
    assert bool(missing) == bool(result.unwritten)
    assert all(f"warning: {sentence}" in said for sentence in result.unwritten)
    return missing


def test_every_write_of_a_run_may_fail(composed: Composition, tmp_path: Path, quick: None) -> None:
    with disk(tmp_path / "whole") as faults:
        assert not check(*run(composed, tmp_path / "whole"), tmp_path / "whole")
    missed = set()
    for number in range(_CHECKS, len(faults.asked)):
        directory = tmp_path / str(number)
        with disk(directory, number) as failing:
            missing = check(*run(composed, directory), directory)
        (refused,) = failing.refused
        assert len(missing) <= 1, "one refusal costs one file"
        if missing and refused.suffix:
            final = refused.with_name(refused.name.removeprefix(f".{os.getpid()}."))
            assert missing == {str(final.relative_to(directory))}
        missed |= missing
    assert missed == FILES


@pytest.mark.parametrize("number", [0, 1])
def test_a_directory_that_cannot_be_written_to_is_refused_before_the_run(
    composed: Composition, tmp_path: Path, quick: None, number: int
) -> None:
    advice = "No space left on device; free some space there, or choose another directory"
    with (
        disk(tmp_path / "out", number, onwards=True),
        pytest.raises(ConfigError, match=f"hydra.run.dir={tmp_path}/out: cannot be written: {advice}"),
    ):
        run(composed, tmp_path / "out")
    assert not whole_files(tmp_path)


def test_a_disk_that_is_full_when_the_last_request_ends_keeps_nothing_but_what_is_printed(
    composed: Composition, tmp_path: Path, quick: None
) -> None:
    out = tmp_path / "out"
    with disk(out, _CHECKS, onwards=True):
        result, said = run(composed, out)
    assert check(result, said, out) == FILES
    assert len(result.unwritten) == 2  # of all files, and of figures/
    assert result.unwritten[0].startswith(f"{out}: trace.json, summary.json, config.yaml, requests.parquet, steps.")
    assert result.unwritten[0].endswith(
        "No space left on device; free some space there, or choose another directory"
    )
    assert "the run's results are kept in" not in said


@pytest.mark.parametrize("size", [0, 1000, 5000])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_keeps_no_half(
    composed: Composition, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Really: the system ends each write at `size` bytes, those of Arrow and of the image library too."""
    monkeypatch.setattr(execution, "claimed", lambda key, directory: nullcontext())
    with largest_file(size):
        result, said = run(composed, tmp_path)
    missing = check(result, said, tmp_path)
    assert missing
    assert all("cannot be written: File too large; choose another directory" in text for text in result.unwritten)


@contextmanager
def while_serving(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> Iterator[None]:
    """Do something after the first step of the next run."""
    acted: list[object] = []

    def driven(*arguments: Any, on_step: Any, **options: Any) -> Any:
        def after(log: RunLog, record: StepRecord | None) -> None:
            if not acted:
                acted.append(act())
            on_step(log, record)

        return drive(*arguments, on_step=after, **options)

    monkeypatch.setattr(serving, "drive", driven)
    yield
    assert acted


def test_a_directory_that_is_removed_while_requests_are_served_is_made_again(
    composed: Composition, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a" / "out"
    with while_serving(monkeypatch, lambda: shutil.rmtree(tmp_path / "a")):
        assert not check(*run(composed, out), out)


def test_a_file_in_the_place_of_the_directory_while_requests_are_served(
    composed: Composition, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def replace() -> None:
        out.rmdir()
        out.touch()

    with while_serving(monkeypatch, replace):
        result, said = run(composed, out)
    assert result.status == "finished"
    assert "output tokens" in said
    told = r".*summary.json.*steps.parquet.*: cannot be written: (File exists|Not a directory); choose another"
    assert re.match(told, result.unwritten[0])
    assert out.read_bytes() == b""


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(file) as own:
        own.write_text(f"half {1 / own.write_text('')}")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
    with replacing(file) as own:
        own.write_text("after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["after"]


def test_a_single_file_that_is_full_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    errors: list[OutputError] = []
    with attempt(errors), replacing(tmp_path / "file"):
        (tmp_path / "full").write_text("anything")
    told = f"{tmp_path}/file: cannot be written: No space left on device; free some space there, or choose another"
    assert sentences(errors) == [f"{told} directory"]
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space there, or choose another directory"),
        (errno.EDQUOT, "free some space there, or choose another directory"),
        (errno.EROFS, "choose a directory on a disk that can be written to"),
        (errno.EACCES, "make the directory writable, or choose another one"),
        (errno.EIO, "choose another directory"),
    ],
)
def test_each_cause_has_its_advice(tmp_path: Path, code: int, advice: str) -> None:
    with disk(tmp_path, 1, code=code), pytest.raises(OutputError) as raised:
        write_text(tmp_path / "file", "")
    assert str(raised.value) == f"{tmp_path}/file: cannot be written: {os.strerror(code)}; {advice}"


def test_a_directory_that_may_only_be_read() -> None:
    """Really, for root too: it gives up its rights for as long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o555)
        with as_nobody(), pytest.raises(ConfigError, match=f"output={folder}: .* denied; make the directory"):
            check_directory("output", folder)
        with as_nobody(), pytest.raises(ConfigError, match="Permission denied"):
            check_directory("output", folder / "below")
        with as_nobody(), pytest.raises(OutputError, match="Permission denied"):
            write_text(folder / "file", "")
        assert not list(folder.iterdir())


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, whom no mode keeps from writing."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
