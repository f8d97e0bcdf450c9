"""Workloads of JSON lines: what is read, and what is wrong with lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.errors import WorkloadError
from kvlab.workloads import build_requests


def read(path: Path, text: str | bytes, *, vocab_size: int = 100, seed: int = 0) -> list[Request]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    config = WorkloadConfig(source="jsonl", path=str(path))
    return build_requests(config, vocab_size=vocab_size, seed=seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


GOOD = '{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n'


class TestJsonLines:
    def test_reads_prompts_as_they_are(self, path: Path) -> None:
        (request,) = read(path, '{"prompt_token_ids": [0, 99, 5], "max_tokens": 4, "arrival_s": 1.5}')
        assert request.prompt_token_ids == (0, 99, 5)
        assert (request.sampling.max_tokens, request.arrival_s) == (4, 1.5)

    def test_draws_prompts_of_a_given_length(self, path: Path) -> None:
        line = '{"prompt_tokens": 20, "max_tokens": 4}\n'
        first, second = read(path, line * 2)
        assert len(first.prompt_token_ids) == len(second.prompt_token_ids) == 20
        assert first.prompt_token_ids != second.prompt_token_ids
        assert read(path, line * 2) == [first, second]
        assert read(path, line, seed=1)[0].prompt_token_ids != first.prompt_token_ids
        assert set(read(path, '{"prompt_tokens": 500, "max_tokens": 4}', vocab_size=3)[0].prompt_token_ids) == {
            0,
            1,
            2,
        }

    def test_arrives_at_the_start_unless_it_says_otherwise(self, path: Path) -> None:
        assert [r.arrival_s for r in read(path, GOOD)] == [0.0]

    def test_has_no_priority_unless_it_says_so(self, path: Path) -> None:
        urgent = '{"prompt_tokens": 2, "max_tokens": 1, "priority": -3}'
        assert [r.priority for r in read(path, f"{GOOD}{urgent}")] == [0, -3]
        with pytest.raises(WorkloadError, match=r"line 1: .*priority='high'; must be a whole number"):
            read(path, urgent.replace("-3", '"high"'))

    def test_skips_empty_lines(self, path: Path) -> None:
        assert [r.request_id for r in read(path, f"\n{GOOD}  \n{GOOD}")] == ["r0", "r1"]

    def test_sorts_by_arrival_and_keeps_the_order_of_those_that_arrive_together(self, path: Path) -> None:
        lines = [f'{{"prompt_tokens": 2, "max_tokens": 1, "arrival_s": {at}}}' for at in (3, 1, 2.5, 1, 0)]
        requests = read(path, "\n".join(lines))
        assert [(r.request_id, r.arrival_s) for r in requests] == [
            ("r4", 0),
            ("r1", 1),
            ("r3", 1),
            ("r2", 2.5),
            ("r0", 3),
        ]

    def test_takes_a_home_directory(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(path.parent))
        path.write_text(GOOD)
        config = WorkloadConfig(source="jsonl", path=f"~/{path.name}")
        assert len(build_requests(config, vocab_size=10, seed=0)) == 1

    def test_sampling_is_that_of_the_workload(self, path: Path) -> None:
        path.write_text(GOOD)
        config = WorkloadConfig(source="jsonl", path=str(path), temperature=0.7, ignore_eos=False)
        (request,) = build_requests(config, vocab_size=10, seed=0)
        assert (request.sampling.temperature, request.sampling.ignore_eos) == (0.7, False)

    def test_a_line_may_say_how_its_tokens_are_sampled(self, path: Path) -> None:
        said = '"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2, "stop_token_ids": [3, 4], "ignore_eos": false'
        first, second = read(path, f'{{"prompt_tokens": 2, "max_tokens": 4, {said}}}\n{GOOD}')
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.n) == (0.7, 0.9, 5, 2)
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((3, 4), False, 4)
        assert (second.sampling.temperature, second.sampling.n, second.sampling.ignore_eos) == (0.0, 1, True)

    def test_a_line_may_say_whose_it_is_and_what_it_pins(self, path: Path) -> None:
        said = '{"prompt_tokens": 5, "max_tokens": 1, "salt": "ann", "pin_tokens": 4}'
        first, second = read(path, f"{said}\n{GOOD}")
        assert (first.salt, first.pin_tokens, second.salt, second.pin_tokens) == ("ann", 4, None, 0)


BAD_LINES = {
    "not JSON": ("{oops", "Expecting property name"),
    "cut off": ('{"prompt_tokens": 3, "max_tokens":', "Expecting value"),
    "a list": ("[1, 2]", "not a JSON object"),
    "a number": ("7", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "an import": ('{"kvlab_trace": 1, "block_tokens": 16}', "a trace of kvlab, which workload=recorded reads"),
    "unknown field": (
        '{"prompt_tokens": 3, "max_tokens": 1, "prompts": "hi"}',
        "unknown field 'prompts'; known: arrival_s",
    ),
    "no prompt": (
        '{"max_tokens": 1}',
        "needs one of prompt_token_ids, prompt_tokens, prompt, messages; it has none",
    ),
    "two prompts": (
        '{"prompt_tokens": 1, "prompt_token_ids": [1], "max_tokens": 1}',
        "it has prompt_token_ids and prompt_tokens",
    ),
    "text and token ids": (
        '{"prompt": "hi", "prompt_token_ids": [1], "max_tokens": 1}',
        "needs one of prompt_token_ids, prompt_tokens, prompt, messages; it has prompt_token_ids and prompt",
    ),
    "text and messages": ('{"prompt": "hi", "messages": [], "max_tokens": 1}', "it has prompt and messages"),
    "empty text": ('{"prompt": "", "max_tokens": 1}', "prompt='': must be a text, and not empty"),
    "text that is none": ('{"prompt": 5, "max_tokens": 1}', "prompt=5: must be a text, and not empty"),
    "no messages": ('{"messages": [], "max_tokens": 1}', "messages=[]: must be a list of at least one"),
    "message without role": ('{"messages": [{"content": "a"}], "max_tokens": 1}', "must be a list of at least one"),
    "message of parts": (
        '{"messages": [{"role": "user", "content": [1]}], "max_tokens": 1}',
        "must be a list of at least one",
    ),
    "text without a tokenizer": ('{"prompt": "hi", "max_tokens": 1}', "needs text, and there is no tokenizer here"),
    "no max_tokens": ('{"prompt_tokens": 3}', "max_tokens=None: must be a whole number"),
    "max_tokens 0": ('{"prompt_tokens": 3, "max_tokens": 0}', "max_tokens=0: must be a whole number, at least 1"),
    "max_tokens true": ('{"prompt_tokens": 3, "max_tokens": true}', "max_tokens=True: must be"),
    "max_tokens 1.5": ('{"prompt_tokens": 3, "max_tokens": 1.5}', "max_tokens=1.5: must be"),
    "max_tokens text": ('{"prompt_tokens": 3, "max_tokens": "4"}', "max_tokens='4': must be"),
    "prompt_tokens 0": ('{"prompt_tokens": 0, "max_tokens": 1}', "prompt_tokens=0: must be"),
    "prompt_tokens null": ('{"prompt_tokens": null, "max_tokens": 1}', "prompt_tokens=None: must be"),
    "empty prompt": ('{"prompt_token_ids": [], "max_tokens": 1}', "a list of at least one token id"),
    "prompt of text": ('{"prompt_token_ids": "hello", "max_tokens": 1}', "a list of at least one token id"),
    "prompt of fractions": ('{"prompt_token_ids": [1, 2.0], "max_tokens": 1}', "a list of at least one token id"),
    "prompt of booleans": ('{"prompt_token_ids": [true], "max_tokens": 1}', "a list of at least one token id"),
    "token too large": (
        '{"prompt_token_ids": [1, 100], "max_tokens": 1}',
        "100 is outside the model's vocabulary of 100",
    ),
    "token negative": ('{"prompt_token_ids": [-1], "max_tokens": 1}', "-1 is outside the model's vocabulary"),
    "arrival negative": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": -0.5}', "arrival_s=-0.5: must be"),
    "arrival infinite": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": Infinity}', "arrival_s=inf: must be"),
    "arrival not a number": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": NaN}', "arrival_s=nan: must be"),
    "arrival text": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": "0"}', "arrival_s='0': must be"),
    "arrival true": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": true}', "arrival_s=True: must be"),
    "temperature negative": (
        '{"prompt_tokens": 1, "max_tokens": 1, "temperature": -1}',
        "temperature=-1; a number",
    ),
    "top_p text": ('{"prompt_tokens": 1, "max_tokens": 1, "top_p": "0.5"}', "top_p='0.5'; a number in (0, 1]"),
    "stop token outside": (
        '{"prompt_tokens": 1, "max_tokens": 1, "stop_token_ids": [100]}',
        "stop_token_ids=(100,)",
    ),
    "stop strings": ('{"prompt_tokens": 1, "max_tokens": 1, "stop": ["."]}', "needs text"),
    "salt": ('{"prompt_tokens": 1, "max_tokens": 1, "salt": 1.5}', "salt=1.5: must be text or a whole number"),
    "pins too many": (
        '{"prompt_tokens": 3, "max_tokens": 1, "pin_tokens": 4}',
        "pin_tokens=4; must be a whole number of the prompt's first tokens, from 0 to 3",
    ),
    "pins text": (
        '{"prompt_tokens": 3, "max_tokens": 1, "pin_tokens": "2"}',
        "pin_tokens='2'; must be",
    ),
    "arrival null": ('{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": null}', "arrival_s=None: must be"),
}


class TestMalformedFiles:
    @pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=list(BAD_LINES))
    def test_a_bad_line_is_named_by_number_with_what_is_wrong(self, path: Path, line: str, reason: str) -> None:
        with pytest.raises(WorkloadError) as caught:
            read(path, f"{GOOD}\n{GOOD}{line}\n{GOOD}")
        assert str(caught.value).startswith(f"{path}, line 4: ")
        assert reason in str(caught.value)

    def test_an_arrival_beyond_any_number_of_seconds(self, path: Path) -> None:
        with pytest.raises(WorkloadError, match="line 1: arrival_s"):
            read(path, f'{{"prompt_tokens": 1, "max_tokens": 1, "arrival_s": 1{"0" * 400}}}')

    def test_a_file_that_is_not_there(self, path: Path) -> None:
        config = WorkloadConfig(source="jsonl", path=str(path))
        with pytest.raises(WorkloadError, match=f"workload.path={path}: cannot be read: No such file"):
            build_requests(config, vocab_size=10, seed=0)

    def test_a_directory(self, tmp_path: Path) -> None:
        config = WorkloadConfig(source="jsonl", path=str(tmp_path))
        with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
            build_requests(config, vocab_size=10, seed=0)

    @pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
    def test_a_file_without_a_request(self, path: Path, text: str) -> None:
        with pytest.raises(WorkloadError, match="holds no request"):
            read(path, text)

    def test_a_file_that_is_not_text(self, path: Path) -> None:
        with pytest.raises(WorkloadError, match="it is not UTF-8 text"):
            read(path, b"\xff\xfe\x00")
