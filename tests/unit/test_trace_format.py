"""Hashes of prompts: equal where prompts begin alike, and nothing to anybody without the secret."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import WorkloadConfig
from kvlab.errors import WorkloadError
from kvlab.server.tracing import TraceFile
from kvlab.workloads import build_requests
from kvlab.workloads.exporting import export_trace
from kvlab.workloads.prompt_blocks import BlockHasher
from kvlab.workloads.trace_format import Header, TracedRequest, read_header, read_trace, write_trace

SECRET = b"0123456789abcdef"
PROMPTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@given(one=PROMPTS, other=PROMPTS, size=st.integers(1, 8), same=st.integers(0, 40))
def test_hashes_are_equal_as_far_as_whole_blocks_are(
    one: list[int], other: list[int], size: int, same: int
) -> None:
    other = one[:same] + other
    first, second = (BlockHasher(SECRET, size).tokens(prompt) for prompt in (one, other))
    assert [len(first), len(second)] == [-(-len(one) // size), -(-len(other) // size)]
    for place, pair in enumerate(zip(first, second, strict=False)):
        end = (place + 1) * size
        assert (pair[0] == pair[1]) == (one[:end] == other[:end])


@given(PROMPTS)
def test_who_has_not_the_secret_cannot_check_a_guess(prompt: list[int]) -> None:
    hashes = set(BlockHasher(SECRET, 4).tokens(prompt))
    guesses = (b"", b"0" * 16, SECRET[::-1], SECRET[:-1] + b"g")
    assert not any(hashes & set(BlockHasher(guess, 4).tokens(prompt)) for guess in guesses)
    keys = {BlockHasher(secret, 4).key_id for secret in (SECRET, *guesses)}
    assert len(keys) == 5


REQUESTS = [
    TracedRequest(
        33, 0.0, 4, (1, 2**64 - 1, 3), "stop", "a", 9, 0.5, 16, 1.5, 20.0, 60.0, (10.0, 10.0), "Why?", "So."
    ),
    TracedRequest(7),
]


@pytest.mark.parametrize("name", ["trace.jsonl", "deep/trace.jsonl.gz", "trace.parquet"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path, header = tmp_path / name, Header(16, "ab", "t", "openai", ("times", "outputs"), text=True)
    assert write_trace(path, header, REQUESTS) == 2
    assert read_header(str(path)) == header
    found = [request for _, request in read_trace(str(path), text=True)]
    found[0].itl_ms, found[0].hashes = tuple(found[0].itl_ms or ()), tuple(found[0].hashes or ())
    assert found == REQUESTS
    assert {(each.prompt, each.output) for _, each in read_trace(str(path))} == {(None, None)}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_nothing_is_left_of_a_trace_that_fails(tmp_path: Path) -> None:
    def requests() -> object:
        yield REQUESTS[0]
        raise WorkloadError("line 2")

    with pytest.raises(WorkloadError, match="line 2"):
        write_trace(tmp_path / "a.jsonl", Header(), requests())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_text_is_for_its_owner_alone_whatever_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.with_name("a.jsonl.part").touch(0o666)
    write_trace(path, Header(text=True), [TracedRequest(5, prompt="a secret")])
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a trace of kvlab, as kvlab import makes"),
        ('{"timestamp": 0}\n', "line 1: is no trace of kvlab; kvlab import FILE makes one of other formats"),
        ('{"kvlab_trace": 2}\n', "line 1: is of version 2, and this kvlab reads 1"),
        ('{"kvlab_trace": 1, "block_tokens": 0}\n', "column block_tokens: 0; expected a whole number"),
        ('{"kvlab_trace": 1}\n{"arrival_s": 1}\n', "line 2: a prompt of None tokens"),
        ('{"kvlab_trace": 1}\n{"prompt_tokens": 20, "hashes": ["a"]}\n', "line 2: expected 2 hashes of 64 bits"),
        ('{"kvlab_trace": 1}\n{"prompt_tokens": 2, "hashes": ["x"]}\n', "expected a list of 16 hexadecimal digits"),
        (
            '{"kvlab_trace": 1}\n{"prompt_tokens": 2, "arrival_s": "x"}\n',
            "line 2: arrival_s is 'x', not a number",
        ),
        ('{"kvlab_trace": 1}\n{"prompt_tokens"\n{"prompt_tokens": 2}\n', "line 2: "),
        ('{"kvlab_trace": 1, "unknown": 5}\n', "line 1, column unknown: 5; expected the header of a trace"),
        ('{"kvlab_trace": 1, "started": "x"}\n', "line 1, column started: 'x'; expected the header of a trace"),
        ('{"kvlab_trace": 1}\n', "holds no request; expected a request behind its header"),
        (
            '{"kvlab_trace": 1}\n{"prompt_tokens": 2, "arrival_s": 0, "output_tokens": 0}\n',
            "holds no request that was served: none of 1 has output",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    config = WorkloadConfig("recorded", "recorded", path=str(path), arrival="trace")
    with pytest.raises(WorkloadError) as caught:
        build_requests(config, vocab_size=100, seed=1)
    assert message in str(caught.value)


def test_outputs_that_are_not_known_are_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, Header(unknown=("times", "outputs")), [TracedRequest(7), TracedRequest(8)] * 20)
    config = WorkloadConfig("recorded", "recorded", path=str(path), arrival="burst")
    config.output_len.max = 50
    one, other = (build_requests(config, vocab_size=100, seed=1) for _ in range(2))
    lengths = [request.sampling.max_tokens for request in one]
    assert lengths == [request.sampling.max_tokens for request in other]
    assert len(set(lengths)) > 10


def test_an_output_that_is_drawn_is_no_longer_than_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, Header(unknown=("times", "outputs")), [TracedRequest(7, max_tokens=9)] * 20)
    config = WorkloadConfig("recorded", "recorded", path=str(path), arrival="burst")
    config.output_len.max = 500
    requests = build_requests(config, vocab_size=100, seed=1)
    assert {request.sampling.max_tokens for request in requests} == {9}
    assert max(request.expected_tokens for request in requests) == 9


def test_sessions_and_blocks_of_a_trace_are_exported(tmp_path: Path) -> None:
    """Two turns whose first 512 of 600 tokens are equal, in blocks of 256 tokens."""
    requests = [TracedRequest(600, time, 5, (1, 2, 3 + time), session="a") for time in (0, 1)]
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out"
    write_trace(trace, Header(256), requests)

    def exported(name: str) -> list[str]:
        export_trace(str(trace), name, out)
        return out.read_text().splitlines()

    assert [json.loads(line)["hash_ids"] for line in exported("mooncake")] == [[0, 1], [0, 2]]
    first, second = (json.loads(line) for line in exported("timed_trace"))
    assert [(turn["chat_id"], turn["parent_chat_id"]) for turn in (first, second)] == [(0, -1), (1, 0)]
    assert first["hash_ids"][:32] == second["hash_ids"][:32]
    assert not set(first["hash_ids"][32:]) & set(second["hash_ids"])
    assert [line.split(",")[1] for line in exported("burstgpt")] == ["Session ID", "a", "a"]


@pytest.mark.parametrize("room", [0, 20, 90])  # bytes: nothing, a part of the header, a part of a line
def test_a_recorded_trace_is_whole_behind_a_disk_that_was_full(tmp_path: Path, room: int) -> None:
    path, usual = tmp_path / "a.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    file, written = TraceFile(path, Header(source="record")), list[int]()

    def fill() -> None:
        while True:
            file.write(TracedRequest(1 + len(written), float(len(written))))
            written.append(1 + len(written))

    resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    file.write(TracedRequest(77, 9.0))
    assert [request.prompt_tokens for _, request in read_trace(str(path))] == [*written, 77]
