"""`kvlab`: its help page, what it does with a name, completion, and how the package is found."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

import kvlab
from kvlab.cli import main as front
from kvlab.paths import CONF, SOURCE

HEAVY = ("torch", "mlflow", "hydra", "omegaconf", "rich", "transformers", "numpy")


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    try:
        front.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_help_page_has_every_command_with_an_example(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, *arguments) == 0
    page = capsys.readouterr().out
    for name, command in front.COMMANDS.items():
        assert f"  {name} " in page
        assert command.purpose in page
        assert f"kvlab {name} {command.example}".rstrip() in page
        assert callable(import_module(front.module_of(name)).main)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"""
import sys
from kvlab.cli.main import main
sys.argv = ["kvlab", "--help"]
main()
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    ended = python("-c", code, cwd=tmp_path)
    assert "LOADED []" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rum", "run"), ("bench", "run"), ("compare", "report")],  # typed wrongly, and as others call it
)
def test_an_unknown_command_names_the_closest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    assert ask(monkeypatch, name, "kv=paged") == 2
    assert capsys.readouterr().err == (
        f"error: {name}: no such command; did you mean {meant}? there are: " + ", ".join(front.COMMANDS) + "\n"
    )


def test_a_help_page_that_nobody_reads_to_its_end_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as pipe, redirect_stdout(pipe):
        assert ask(monkeypatch, "--help") == 1
    assert capsys.readouterr().err == ""


def test_a_command_that_is_stopped_while_it_is_imported_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(front, "import_module", stopped)
    assert ask(monkeypatch, "run") == 130


def test_a_command_gets_the_arguments_behind_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("kvlab.cli.capacity.main", lambda: given.append(sys.argv))
    assert ask(monkeypatch, "capacity", "model=qwen3_4b", "--json") == 0
    assert given == [["kvlab", "model=qwen3_4b", "--json"]]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvlab ", {"run", "tune", "capacity"}),
        ("kvlab ru", {"run", "tune", "capacity"}),  # the shell keeps those that begin so
        ("kvlab run kv=", {"kv=paged", "kv=contiguous"}),
        ("kvlab capacity model=qwen3_", {"model=qwen3_4b", "model=qwen3_tiny"}),
        ("kvlab run kv.", {"kv.block_size="}),
    ],
)
def test_the_shell_completes_commands_and_settings(
    line: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert ask(monkeypatch, "-sc", "query=bash") == 0
    assert offered <= {word.rstrip("0123456789") for word in capsys.readouterr().out.split()} | set(
        capsys.readouterr().out.split()
    )


def test_no_command_can_be_imported_as_a_module_of_its_own(tmp_path: Path) -> None:
    """An editable install finds packages by name; with src/ on the path `import run` would find the script."""
    ended = python("-c", "import kvlab, run", cwd=tmp_path, PYTHONPATH="")
    assert "No module named 'run'" in ended.stderr, "install it again: make setup"


def test_the_package_has_one_name() -> None:
    assert SOURCE is not None
    ended = python("-c", "import src.kvlab", cwd=SOURCE)
    assert "import kvlab, not src.kvlab" in ended.stderr


def test_the_configuration_is_found_wherever_the_command_is_called(tmp_path: Path) -> None:
    ended = python("-c", "import kvlab.paths; print(kvlab.paths.CONF)", cwd=tmp_path)
    assert ended.stdout.strip() == str(CONF)
    assert (CONF / "run.yaml").is_file()
    assert kvlab.__version__ in python("-m", "kvlab.cli", "--version", cwd=tmp_path).stdout
