"""Workloads and requests that would fill the memory, wait for ever or end the process, each with its sentence."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlab.config import LengthConfig, RunConfig, WorkloadConfig
from kvlab.core import MAX_SAMPLES, Request, SamplingParams
from kvlab.errors import CapacityError, ConfigError, RequestRefusedError, WorkloadError
from kvlab.lab.results.provenance import config_digest
from kvlab.workloads import build_requests, lines
from tests.support.commands import TINY, Lab
from tests.support.engines import drain, make_engine, request
from tests.support.model import VOCAB, expected_tokens

GOOD = b'{"prompt_tokens": 3, "max_tokens": 2}\n'
MEMORY = 2**30


def line(**values: object) -> bytes:
    return json.dumps({"prompt_tokens": 3, "max_tokens": 2} | values).encode()


DIGITS, ZEROS = b"9" * 5000, b"0" * 400
LINES: dict[str, tuple[bytes, str]] = {
    "truncated": (b'{"prompt_tokens": 3, "max_tokens"', "Expecting ':' delimiter"),
    "two objects": (b'{"prompt_tokens": 3, "max_tokens": 2} {}', "Extra data"),
    "nested lists": (b"[" * 100_000, "nested too deep"),
    "nested objects": (b'{"a":' * 100_000, "nested too deep"),
    "an object as prompt": (line(prompt_tokens={}), "prompt_tokens={}: must be a whole number"),
    "not a number": (line(temperature=math.nan), "temperature=nan; a number"),
    "infinite temperature": (line(temperature=math.inf), "temperature=inf; a number"),
    "a temperature too large": (b'{"prompt_tokens": 3, "max_tokens": 2, "temperature": 1%s}' % ZEROS, "a number"),
    "a temperature that float32 takes for infinite": (line(temperature=1e300), "at most 1e+09"),
    "a penalty that float32 takes for infinite": (line(repetition_penalty=1e300), "at most 1e+09"),
    "thousands of digits": (b'{"prompt_tokens": 3, "max_tokens": %s}' % DIGITS, "a number of thousands of digits"),
    "a field twice": (b'{"max_tokens": 1, "max_tokens": 2, "prompt_tokens": 3}', "'max_tokens' is there twice"),
    "an id": (line(request_id="r0"), "unknown field 'request_id'; known: arrival_s"),
    "an endless name": (line(**{"x" * 10_000: 1}), "... (10,002 characters)"),
    "an escape sequence": (line(**{"\x1b[2J": 1}), r"unknown field '\x1b[2J'"),
    "NUL bytes": (b"\x00\x00\x00", "Expecting value"),
    "NUL in a string": (line(stop=["\x00"]), "needs text"),
    "UTF-16": ("{}".encode("utf-16"), "it is not UTF-8 text"),
    "Latin-1": (b'{"prompt_tokens": 3, "max_tokens": 2, "stop": ["\xe9"]}', "it is not UTF-8 text"),
    "a million samples": (line(n=10**6), "n=1000000; at most 128"),
    "samples below nothing": (line(n=-1), "n=-1; at least 1 sample"),
    "samples as text": (line(n="2"), "n='2'; must be a whole number"),
    "all log-probabilities": (line(logprobs=150_000), "logprobs=150000; at most 20"),
    "tokens without end": (line(max_tokens=10**12), "max_tokens=1000000000000; at most 2147483647"),
    "a prompt that fills the memory": (line(prompt_tokens=10**9), "prompt_tokens=1000000000: at most 10000000"),
    "stop strings without end": (line(stop=["x"] * 17), "has 17 strings; at most 16"),
    "an endless stop string": (line(stop=["x" * 2000]), "a string of 2,000 characters; at most 1024"),
    "stop tokens without end": (line(stop_token_ids=[1] * 301), "has 301 token ids; at most 300"),
    "a stop token outside": (line(stop_token_ids=[10**30]), "from 0 to below 100"),
    "stop tokens that are lists": (line(stop_token_ids=[[1]]), "must be a tuple of token ids"),
    "top_k beyond 64 bits": (line(top_k=2**70), "at most 2147483647"),
    "a priority beyond all floats": (line(priority=10**400), "must be a whole number from -2147483647"),
    "a priority as truth": (line(priority=True), "priority=True; must be a whole number"),
    "a deadline beyond all floats": (line(deadline_s=10**400), "must be seconds, more than 0, or None"),
    "a deadline that has passed": (line(deadline_s=-1), "must be seconds, more than 0, or None"),
    "an arrival that never comes": (line(arrival_s=1e308), "arrival_s=1e+308: must be a number of seconds"),
    "a token beyond 64 bits": (b'{"prompt_token_ids": [%d], "max_tokens": 1}' % (2**70), "is outside"),
    "a negative token": (b'{"prompt_token_ids": [3, -1], "max_tokens": 1}', "-1 is outside"),
    "a list of lists as prompt": (b'{"prompt_token_ids": [[1]], "max_tokens": 1}', "at least one token id"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "fragment"), LINES.values(), ids=list(LINES))
def test_a_hostile_line_is_refused_by_its_number(text: bytes, fragment: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(GOOD + text + b"\n" + GOOD)
    with pytest.raises(WorkloadError) as refused:
        read(file)
    assert f"{file}, line 2: " in str(refused.value)
    assert fragment in str(refused.value)
    assert len(str(refused.value)) < 800
    assert str(refused.value).isprintable()


def read(file: Path, memory: int | None = MEMORY) -> list[Request]:
    config = WorkloadConfig(name="file", source="jsonl", path=str(file))
    return build_requests(config, vocab_size=100, seed=0, memory=memory)


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def link(path: Path) -> Path:
    path.symlink_to(path)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def written(*parts: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(b"".join(parts))
        return path

    return write


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a directory": (directory, "cannot be read: Is a directory"),
    "a pipe that nobody writes": (pipe, "cannot be read: it is a pipe or a device, not a file"),
    "a device without end": (lambda path: Path("/dev/zero"), "it is a pipe or a device, not a file"),
    "a broken link": (link, "cannot be read: "),
    "below a file": (lambda path: written(b"")(path) / "x", "cannot be read: Not a directory"),
    "the home of nobody": (lambda path: Path("~nobody-at-all/x"), "cannot be read: Could not determine home"),
    "a name with NUL": (lambda path: Path("a\x00b"), r"workload.path=a\x00b: cannot be read: embedded null byte"),
    "a name without end": (lambda path: Path("x" * 5000), "cannot be read: File name too long"),
    "empty": (written(b""), "holds no request"),
    "a byte order mark alone": (written(b"\xef\xbb\xbf"), "holds no request"),
}


@pytest.mark.parametrize(("make", "fragment"), FILES.values(), ids=list(FILES))
def test_a_hostile_file_is_refused(make: Callable[[Path], Path], fragment: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as refused:
        read(make(tmp_path / "requests.jsonl"))
    assert fragment in str(refused.value)
    assert str(refused.value).isprintable()


def test_a_line_is_not_read_beyond_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**20)
    file = written(GOOD, b" " * 100, b"[" * 2**21, GOOD)(tmp_path / "requests.jsonl")
    with pytest.raises(WorkloadError, match="line 2: is longer than 1 MiB"):
        read(file)


def test_a_file_is_not_read_beyond_the_memory(tmp_path: Path) -> None:
    file = written(*[line(prompt_tokens=1000) + b"\n"] * 50)(tmp_path / "requests.jsonl")
    text = "with request 22 the requests take more than the 1.0 MiB that are available; the 21 before it would fit"
    with pytest.raises(CapacityError, match=text):
        read(file, 2**20)
    assert len(read(file)) == 50


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        b"\n \n" + GOOD,
        GOOD.strip(),
        GOOD.replace(b" ", b"\t"),
    ],
    ids=["byte order mark", "CRLF", "blank lines", "no end of line", "tabs"],
)
def test_what_other_systems_write_is_read(text: bytes, tmp_path: Path) -> None:
    assert len(read(written(text)(tmp_path / "requests.jsonl"))) == 1


REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "a million samples": ({"n": 10**6}, "n=1000000; at most 128"),
    "all log-probabilities": ({"logprobs": 21}, "logprobs=21; at most 20"),
    "stop strings without end": ({"stop": ("x",) * 17}, "has 17 strings; at most 16"),
    "an endless stop string": ({"stop": ("x" * 1025,)}, "a string of 1,025 characters; at most 1024"),
    "stop tokens without end": ({"stop_token_ids": (1,) * 301}, "has 301 token ids; at most 300"),
    "tokens without end": ({"max_tokens": 10**5000}, "max_tokens=(a number of thousands of digits); at most"),
    "more tokens than the pool has": ({"max_tokens": 10**6}, "1000000 output tokens can never fit"),
    "top_k beyond 64 bits": ({"top_k": 10**30}, "at most 2147483647"),
    "a temperature beyond all floats": ({"temperature": 10**400}, "a number, at least 0"),
    "a penalty beyond float32": ({"repetition_penalty": 1e39}, "at most 1e+09"),
}


@pytest.mark.parametrize(("values", "fragment"), REQUESTS.values(), ids=list(REQUESTS))
def test_a_hostile_request_is_refused_and_the_others_go_on(values: dict[str, Any], fragment: str) -> None:
    engine = make_engine(vocab_size=VOCAB, detokenize=str)
    other = engine.add_request(request("other", 9, 6))
    with pytest.raises(RequestRefusedError) as refused:
        engine.add_request(Request("hostile", (1, 2), SamplingParams(**({"max_tokens": 5} | values))))
    assert fragment in str(refused.value)
    drain(engine)
    assert other.output_token_ids == expected_tokens(other.request)


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        ({"prompt_token_ids": 7}, "prompt_token_ids=7; must be a tuple of token ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids=None; must be a tuple of token ids"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids='text'; must be a tuple of token ids"),
        ({"prompt_token_ids": (10**5000,)}, "outside the vocabulary"),
        ({"priority": 10**400}, "must be a whole number from -2147483647"),
        ({"priority": None}, "priority=None; must be a whole number"),
        ({"deadline_s": 10**400}, "must be seconds, more than 0, or None"),
    ],
)
def test_what_is_no_request_is_refused(values: dict[str, Any], fragment: str) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        make_engine(vocab_size=VOCAB).add_request(replace(request("hostile", 3, 2), **values))
    assert fragment in str(refused.value)


def test_the_most_that_a_request_may_ask_for_is_served() -> None:
    engine = make_engine(vocab_size=VOCAB, detokenize=str)
    stops = tuple("x" * 1024 for _ in range(16))
    first = engine.add_request(
        request("most", 3, 1, n=MAX_SAMPLES, logprobs=20, stop=stops, stop_token_ids=(1,) * 300)
    )
    drain(engine)
    assert all(sequence.num_output_tokens == 1 for sequence in (first, *first.siblings))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "requests": ({"num_requests": 10**12}, "num_requests=1000000000000: these requests would take 13"),
    "turns": ({"turns": 10**9}, "not one of them fits: take shorter prompts, fewer groups or fewer turns"),
    "groups": ({"num_groups": 10**10}, "not one of them fits"),
    "a long prompt": ({"prompt_len": LengthConfig(1, 2**31 - 1)}, "not one of them fits"),
    "a longer prompt": ({"prompt_len": LengthConfig(1, 2**31)}, "prompt_len.max=2147483648: must be"),
    "a system prompt": ({"system_len": 10**12}, "not one of them fits"),
    "samples": ({"samples": 10**6}, "samples=1000000: must be a number, at most 128"),
    "priorities": ({"priorities": 10**30}, "must be a number, at most 2147483647"),
    "sigma": ({"output_len": LengthConfig(1, 9, "lognormal", 3.0, 1e9)}, "sigma=1000000000.0: must be"),
    "no arrival": ({"arrival": "poisson", "rate": 1e-300}, "16 requests would arrive in more than a year"),
    "a slow arrival": ({"arrival": "uniform", "rate": 1e-7}, "take 5e-07 requests per second, or fewer requests"),
    "a rate of nothing": ({"arrival": "uniform", "rate": math.nan}, "rate=nan: must be a number, at least 0"),
    "an endless pause": ({"think_s": 1e308}, "think_s=1e+308: must be a number, at most 31622400"),
    "popularity": ({"zipf": math.inf}, "zipf=inf: must be a number, at most 100"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "fragment"), SETTINGS.values(), ids=list(SETTINGS))
def test_hostile_settings_are_refused_before_a_request_is_made(values: dict[str, Any], fragment: str) -> None:
    with pytest.raises((ConfigError, CapacityError)) as refused:
        build_requests(WorkloadConfig(name="x", **values), vocab_size=100, seed=0, memory=MEMORY)
    assert fragment in str(refused.value)


def test_as_many_requests_fit_as_the_sentence_says() -> None:
    config = WorkloadConfig(name="x", num_requests=10**6, turns=2, system_len=9, prompt_len=LengthConfig(5, 9))
    with pytest.raises(CapacityError) as refused:
        build_requests(config, vocab_size=100, seed=0, memory=2**20)
    fitting = int(str(refused.value).rpartition("workload.num_requests=")[2].split()[0])
    assert 100 < fitting < 500
    assert (
        len(build_requests(replace(config, num_requests=fitting), vocab_size=100, seed=0, memory=2**20)) > fitting
    )


def test_a_file_counts_by_its_content_in_a_digest_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(path: Path) -> str:
        return config_digest(RunConfig(workload=WorkloadConfig(name="file", source="jsonl", path=str(path))))

    monkeypatch.setenv("HOME", str(tmp_path))
    written(GOOD)(tmp_path / "requests.jsonl")
    assert digest(Path("~/requests.jsonl")) == digest(tmp_path / "requests.jsonl")
    for make, _ in FILES.values():
        assert digest(make(tmp_path / make.__qualname__.replace("<", "").replace(">", ""))), "none is opened"


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a file": (["workload=jsonl", "workload.path={file}"], "error: {file}, line 2: request 'r1': n=1000000"),
    "requests": (["workload.num_requests=1000000000000"], "error: workload.num_requests=1000000000000: these"),
    "a rate": (["workload.arrival=poisson", "workload.rate=1e-300"], "error: workload.rate=1e-300: the last of 3"),
    "a length": (["workload.prompt_len.sigma=1e9"], "error: workload.prompt_len.sigma=1000000000.0: must"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), COMMANDS.values(), ids=list(COMMANDS))
def test_a_run_of_it_ends_with_the_sentence(settings: list[str], sentence: str, tmp_path: Path) -> None:
    file = written(GOOD, line(n=10**6))(tmp_path / "requests.jsonl")
    given = [text.format(file=file) for text in settings]
    keys = {text.partition("=")[0] for text in given}
    tiny = (text for text in TINY if text.partition("=")[0] not in keys)  # twice would be warned of
    ended = Lab(tmp_path, (*tiny, "tracking=off")).here(*given)
    assert ended.code == 2
    assert ended.output.startswith(sentence.format(file=file))
    assert ended.output.count("\n") == 1
