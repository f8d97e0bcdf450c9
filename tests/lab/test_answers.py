"""Words of a run: prompts and messages in, text out, in its files, on the terminal and in its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvlab.core import FinishReason, Message
from kvlab.errors import TokenizerError, WorkloadError
from kvlab.lab.compare.groups import RunSet
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.report.pages import to_html, to_markdown
from kvlab.lab.report.report import build_report
from kvlab.lab.results.answers import sample_answers
from kvlab.lab.results.records import read_run
from kvlab.lab.terminal import Terminal
from kvlab.models.tokenizer import Tokenizer, load_tokenizer
from kvlab.workloads import build_requests
from tests.support.plans import composed
from tests.support.runs import run_small
from tests.support.words import END, TEMPLATE, setting, write_checkpoint

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def words(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(setting(checkpoint))


def run(directory: Path, checkpoint: Path, *overrides: str) -> list[dict[str, Any]]:
    model = ("model=checkpoint", f"model.path={checkpoint}", "model.name=words", "executor.dtype=float32")
    result = run_small(directory, *model, *overrides)
    assert result.status == "finished"
    return pq.read_table(directory / "requests.parquet").to_pylist()


def write_lines(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps({"max_tokens": 12, **line}) for line in lines))
    return f"workload.path={path}"


def test_a_file_of_prompts_and_messages(tmp_path: Path, checkpoint: Path, words: Tokenizer) -> None:
    lines = write_lines(
        tmp_path / "requests.jsonl",
        {"prompt": "Who are you?"},
        {"messages": MESSAGES},
        {"prompt_token_ids": words.encode("I am")},
        {"prompt": "I am a model", "stop": ["e", "o", "a", " "], "max_tokens": 60},
    )
    rows = run(tmp_path / "run", checkpoint, "workload=jsonl", lines)
    assert [row["prompt"] for row in rows] == ["Who are you?", "Who are you?", "", "I am a model"]
    chat = words.encode_prompt([Message(**message) for message in MESSAGES])
    assert [row["prompt_tokens"] for row in rows[:2]] == [len(words.encode("Who are you?")), len(chat)]
    for row in rows[:3]:
        ids = row["output_token_ids"]
        assert row["text"] == words.decode(ids[:-1] if ids[-1] == END and row["finish_reason"] == "stop" else ids)
        assert row["text"]
    shown = sample_answers(read_run(tmp_path / "run").requests())
    assert [answer.name for answer in shown] == ["r0", "r1"] + ["r3"] * bool(rows[3]["text"])
    assert (rows[3]["finish_reason"], set("eoa ") & set(rows[3]["text"])) == ("stop", set())


def test_the_conversations_that_come_with_kvlab(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["workload=chat", "workload.num_requests=50", "workload.output_len={min: 6, max: 6}"]
    rows = run(tmp_path / "run", checkpoint, *settings, "kv.block_size=4")
    assert len(rows) == 50
    assert len({row["prompt"] for row in rows}) == 48  # then from the beginning
    assert all(row["prompt"].isascii() and row["text"] for row in rows)
    assert min(row["cached_tokens"] for row in rows[1:]) > 40  # the system prompt
    record = read_run(tmp_path / "run")
    answers = sample_answers(record.requests())
    assert [answer.name for answer in answers] == ["r0", "r12", "r24", "r36", "r49"]
    report = build_report([RunSet("run", (record,))], ReportOptions())
    for text in (to_html(report), to_markdown(report)):
        assert "Why is the sky blue?" in text
        assert "Answers" in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["tokens/output"] > 50


def test_a_sample_is_shown_at_the_end_of_a_run(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Terminal, "print", lambda self, *values, **options: shown.extend(map(str, values)))
    run(tmp_path / "run", checkpoint, "workload=chat", "workload.num_requests=2")
    questions = [index for index, text in enumerate(shown) if text.startswith("r0: Why is the sky blue?")]
    assert len(questions) == 1
    assert " tokens, " in shown[questions[0] + 1]


def test_answers_end_at_the_end_of_sequence(tmp_path: Path, checkpoint: Path, words: Tokenizer) -> None:
    """Which is no part of the text."""
    settings = ["workload=chat", "workload.num_requests=48", "workload.output_len={min: 80, max: 80}"]
    rows = run(tmp_path / "run", checkpoint, *settings, "workload.temperature=3")
    stopped = [row for row in rows if row["finish_reason"] == FinishReason.STOP]
    assert any(len(row["output_token_ids"]) < 80 for row in stopped)
    for row in stopped:
        assert row["output_token_ids"][-1] == END
        assert row["text"] == words.decode(row["output_token_ids"][:-1])


def test_random_weights_have_no_words(tmp_path: Path) -> None:
    run_small(tmp_path / "run")
    assert {row["text"] for row in pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()} == {""}
    with pytest.raises(TokenizerError, match=r"has random weights and no tokenizer; use model=smollm2_135m"):
        run_small(tmp_path / "run", "workload=chat")


def test_text_that_is_refused_is_named(tmp_path: Path, checkpoint: Path) -> None:
    lines = write_lines(tmp_path / "requests.jsonl", {"prompt": "one"}, {"prompt": "half \ud800"})
    with pytest.raises(WorkloadError, match=r"requests\.jsonl, line 2: .*cannot encode"):
        run(tmp_path / "run", checkpoint, "workload=jsonl", lines)
    lines = write_lines(tmp_path / "long.jsonl", {"prompt": "many words " * 300})
    with pytest.raises(
        WorkloadError, match=r"request r0 has a prompt of \d+ tokens .* more than model\.max_seq_len=512"
    ):
        run(tmp_path / "run", checkpoint, "workload=jsonl", lines)


def test_a_template_that_takes_no_system_prompt_is_named(tmp_path: Path) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    directory = write_checkpoint(tmp_path / "words", no_system + TEMPLATE)
    config = composed("model=checkpoint", f"model.path={directory}", "workload=chat")
    with pytest.raises(TokenizerError, match="its chat template does not take the messages: no system"):
        build_requests(config.workload, vocab_size=400, seed=0, tokenizer=lambda: load_tokenizer(config.model))
