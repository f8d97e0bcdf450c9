"""Ctrl-C and SIGTERM, whenever they come: the run ends as interrupted, with its record."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import kvlab.lab.run.execute as lab
from kvlab.lab.results import quality
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.run import recording
from kvlab.lab.run.execute import RunContext
from kvlab.lab.settings import Composition
from kvlab.lab.terminal import Terminal
from kvlab.lab.tracking import RunStatus, Tracker
from tests.support.plans import composed
from tests.support.runs import FEW_STEPS, alone, run_small


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those of a terminal (what runs in the background ignores SIGINT), which a run leaves as they were."""
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, own)


def signalled(place: str, number: int, monkeypatch: pytest.MonkeyPatch, *, behind: bool) -> None:
    """Let the signal come as `place` begins, or behind it."""
    original: Callable[..., Any] = getattr(lab, place)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not behind:
            signal.raise_signal(number)
        result = original(*args, **kwargs)
        if behind:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(lab, place, call)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("place", "behind"),
    [("plan_any", False), ("Recording", True), ("_crowded", True), ("start_engine", False)],
    ids=["as it is planned", "before it is announced", "once it is announced", "as the engine is built"],
)
def test_a_signal_before_the_first_step(
    place: str, behind: bool, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled(place, number, monkeypatch, behind=behind)
    assert run_small(tmp_path).status is RunStatus.INTERRUPTED
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["metrics"]["tokens/output"]) == ("interrupted", 0)
    assert (tmp_path / "config.yaml").is_file()


def test_a_second_signal_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        signalled("start_engine", signal.SIGINT, monkeypatch, behind=False)
    assert run_small(tmp_path).status is RunStatus.INTERRUPTED
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"] == {}


def test_a_signal_behind_the_last_step_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "quality_metrics", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run_small(tmp_path)
    assert result.status is RunStatus.INTERRUPTED
    assert result.metrics["requests/completed"] == 2


@pytest.mark.parametrize(("in_sweep", "fails", "raised"), [
    (False, False, None), (True, False, KeyboardInterrupt),
    (False, True, ArithmeticError), (True, True, KeyboardInterrupt),
])  # fmt: skip
def test_a_signal_while_results_are_written_waits_for_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_sweep: bool,
    fails: bool,
    raised: type[BaseException] | None,
) -> None:
    """The run has ended: its store would have it as interrupted, and no figures. A sweep ends behind it."""
    finished = list[RunStatus]()
    if fails:
        monkeypatch.setattr(lab, "measure", lambda *_, **options: 1 // 0)

    def write(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return write_artifacts(*args)

    monkeypatch.setattr(recording, "write_artifacts", write)
    monkeypatch.setattr(Tracker, "finish", lambda _, status, error: finished.append(status))
    run = composed("model=qwen3_tiny", *FEW_STEPS)
    made, said = Composition(run, {}, str, dict), Terminal(record=True)
    context = RunContext(made, tmp_path, said, "a run", in_sweep=in_sweep)
    with alone(), pytest.raises(raised) if raised else nullcontext():
        lab.execute(context)
    assert finished == [RunStatus.FAILED if fails else RunStatus.FINISHED]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == finished[0]
    assert "stopping once the results are written; once more to stop at once" in said.export_text()


def test_a_second_signal_while_results_are_written_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled("start_engine", signal.SIGINT, monkeypatch, behind=False)
    monkeypatch.setattr(recording, "write_artifacts", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path)
