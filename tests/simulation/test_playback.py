"""A playback is held against its recording to the last step and request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.config import EngineConfig
from kvlab.core.step_log import StepLog
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import LogicalClock
from kvlab.errors import ConfigError, PlaybackError
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.playback import Playback
from kvlab.simulation.recording_files import read_recording
from tests.simulation.test_executor import config, traffic


@pytest.fixture
def recorded(tmp_path: Path) -> RunLog:
    """A run whose record is in `tmp_path`."""
    log = drive(build_engine(plan_engine(config("simulated"))), traffic())
    summary = {"status": "finished", "config": {"kv.block_size": 16, "executor.kind": "torch"}}
    assert not write_artifacts(tmp_path, log, summary, "")
    return log


def held(directory: Path, log: RunLog, **settings: object) -> str:
    playback = Playback(read_recording(str(directory)), LogicalClock(), settings)
    for step in log.steps[:-1]:  # the last one comes when the engine is closed
        playback.after(step)
    return playback.finish(log)


def playback_config(directory: Path) -> EngineConfig:
    asked = config("playback")
    asked.executor.recording = str(directory)
    return asked


def test_the_same_run_is_found_identical(tmp_path: Path, recorded: RunLog) -> None:
    said = f"played back {len(recorded.steps)} steps, 9 requests: every decision is that of the recording"
    assert held(tmp_path, recorded) == said


def test_a_playback_has_the_pool_and_the_times_of_its_recording(tmp_path: Path, recorded: RunLog) -> None:
    plan = plan_engine(playback_config(tmp_path))
    pool = recorded.steps[0].pool
    assert pool is not None
    assert plan.pool.num_blocks == pool.blocks_total
    engine = build_engine(plan)
    assert isinstance(engine.clock, LogicalClock)
    playback = Playback(read_recording(str(tmp_path)), engine.clock, {})
    log = drive(engine, traffic(), on_step=lambda _, step: playback.after(step) if step is not None else None)
    assert playback.finish(log)
    assert log.records == recorded.records
    assert log.duration_s == recorded.duration_s


@pytest.mark.parametrize(
    "field", ["start_s", "running", "waiting", "preempted", "recomputed_tokens", "failed_passes"]
)
def test_a_step_that_differs_is_named(tmp_path: Path, recorded: RunLog, field: str) -> None:
    changed = list(recorded.steps)
    changed[3] = replace(changed[3], **{field: getattr(changed[3], field) + 1})
    with pytest.raises(
        PlaybackError, match=rf"^step 3: {field} .* instead of .*; settings differ: kv\.block_size=8"
    ):
        held(
            tmp_path,
            replace(recorded, steps=StepLog(changed)),
            **{"kv.block_size": 8, "executor.kind": "simulated"},
        )


def test_what_the_host_took_may_differ(tmp_path: Path, recorded: RunLog) -> None:
    changed = [replace(step, end_s=step.end_s + 1, schedule_ms=9.0, execute_ms=9.0) for step in recorded.steps]
    assert held(tmp_path, replace(recorded, steps=StepLog(changed)))


def test_a_step_too_many_or_too_few_is_named(tmp_path: Path, recorded: RunLog) -> None:
    count = len(recorded.steps)
    with pytest.raises(
        PlaybackError, match=rf"^step {count - 1}: the recording goes on, to {count} steps; the settings"
    ):
        held(tmp_path, replace(recorded, steps=StepLog(recorded.steps[: count - 1])))
    with pytest.raises(PlaybackError, match=rf"^step {count}: the recording ended after {count} steps"):
        held(tmp_path, replace(recorded, steps=StepLog([*recorded.steps, *recorded.steps[-1:]])))


def test_a_request_that_differs_is_named(tmp_path: Path, recorded: RunLog) -> None:
    first, *others = recorded.records
    with pytest.raises(PlaybackError, match=r"^request r0: cached_tokens 3 instead of 0"):
        held(tmp_path, replace(recorded, records=[replace(first, cached_tokens=3), *others]))
    with pytest.raises(PlaybackError, match=r"^request r0: is not there"):
        held(tmp_path, replace(recorded, records=others))


def test_a_run_behind_a_front_end_is_refused(tmp_path: Path, recorded: RunLog) -> None:
    summary = {"status": "finished", "config": {"framework.request_us": 0.0, "framework.output_token_us": 50.0}}
    assert not write_artifacts(tmp_path, recorded, summary, "")
    with pytest.raises(ConfigError, match=r"clients behind a front end.*framework\.output_token_us=0"):
        read_recording(str(tmp_path))


def test_without_a_directory_it_says_what_to_name() -> None:
    asked = playback_config(Path())
    asked.executor.recording = None
    with pytest.raises(ConfigError, match=r"executor=playback plays back a recorded run; name its directory"):
        plan_engine(asked)
