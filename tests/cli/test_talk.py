"""kvlab generate and kvlab chat, on a tiny checkpoint."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlab.cli import chat, generate
from kvlab.cli.generate import TalkSettings
from kvlab.core import Message
from kvlab.errors import TokenizerError, printable
from kvlab.lab.run.speaker import Speaker
from kvlab.models.conversation import Conversation
from kvlab.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.plans import compose_run
from tests.support.words import setting, write_checkpoint

SETTINGS = ("model=checkpoint", "model.name=words", "executor.threads=1", "executor=cpu", "executor.dtype=float32")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def words(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(setting(checkpoint))


@pytest.fixture
def run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with these arguments; its code, output and errors. `typed` comes from a pipe."""

    def go(
        command: object, *arguments: str, typed: str | None = "", path: Path = checkpoint
    ) -> tuple[int, str, str]:
        name = getattr(command, "__name__", "").rpartition(".")[2]
        monkeypatch.setattr(sys, "argv", [f"kvlab {name}", *SETTINGS, f"model.path={path}", *arguments])
        if isinstance(typed, str):
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = 0
        try:
            command.main()  # type: ignore[attr-defined]
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return go


class TestGenerate:
    def test_streams_the_answer_then_its_speed_and_memory(
        self, run: Run, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pieces: list[str] = []
        write = generate.write

        def keep(text: str) -> None:
            pieces.append(text)
            write(text)

        monkeypatch.setattr(generate, "write", keep)
        code, out, err = run(generate, "Who are you?", "max_tokens=12", "kv.block_size=8")
        assert (code, out) == (0, printable("".join(pieces)) + "\n")
        assert len([piece for piece in pieces if piece]) > 3
        prompt = len(words.encode_prompt([Message("user", "Who are you?")]))
        blocks = -(-(prompt + 12) // 8)
        assert re.fullmatch(
            rf"\[12 tokens: the first after [\d,]+ ms, then [\d.]+ tok/s; KV cache: {blocks} blocks of 8 tokens, "
            rf"{blocks * 8 * 2 * 2 * 2 * 8 * 4 / 1024:.1f} KiB\]\n",
            err,
        )

    def test_takes_words_without_quotes_and_from_a_pipe(self, run: Run) -> None:
        first = run(generate, "Who", "are", "max_tokens=6", "you?")
        assert first[:2] == run(generate, "max_tokens=6", typed="Who are you?\n")[:2]
        assert first[:2] == run(generate, "max_tokens=6", "prompt='Who are you?'")[:2]

    def test_continues_raw_text(self, run: Run, words: Tokenizer, checkpoint: Path) -> None:
        _, out, _ = run(generate, "--raw", "I am a", "max_tokens=5")
        assert out != run(generate, "I am a", "max_tokens=5")[1]
        config = compose_run(*SETTINGS, f"model.path={checkpoint}", "tracking=off")
        sampling = TalkSettings(max_tokens=5).sampling(0)
        spoken = Speaker(config).answer(words.encode("I am a"), sampling, lambda text: None)
        assert out == words.decode(spoken.token_ids) + "\n"

    def test_a_model_that_was_not_trained_to_chat_continues_text(self, run: Run, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "base", template=None)
        assert (
            run(generate, "I am a", "max_tokens=5", path=path)[1]
            == run(generate, "I am a", "--raw", "max_tokens=5")[1]
        )
        code, _, err = run(generate, "I am a", "system=Hello", path=path)
        assert (code, err) == (2, "error: system=Hello: needs a chat template; leave it out, and raw=true too\n")

    def test_ctrl_c_ends_the_answer(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        pieces: list[str] = []
        before = signal.getsignal(signal.SIGINT)

        def interrupt(text: str) -> None:
            pieces.append(text)
            if len(pieces) == 3:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(generate, "write", interrupt)
        code, _, err = run(generate, "Who are you?", "max_tokens=100")
        assert code == 130
        assert err.startswith("[3 tokens: ")
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ([], 'prompt=null: give the words: kvlab generate "Why is the sky blue?"'),
            (["hello", "max_tokens=0"], "max_tokens=0: must be a number, at least 1"),
            (["hello", "temperature=-1"], "temperature=-1.0: must be a number from 0 (greedy) to 100"),
            (["hello", "model.max_seq_len=16"], "the prompt has 24 tokens, and the model takes 16 with its answer"),
            (
                ["hello", "executor.kind=simulated", "hardware=h200_sxm"],
                "executor.kind=simulated: computes nothing",
            ),
            (["hello", "model.pathh=x"], "model.pathh=x: "),
        ],
    )
    def test_a_mistake_is_one_sentence(self, run: Run, arguments: list[str], sentence: str) -> None:
        code, out, err = run(generate, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {sentence}")
        assert err.count("\n") == 1

    def test_random_weights_have_no_words(self, run: Run) -> None:
        code, _, err = run(generate, "hello", "model=qwen3_tiny", "model.path=null")
        assert code == 2
        assert "model.name=words has random weights and no tokenizer; use model=smollm2_135m (kvlab fetch" in err


class TestChat:
    def test_ten_turns_compute_the_new_tokens_alone(self, checkpoint: Path, words: Tokenizer) -> None:
        size = 4
        overrides = (
            "model.max_seq_len=2048",
            f"kv.block_size={size}",
            "scheduler.max_batch_size=1",
            "tracking=off",
        )
        speaker = Speaker(compose_run(*SETTINGS, f"model.path={checkpoint}", *overrides))
        talk, before = Conversation(words, "Be brief."), 0
        for turn in range(10):
            text = f"Turn {turn}: who are you?"
            ids = talk.ask(text)
            spoken = speaker.answer(ids, TalkSettings(max_tokens=20).sampling(0), lambda text: None)
            talk.answered(text, ids, spoken.token_ids)
            computed = len(ids) - spoken.record.cached_tokens
            # The last token of an answer was never computed, nor are blocks shared that are not full.
            assert computed <= len(ids) - before + size
            assert turn == 0 or computed < 60
            before = len(ids) + len(spoken.token_ids)
        assert before > 400

    def test_the_tokens_are_those_of_the_whole_conversation(self, words: Tokenizer) -> None:
        talk = Conversation(words)
        first = talk.ask("Who are you?")
        answer = words.encode(" I am 12")
        talk.answered("Who are you?", first, answer)
        messages = [Message("user", "Who are you?"), Message("assistant", " I am 12"), Message("user", "And 日本?")]
        assert talk.ask("And 日本?") == words.encode_prompt(messages)
        assert talk.ask("And 日本?")[: len(first) + len(answer)] == first + answer

    def test_a_template_that_changes_earlier_turns_is_followed(self, tmp_path: Path) -> None:
        last_only = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
        found = load_tokenizer(setting(write_checkpoint(tmp_path / "words", last_only)))
        talk = Conversation(found)
        talk.answered("one", talk.ask("one"), found.encode("two"))
        assert talk.ask("three") == found.encode("three")

    def test_from_a_pipe(self, run: Run) -> None:
        code, out, err = run(chat, "max_tokens=8", "kv.block_size=4", typed="Who are you?\n\nI am\n/new\nI am\n")
        assert (code, err) == (0, "")
        found = re.findall(
            r"^\[prefix cache: (\d+) of (\d+) prompt tokens found, (\d+) computed; .* KiB\]$", out, re.M
        )
        assert len(found) == 3
        assert int(found[0][0]) == 0
        assert int(found[1][0]) >= int(found[0][1])
        assert int(found[2][0]) < int(found[1][0])
        assert out.startswith("> Who are you?\n")
        assert out.endswith("> \n")

    def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Keyboard:
            lines = iter(("Who are you?\n", "I am\n"))

            def isatty(self) -> bool:
                return True

            def readline(self) -> str:
                try:
                    return next(self.lines)
                except StopIteration:
                    raise KeyboardInterrupt from None

        pieces = 0
        write = generate.write

        def interrupt(text: str) -> None:
            nonlocal pieces
            pieces += 1
            write(text)
            if pieces == 4:  # the third of the first answer, behind the prompt
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(chat, "write", interrupt)
        monkeypatch.setattr(sys, "stdin", Keyboard())
        code, out, err = run(chat, "max_tokens=30", typed=None)
        assert (code, err) == (0, "")
        answers = re.findall(r"computed; (\d+) tokens:", out)
        assert (len(answers), answers[0]) == (2, "3")
        assert int(answers[1]) > 3

    def test_a_message_that_is_too_long_costs_a_sentence_and_no_chat(self, run: Run) -> None:
        code, out, err = run(
            chat, "max_tokens=4", "model.max_seq_len=128", typed=f"Hello\n{'long words ' * 90}\nAgain\n"
        )
        assert code == 0
        assert re.search(r"^error: the prompt has [\d,]+ tokens, and the model takes 128 with its answer", err)
        assert out.count("[prefix cache: ") == 2

    def test_a_model_without_a_chat_template_is_refused_at_once(self, run: Run, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "base", template=None)
        code, out, err = run(chat, typed="Hello\n", path=path)
        assert (code, out) == (2, "")
        assert "has no chat template, which messages need" in err

    def test_words_are_for_generate(self, run: Run) -> None:
        code, _, err = run(chat, "hello", "there")
        assert (code, err) == (
            2,
            'error: chat=hello there: takes settings alone; ask once with kvlab generate "hello there"\n',
        )


def test_a_failed_answer_is_told(checkpoint: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker(compose_run(*SETTINGS, f"model.path={checkpoint}", "tracking=off"))

    def fail(text: str) -> None:
        raise ValueError("the screen is gone")

    with pytest.raises(
        TokenizerError, match="the answer failed: its callback raised ValueError: the screen is gone"
    ):
        speaker.answer(words.encode("I am"), TalkSettings(max_tokens=5).sampling(0), fail)
