"""Steps about real engines beside kvlab's in process: one server of its own, and transformers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from kvlab.cli import peers
from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.peers import remote
from kvlab.peers.install import installed_python
from kvlab.server.build import build_serving
from tests.support.commands import Command, call
from tests.support.serving import running

#: What the run in process, the server and the engine in a process of its own have in common.
MEMORY = ("kv.num_blocks=12", "scheduler.admission_reserve=0", "workload.system_len=24", "workload.num_requests=6")


def settings_of(checkpoint: Path) -> list[str]:
    return [
        *("model=checkpoint", "model.name=words", f"model.path={checkpoint}"),
        *("executor=cpu", "executor.threads=1", "executor.dtype=float32", "model.max_seq_len=128", *MEMORY),
    ]


@pytest.fixture
def in_process(lab: Runner, worded: list[Path]) -> Command:
    """The run that others are compared with."""
    return lab.lab.here(*settings_of(worded[0]), directory=lab.folder())


@given("a cache without engines")
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))


@when("it is served by kvlab serve, and its address is given to a run")
def run_kvlab_serve(
    lab: Runner, commands: list[Command], worded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_LAG_MS", 1e9)  # other tests keep the machine busy
    settings = settings_of(worded[0])
    with running(build_serving(compose_run(settings).config, ServerConfig(port=0))) as served:
        address = ["engine=openai", f"engine.url={served.url}", "engine.metrics_s=0.001"]
        commands.append(lab.lab.here(*settings, *address, directory=lab.folder()))


@when(parsers.parse('it is run with "{text}"'))
def run_engine(lab: Runner, commands: list[Command], worded: list[Path], text: str) -> None:
    for name in ("vllm", "llamacpp"):
        if f"engine={name}" in text and installed_python(name) is None:
            pytest.skip(f"it is not installed: kvlab peers install {name}")
    commands.append(lab.lab.here(*settings_of(worded[0]), *text.split(), directory=lab.folder()))


@then("it had the requests of a run in process, and its tokens")
def tokens_of_process(commands: list[Command], in_process: Command) -> None:
    assert commands[-1].code == 0, commands[-1].output
    assert in_process.code == 0, in_process.output
    found, own = (command.rows("requests.parquet") for command in (commands[-1], in_process))
    assert [row["prompt_tokens"] for row in found] == [row["prompt_tokens"] for row in own]
    assert [row["output_token_ids"] for row in found] == [row["output_token_ids"] for row in own]
    assert commands[-1].summary["workload_digest"] == in_process.summary["workload_digest"]
    assert commands[-1].summary["metrics"]["latency/ttft_ms_p50"] > 0


@then(parsers.parse('its metric "{name}" is that of the run in process'))
def same_metric(commands: list[Command], in_process: Command, name: str) -> None:
    assert commands[-1].summary["metrics"][name] == in_process.summary["metrics"][name] > 0


@then("no process of it is left")
def no_process_left() -> None:
    left = [child for child in psutil.Process().children() if "host.py" in " ".join(child.cmdline())]
    assert left == []


@given(parsers.parse('a compiler that fails with "{text}"'))
def failing_compiler(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quoted = f"[1 lines of output]\n{text}\n[end of output]\nERROR: Could not build wheels\n"

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, "pip" in command, "", quoted)

    monkeypatch.setattr(subprocess, "run", run)


@when('I run "kvlab peers install llamacpp"')
def install_llamacpp(commands: list[Command], tmp_path: Path) -> None:
    commands.append(call(peers.main, "install", "llamacpp", f"folder={tmp_path / 'environment'}"))


@then("there is no environment")
def no_environment(tmp_path: Path) -> None:
    assert not (tmp_path / "environment").exists()
