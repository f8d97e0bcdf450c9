"""Steps about text: a tiny checkpoint with a real tokenizer, and the commands that talk."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pytest_bdd import given, parsers, then, when

import kvlab.cli.run
from kvlab.cli import chat, generate
from kvlab.errors import printable
from kvlab.models.gguf import read_gguf
from kvlab.models.tokenizer import load_tokenizer
from tests.parity.published import check_served
from tests.support.commands import Command, call
from tests.support.published import smollm2_file
from tests.support.words import END, setting, write_checkpoint, write_gguf_checkpoint

WORDS = (
    *("model=checkpoint", "model.name=words", "model.max_seq_len=512"),
    *("executor=cpu", "executor.threads=1", "executor.dtype=float32"),
)
UNTRACKED = ("tracking=off", "figures=false")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, written once in both worded."""
    folder = tmp_path_factory.mktemp("words")
    write_checkpoint(folder / "directory")
    write_gguf_checkpoint(folder / "words.gguf")
    return folder


@pytest.fixture
def worded() -> list[Path]:
    """The worded of a scenario."""
    return []


@given("a tiny checkpoint with words as a directory")
def as_directory(written: Path, worded: list[Path]) -> None:
    worded.append(written / "directory")


@given(parsers.parse("a tiny checkpoint with words and heads of {head_dim:d} as a directory"))
def with_heads(worded: list[Path], tmp_path: Path, head_dim: int) -> None:
    worded.append(write_checkpoint(tmp_path / "heads", head_dim=head_dim))


@given("the same checkpoint as a GGUF file")
@given("a tiny checkpoint with words as a GGUF file")
def as_gguf(written: Path, worded: list[Path]) -> None:
    worded.append(written / "words.gguf")


@given(parsers.re(r"a tiny checkpoint with words as a directory (?P<how>with\S* .+)"))
def changed_directory(written: Path, worded: list[Path], tmp_path: Path, how: str) -> None:
    path = tmp_path / "changed"
    shutil.copytree(written / "directory", path)
    if how == "without tokenizer":
        (path / "tokenizer.json").unlink()
    else:
        template = None if how == "without chat template" else "{% for message in"
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    worded.append(path)


@given(parsers.parse("a tiny checkpoint with words as a GGUF file that is {broken}"))
@given(parsers.parse("a tiny checkpoint with words as a GGUF file that is without {part}"))
def broken_gguf(written: Path, worded: list[Path], tmp_path: Path, broken: str = "", part: str = "") -> None:
    sound = written / "words.gguf"
    content, path = sound.read_bytes(), tmp_path / "broken.gguf"
    if broken == "truncated":
        content = content[:-40]
    elif broken == "truncated within its metadata":
        content = content[:400]
    elif broken == "of another architecture":
        content = content.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1)
    elif broken == "of a type nobody dequantises":
        start = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
        content = content[:start] + b"\x13" + content[start + 1 :]
    else:
        content = content.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.nodel", 1)
    path.write_bytes(content)
    worded.append(path)


