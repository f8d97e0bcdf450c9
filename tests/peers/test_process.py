"""Engines in a process that a run starts: what comes of them, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvlab.cli.compose import compose_run
from kvlab.config import EngineChoiceConfig, RunConfig
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.errors import ConfigError, PeerError
from kvlab.kernels.openmp import BRIEF
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import drive
from kvlab.lab.run.peer_plan import plan_peer
from kvlab.models.families import decoder_config
from kvlab.peers import process
from kvlab.peers.engines.base import Assignment
from kvlab.peers.loop import LoopClock
from kvlab.peers.process import ProcessEngine
from kvlab.peers.process_settings import Program

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripted_program.py")


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose_run(["model=qwen3_tiny", "workload.num_requests=1", "kv.num_blocks=4"]).config


def request(name: str, output: int = 3) -> Request:
    return Request(name, (10, 11, 12), SamplingParams(output, ignore_eos=True))


def start(config: RunConfig, folder: Path, function: str = "counting", **settings: Any) -> ProcessEngine:
    should_stop = settings.pop("should_stop", lambda: False)
    model = decoder_config(config.model)
    config = replace(config, engine=EngineChoiceConfig(kind="vllm", python=sys.executable, **settings))
    program = Program("vllm", SCRIPT, function, "vllm", counts=True)
    return ProcessEngine(program, Assignment(config, model, [], 10, folder, should_stop))


def serve(engine: ProcessEngine, requests: list[Request], **options: Any) -> RunLog:
    try:
        log = drive(engine, requests, **options)
        log.engine_report = engine.report()
        return log
    finally:
        engine.close()


def pid(engine: ProcessEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


def gone(number: int) -> bool:
    """Whether a process has ended; waits a little for it."""
    for _ in range(3000):
        if not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_a_run_has_what_the_engine_tells(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in BRIEF.items():  # as kvlab sets it where it comes before torch
        monkeypatch.setenv(name, value)
    engine = start(config, tmp_path)
    log = serve(engine, [request("a"), request("b", 5)])
    assert [record.output_token_ids for record in log.records] == [(0, 1, 2), (0, 1, 2, 3, 4)]
    first = log.records[0]
    assert (first.finish_reason, first.cached_tokens) == (FinishReason.LENGTH, 2)
    assert first.scheduled_s is not None
    assert 0 <= first.scheduled_s <= first.token_times_s[0] <= first.finished_s <= log.duration_s
    metrics = run_metrics(log)
    assert metrics["engine/load_s"] == 0.5
    assert metrics["kv/prefix_hit_rate"] == 0.4
    assert metrics["capacity/kv_bytes"] == 64 * engine._bytes_per_token
    assert log.engine_report is not None
    assert log.engine_report.facts["served in"] == "a scripted program"
    assert log.engine_report.facts["waits"] == "as it likes"
    assert not {"scheduled_s", "queue_ms", "cached_tokens"} & log.engine_report.unreported
    assert "this is no message" in (tmp_path / "engine.log").read_text()
    assert gone(pid(engine))


def test_what_is_aborted_is_forgotten(config: RunConfig, tmp_path: Path) -> None:
    engine = start(config, tmp_path, options={"then": "wait"})
    stops = iter([False, True])
    log = serve(engine, [request(name) for name in "abcdefgh"], should_stop=lambda: next(stops))
    assert log.interrupted
    assert FinishReason.ABORTED in {record.finish_reason for record in log.records}
    assert gone(pid(engine))


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"then": "crash"}, {}, "the engine ended (killed by SIGSEGV); its log ends: about to crash ("),
        (
            {"then": "crash", "signal": int(signal.SIGILL)},
            {},
            "the engine ended (killed by SIGILL, an instruction that the processor or the system refuses); its log",
        ),
        (
            {"then": "crash", "signal": 40},
            {},
            "the engine ended (killed by signal 40); its log ends: about to",
        ),
        ({"then": "raise"}, {}, "the engine failed: RuntimeError: out of something (its log: "),
        ({"then": "babble"}, {"timeout_s": 20}, 'the engine wrote what is no message: [["end","a","length",'),
        ({"then": "hang"}, {"timeout_s": 0.2}, "the engine said nothing for engine.timeout_s=0.2 seconds"),
    ],
)
def test_an_engine_that_fails_on_the_way(
    config: RunConfig, tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    engine = start(config, tmp_path, options=options, **settings)
    with pytest.raises(PeerError) as raised:
        serve(engine, [request("a"), request("b")])
    assert str(raised.value).startswith(f"engine=vllm: {said}")
    assert gone(pid(engine))


def test_a_line_that_is_too_long(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LONGEST_LINE", 2**13)
    engine = start(config, tmp_path, timeout_s=20)
    with pytest.raises(PeerError, match="the engine wrote a line of more than 8192 bytes"):
        serve(engine, [request("a", output=1000)])
    assert gone(pid(engine))


def test_what_is_cancelled_may_wake_while_a_clock_closes() -> None:
    clock, ended = LoopClock(), list[str]()

    async def wakes() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            clock.wake()

    async def last() -> None:
        await asyncio.sleep(0)
        ended.append("last")

    clock.loop.create_task(wakes())
    clock.wait_until(clock.now())
    clock.close(last)
    clock.close(last)
    assert ended == ["last"]


@pytest.mark.parametrize(
    ("function", "settings", "said"),
    [
        (
            "without_its_package",
            {},
            f"{sys.executable} has no vllm; give the interpreter of an environment that has",
        ),
        (
            "counting",
            {"version": "2.0"},
            f"the engine is version 1.0 in {sys.executable}, and engine.version=2.0 asks",
        ),
        (
            "counting",
            {"options": {"bloks": 1}},
            "the engine failed: TypeError: got an unexpected keyword argument 'bl",
        ),
        (
            "never_ready",
            {"start_timeout_s": 0.3},
            "the engine was not ready within engine.start_timeout_s=0.3 seconds",
        ),
    ],
)
def test_an_engine_that_will_not_start(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    settings: dict[str, Any],
    said: str,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(PeerError) as raised:
        start(config, tmp_path, function, **settings)
    assert str(raised.value).startswith(f"engine=vllm: {said}")
    assert gone(started[0].pid)


def test_ctrl_c_while_it_starts(config: RunConfig, tmp_path: Path) -> None:
    stops = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        start(config, tmp_path, "never_ready", should_stop=lambda: next(stops))


@pytest.mark.parametrize("end", ["its input ends", "it is killed"])
def test_nothing_is_left_when_kvlab_is_gone(tmp_path: Path, end: str) -> None:
    """What a kvlab that was killed leaves is the end of the pipe; who kills the engine leaves its children."""
    host = Path(process.__file__).parent / "programs" / "host.py"
    with (tmp_path / "log").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, str(host), SCRIPT, "with_a_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    assert engine.stdin is not None
    engine.stdin.write(json.dumps({"options": {}}).encode() + b"\n")
    engine.stdin.flush()
    while not (text := (tmp_path / "log").read_text()).endswith("\n"):
        time.sleep(0.01)
    if end == "its input ends":
        engine.stdin.close()
    else:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.stdin.close()
    engine.wait(60)
    assert gone(int(text))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["engine.python=/no/python"],
            "engine.python=/no/python: is no interpreter: name the bin/python of an env",
        ),
        (
            ["model.weights=fetched:smollm2"],
            "model.weights=fetched:smollm2: is no checkpoint that engine=vllm reads",
        ),
        (
            ["workload.samples=2"],
            "workload.samples=2: engine=vllm draws one sample of each prompt; use workload.sam",
        ),
        (["kv.dtype=int8"], "kv.dtype=int8: engine=vllm stores K and V in executor.dtype"),
    ],
)
def test_settings_that_it_does_not_have(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_peer(compose_run(["engine=vllm", "model=qwen3_tiny", *settings]).config)
    assert str(raised.value).startswith(said)


def test_sampling_that_transformers_does_not_have() -> None:
    with pytest.raises(ConfigError, match="engine=transformers_static is greedy alone"):
        plan_peer(compose_run(["engine=transformers_static", "workload.temperature=1"]).config)
