"""Checkpoints written by strangers, served by the real command."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from tests.security.checkpoints import Mutation, described_as, in_shards, plant_code, write_checkpoint
from tests.support.commands import Command

#: What makes a sound checkpoint, with code of its own beside it, a hostile one.
HOSTILE: dict[str, Mutation] = {
    "code for a family that kvlab does not know": lambda directory: plant_code(directory, "x"),
    "pickled weights alone": lambda directory: (directory / "model.safetensors").unlink(),
    "an index that names a file elsewhere": in_shards({"model.norm.weight": "../../other.safetensors"}),
    "a million million layers": described_as(num_hidden_layers=10**12),
}


@given(parsers.parse("a checkpoint with {what}"), target_fixture="marker")
def hostile_checkpoint(what: str, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    marker = plant_code(tmp_path, "llama")
    HOSTILE[what](tmp_path)
    return marker


@when('I serve it, with "y" for an answer to every question')
def serve_hostile(marker: Path, lab: Runner, commands: list[Command], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    commands.append(lab.run(f"model=checkpoint model.path={marker.parent} model.max_seq_len=64"))


@then("no code of the checkpoint has run")
def nothing_ran(marker: Path) -> None:
    assert sorted(marker.parent.glob("it-ran*")) == []