@given("an empty cache of models")
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models: compiled kernels are there."""
    cache, known = tmp_path / "cache", Path(os.environ["KVLAB_CACHE"])
    cache.mkdir(mode=0o700)
    for file in known.glob("*.so*"):
        shutil.copy2(file, cache / file.name)
    monkeypatch.setenv("KVLAB_CACHE", str(cache))


@when('I run "kvlab run model=smollm2_135m"')
def run_unfetched(commands: list[Command], tmp_path: Path) -> None:
    commands.append(call(kvlab.cli.run.main, "model=smollm2_135m", *UNTRACKED, f"hydra.run.dir={tmp_path}/run"))


@when(parsers.parse('I ask each "{words}"'))
@when(parsers.parse('I ask it "{words}"'))
def ask_words(commands: list[Command], worded: list[Path], words: str) -> None:
    for path in worded:
        commands.append(call(generate.main, *WORDS, f"model.path={path}", "max_tokens=12", words))


@when(parsers.parse('I ask it "{words}" with "{settings}"'))
def ask_with(commands: list[Command], worded: list[Path], words: str, settings: str) -> None:
    commands.append(call(generate.main, *WORDS, f"model.path={worded[0]}", words, *settings.split()))


@then("both answers are the same, and not empty")
def same_answers(commands: list[Command]) -> None:
    first, second = (command.output.rpartition("\n[")[0] for command in commands)
    assert [command.code for command in commands] == [0, 0]
    assert first == second
    assert first.strip()


@given("a file of requests with a prompt, with messages, and with token ids", target_fixture="requests_file")
def requests_file(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "Who are you?"}]
    lines: list[dict[str, Any]] = [{"prompt": "I am a"}, {"messages": messages}, {"prompt_token_ids": [5, 6, 7]}]
    lines += [{"prompt": f"I am {number}", "temperature": 4.0, "max_tokens": 200} for number in range(12)]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps({"max_tokens": 20, **line}) for line in lines))
    return file


@given(parsers.re(r"a file of requests with the line (?P<line>\{.+\})"), target_fixture="requests_file")
def file_of_line(tmp_path: Path, line: str) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text(line)
    return file


def serve(commands: list[Command], path: Path, directory: Path, *settings: str) -> None:
    where = f"hydra.run.dir={directory / 'run'}"
    command = call(kvlab.cli.run.main, *WORDS, f"model.path={path}", *UNTRACKED, where, *settings)
    commands.append(Command(command.code, command.output, directory / "run"))


@when("I serve that file")
def serve_file(commands: list[Command], worded: list[Path], tmp_path: Path, requests_file: Path) -> None:
    serve(commands, worded[0], tmp_path, "workload=jsonl", f"workload.path={requests_file}")


@when(parsers.parse('I serve the workload "{name}"'))
def serve_workload(commands: list[Command], worded: list[Path], tmp_path: Path, name: str) -> None:
    serve(commands, worded[0], tmp_path, f"workload={name}", "workload.output_len={min: 8, max: 8}")


def rows_of(command: Command) -> list[dict[str, Any]]:
    assert command.code == 0, command.output
    rows: list[dict[str, Any]] = pq.read_table(command.directory / "requests.parquet").to_pylist()
    return rows


@then("requests.parquet has each prompt as it was written, and each answer as its tokens are decoded")
def words_in_files(commands: list[Command], worded: list[Path]) -> None:
    rows, tokenizer = rows_of(commands[-1]), load_tokenizer(setting(worded[0]))
    assert [row["prompt"] for row in rows[:4]] == ["I am a", "Who are you?", "", "I am 0"]
    for row in rows:
        assert row["text"] == tokenizer.decode(row["output_token_ids"])  # an end of sequence is no text


@then("the answers end at the end of sequence")
def answers_end(commands: list[Command]) -> None:
    rows = rows_of(commands[-1])
    ends = [row["output_token_ids"].index(END) == len(row["output_token_ids"]) - 1
            for row in rows if row["finish_reason"] == "stop"]  # fmt: skip
    assert ends
    assert all(ends)


@then("48 conversations were answered, and five of the answers were shown")
def conversations(commands: list[Command]) -> None:
    rows = rows_of(commands[-1])
    assert len({row["prompt"] for row in rows if row["text"]}) == 48
    assert len(re.findall(r"^r\d+: \S.*\n  \S.*tokens, ", commands[-1].output, re.MULTILINE)) == 5
    assert "r0: Why is the sky blue?" in commands[-1].output


@then("the system prompt was found in the prefix cache")
def system_prompt_found(commands: list[Command]) -> None:
    assert min(row["cached_tokens"] for row in rows_of(commands[-1])[1:]) > 64


@then("the answer is that of the whole text at once")
def streamed_answer(commands: list[Command], worded: list[Path], tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 9}
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    whole: list[Command] = []
    serve(whole, worded[0], tmp_path, "workload=jsonl", f"workload.path={tmp_path}/one.jsonl")
    text = rows_of(whole[0])[0]["text"]
    assert commands[-1].output.startswith(printable(text) + "\n[")


@then(parsers.parse("the last line has {count:d} tokens, a speed in tok/s and the bytes of the KV cache"))
def last_line(commands: list[Command], count: int) -> None:
    line = commands[-1].output.splitlines()[-1]
    speed = rf"{count} tokens: the first after [\d,]+ ms, then [\d.]+ tok/s"
    assert re.fullmatch(rf"\[{speed}; KV cache: \d+ blocks? of 16 tokens, .*KiB\]", line), line


@when(parsers.parse('I chat for {turns:d} turns with "{settings}"'))
def talk(
    commands: list[Command], worded: list[Path], monkeypatch: pytest.MonkeyPatch, turns: int, settings: str
) -> None:
    lines = "".join(f"Turn {turn}: who are you?\n" for turn in range(turns))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    commands.append(call(chat.main, *WORDS, f"model.path={worded[0]}", *settings.split()))


@then("each turn computes its new tokens and less than one block again")
def turns_compute(commands: list[Command]) -> None:
    pattern = r"prefix cache: (\d+) of (\d+) prompt tokens found, (\d+) computed; (\d+) tokens?:"
    turns = [tuple(map(int, found)) for found in re.findall(pattern, commands[-1].output)]
    assert len(turns) == 10
    said = 0
    for found, prompt, computed, answer in turns:
        assert found + computed == prompt
        assert computed <= prompt - said + 4
        said = prompt + answer - 1  # the last token of an answer may be the one that ended it
    assert turns[-1][0] > 250


@given("SmolLM2, or a reason why it cannot be had")
def published() -> None:
    assert read_gguf(smollm2_file()).metadata["general.architecture"] == "llama"


@when(parsers.parse("it is asked for the capital of France in {dtype}"), target_fixture="spoken")
def ask_published(dtype: str) -> Command:
    question = ("model=smollm2_135m", "executor.threads=1", "max_tokens=16", "What is the capital of France?")
    return call(generate.main, "executor=cpu", f"executor.dtype={dtype}", "model.max_seq_len=128", *question)


@then(parsers.parse('the answer is "{text}"'))
def published_answer(spoken: Command, text: str) -> None:
    assert spoken.code == 0, spoken.output
    assert spoken.output.startswith(f"{text}\n[8 tokens: ")


@then(
    parsers.re(
        r"(?P<count>\d+) prompts of its own are given the (?P<tokens>\d+) tokens that transformers gives them, "
        r"with attention=(?P<attention>\w+) kv=(?P<kv>\w+), (?P<pressure>preempted|not preempted)"
    )
)
def published_tokens(count: str, tokens: str, attention: str, kv: str, pressure: str) -> None:
    check_served(attention, kv, pressure == "preempted", int(count), int(tokens))
