"""kvlab ui: what is told before MLflow is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import kvlab.cli.ui
from tests.support.commands import call


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that is there; MLflow is not to be started on it."""
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("MLflow was started"))
    (tmp_path / "mlflow.db").touch()
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_a_port_that_is_used_is_named(store: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = call(kvlab.cli.ui.main, store, "--port", str(port))
    assert ended.code == 2
    assert f"error: --port={port}: cannot be listened on (Address already in use); give another one" in ended.output


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999"])
def test_a_port_that_is_none_is_named(store: str, port: str) -> None:
    ended = call(kvlab.cli.ui.main, store, f"--port={port}")
    assert ended.code == 2
    assert f"error: --port={port}: cannot be listened on (a port is from 0 to 65535)" in ended.output


def test_a_folder_is_no_store(store: str, tmp_path: Path) -> None:
    ended = call(kvlab.cli.ui.main, str(tmp_path))
    assert ended.code == 2
    assert ended.output == f"error: {tmp_path}: is no address of a store; give one as sqlite:///mlflow.db\n"
