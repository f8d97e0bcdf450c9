"""kvlab serve as a command: what it refuses before anything is loaded."""

from __future__ import annotations

import sys

import pytest

from kvlab.cli import serve

SIMULATED = ["executor=simulated", "hardware=h100_sxm", "model=qwen3_tiny"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["server.prt=7"], "server.prt=7: unknown; did you mean server.port? known: server.host"),
        (["server.port=70000"], "server.port=70000: must be a number, at most 65535"),
        (["server.max_body=0"], "server.max_body=0: must be more than 0 bytes"),
        (["server.api_key="], "server.api_key=: must not be empty; null asks for none"),
        (["server.host=nowhere.invalid"], "server.host=nowhere.invalid: is no address of this machine"),
        (["server.host=203.0.113.1"], "server.host=203.0.113.1: is no address of this machine"),
        (
            ["executor=playback"],
            "executor.kind=playback: has the requests of its recording alone; a server gets others",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvlab serve", *arguments])
    with pytest.raises(SystemExit, match="2"):
        serve.main()
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}")
    assert said.count("\n") == 1
