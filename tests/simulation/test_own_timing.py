"""A timing of a plugin: what it answers is checked, and nobody knows how far off it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.engine.executors import EXECUTORS
from kvlab.engine.executors.simulated import SimulatedExecution
from kvlab.errors import ConfigError, EngineStoppedError
from kvlab.simulation.timings import TIMINGS
from kvlab.simulation.timings.silicon import SiliconTiming
from tests.simulation.test_expert_kernels import Instant
from tests.support.runs import run_small

DEVICE = ("executor=simulated", "hardware=h100_sxm", "executor.timing=mine")


def fails(*args: object) -> float:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("device_s", lambda *_: -0.01, "step_s returned -0.01; must be seconds, at least 0"),
        ("device_s", lambda *_: float("inf"), "step_s returned inf; must be seconds"),
        ("device_s", lambda *_: float("nan"), "step_s returned nan; must be seconds"),
        ("device_s", lambda *_: np.ones(2), "step_s returned array([1., 1.]); must be seconds"),
        ("device_s", fails, "ZeroDivisionError: division by zero"),
        (
            "run_s",
            lambda self, new, lengths, sampled: [-1.0] * len(lengths),
            "run_s returned -1.0; must be",
        ),
        ("run_s", lambda *_: [], "run_s returned []; must be "),
    ],
)
def test_what_a_timing_answers_is_checked(
    method: str, answer: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(TIMINGS._entries, "mine", type("Mine", (Instant,), {method: answer}))
    with pytest.raises(EngineStoppedError) as caught:
        run_small(tmp_path / "run", *DEVICE)
    assert str(caught.value).startswith(f"executor.timing: Mine: {said}")


def test_what_is_made_has_to_be_a_timing_of_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(TIMINGS._entries, "mine", type("Mine", (Instant,), {"of": lambda deployment: None}))
    with pytest.raises(ConfigError, match=r"executor.timing=mine: its method `of` returned None; must be a StepT"):
        run_small(tmp_path / "run", *DEVICE)


@pytest.mark.parametrize("key", ["executor.kind", "executor.timing"])
def test_how_far_off_measured_operations_are_is_not_said_of_what_a_plugin_makes_of_them(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("aiconfigurator_core")
    monkeypatch.setitem(EXECUTORS._entries, "mine", type("Mine", (SimulatedExecution,), {}))
    monkeypatch.setitem(TIMINGS._entries, "mine", type("Mine", (SiliconTiming,), {}))
    measured = "model=qwen3_8b", "executor.dtype=bfloat16", "executor.timing=silicon", *DEVICE[:2]
    said = list[bool]()
    for settings in ((), (f"{key}=mine",)):
        run_small(tmp_path / f"run{len(said)}", *measured, *settings)
        summary = json.loads((tmp_path / f"run{len(said)}" / "summary.json").read_text())
        said.append("accuracy" in summary)
    assert said == [True, False]
