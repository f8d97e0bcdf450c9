"""Recorded traffic: what each format's reader makes of small files of that format, and what it refuses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.errors import CapacityError, RequestRefusedError, WorkloadError
from kvlab.hashed_prompt import HashedPrompt
from kvlab.workloads import build_requests
from kvlab.workloads.describe import workload_digest
from kvlab.workloads.lines import read_head
from kvlab.workloads.trace_format import read_header
from tests.support.engines import make_engine, request
from tests.support.model import VOCAB

AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,7,2\n2024-05-10 00:00:00.5+00:00,8,3\n"
)
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_1 += "5,ChatGPT,7,2,9,Conversation log\n5.0,GPT-4,4,0,4,API log\n7.5,ChatGPT,8.0,3,11,Conversation log\n"
BURST_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 += '19440110.0,"17,22",43,GPT-4,7,2,9,Conversation log\n19440112.5,d,2,ChatGPT,8,3,11,API log\n'
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7,2,9,3.5\n8,3,11,2.6\n"


def mooncake(*rows: tuple[object, object, object, object]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def read(path: Path, source: str, text: str | bytes, *, vocab_size: int = 500, **values: Any) -> list[Request]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    settings = {"arrival": "burst" if source == "sharegpt_lengths" else "trace"} | values
    config = WorkloadConfig(source=source, path=str(path), **settings)
    return build_requests(config, vocab_size=vocab_size, seed=3)


def shapes(requests: list[Request]) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, len(r.prompt_token_ids), r.sampling.max_tokens) for r in requests]


@pytest.mark.parametrize(
    ("source", "text", "second_s"),
    [
        ("azure", AZURE_2024, 0.5),
        ("azure", AZURE_2024.replace("+00:00", "").replace("\n", "\r\n"), 0.5),
        ("burstgpt", BURST_1, 2.5),
        ("burstgpt", BURST_2, 2.5),
        ("sharegpt_lengths", LENGTHS, 0.0),
        ("mooncake", mooncake((100, 7, 2, [0]), (350, 8, 3, [1])), 0.25),
        ("timed_trace", mooncake((100, 7, 2, [0]), (100.25, 8, 3, [2**64 - 1])), 0.25),
    ],
    ids=["azure 2024", "azure with CRLF", "burstgpt 1", "burstgpt 2", "sharegpt", "mooncake", "timed_trace"],
)
def test_a_format_is_read(path: Path, source: str, text: str, second_s: float) -> None:
    requests = read(path, source, text)
    assert shapes(requests) == [(0.0, 7, 2), (pytest.approx(second_s), 8, 3)]
    first, second = (tuple(r.prompt_token_ids) for r in requests)
    assert first != second[:7]
    assert read(path, source, text) == requests


def test_a_failed_request_of_burstgpt_is_left_out_and_the_others_keep_their_numbers(path: Path) -> None:
    assert [r.request_id for r in read(path, "burstgpt", BURST_1)] == ["r0", "r2"]


class TestSelection:
    """Of a trace with a request every second for 100 s."""

    TEXT = mooncake(*((1000 * number, 20 + number, 1, [number]) for number in range(100)))

    def read(self, path: Path, **values: Any) -> list[Request]:
        return read(path, "mooncake", self.TEXT, **values)

    @pytest.mark.parametrize(
        ("window", "first", "last"), [("10", 0, 9), ("10-20", 10, 19), ("9.5-10.5", 10, 10), ("95-400", 95, 99)]
    )
    def test_a_window_has_its_requests_as_they_are_in_the_whole(
        self, path: Path, window: str, first: int, last: int
    ) -> None:
        requests, start = self.read(path, window=window), float(window.split("-")[0]) if "-" in window else 0.0
        assert [r.request_id for r in requests] == [f"r{number}" for number in range(first, last + 1)]
        assert [r.arrival_s for r in requests] == [number - start for number in range(first, last + 1)]
        assert [r.prompt_token_ids for r in requests] == [
            r.prompt_token_ids for r in self.read(path)[first : last + 1]
        ]

    def test_lines_behind_the_window_are_not_read(self, path: Path) -> None:
        assert len(read(path, "mooncake", self.TEXT + "oops", window="50")) == 50

    def test_twice_the_rate_is_half_the_time(self, path: Path) -> None:
        assert [r.arrival_s for r in self.read(path, rate_scale=2.0)] == [number / 2 for number in range(100)]
        assert self.read(path, window="40-50", rate_scale=0.5)[1].arrival_s == 2.0

    def test_a_sample_is_drawn_by_the_seed_and_a_larger_one_has_all_of_it(self, path: Path) -> None:
        third, half = ({r.request_id: r for r in self.read(path, sample=share)} for share in (0.3, 0.5))
        assert 20 <= len(third) <= 40 < len(half) <= 60
        assert third.items() <= half.items() <= {r.request_id: r for r in self.read(path)}.items()
        config = WorkloadConfig(source="mooncake", path=str(path), arrival="trace", sample=0.3)
        other = build_requests(config, vocab_size=500, seed=4)
        assert {r.request_id for r in other} != set(third)

    def test_lengths_without_times_are_sampled_too(self, path: Path) -> None:
        text = LENGTHS.splitlines()[0] + "\n" + "7,2,9,3.5\n" * 100
        assert 35 <= len(read(path, "sharegpt_lengths", text, sample=0.5)) <= 65

    def test_a_sample_has_a_conversation_as_a_whole(self, path: Path) -> None:
        rows = "".join(f"{number},s{number % 10},1,GPT-4,9,1,10,log\n" for number in range(100))
        requests = read(path, "burstgpt", BURST_2.splitlines()[0] + "\n" + rows, sample=0.5)
        numbers = [int(r.request_id[1:]) for r in requests]
        assert 0 < len(numbers) < 100
        assert numbers == [number for number in range(100) if number % 10 in {each % 10 for each in numbers}]

    @pytest.mark.parametrize("root", [-1, None, 700])  # the last: of a chat that is not in the file
    def test_chats_that_go_on_from_each_other_are_a_conversation(self, path: Path, root: int | None) -> None:
        lines = []
        for number in range(100):
            parent = number - 10 if number > 9 else root + number if root == 700 else root
            about = {"chat_id": number, "parent_chat_id": parent, "timestamp": number, "hash_ids": [number]}
            lines.append(json.dumps(about | {"input_length": 9, "output_length": 2}) + "\n")
        rows = "".join(lines)
        numbers = [int(r.request_id[1:]) for r in read(path, "timed_trace", rows, sample=0.5)]
        assert 0 < len(numbers) < 100
        assert numbers == [number for number in range(100) if number % 10 in {each % 10 for each in numbers}]

    @pytest.mark.parametrize("name", ["session_id", "chat_id"])
    def test_requests_whose_conversation_is_null_have_none(self, path: Path, name: str) -> None:
        row = {name: None, "timestamp": 1, "hash_ids": [1], "input_length": 9, "output_length": 2}
        assert 35 <= len(read(path, "timed_trace", 100 * (json.dumps(row) + "\n"), sample=0.5)) <= 65

    def test_other_arrivals_leave_lengths_and_prompts_as_they_are(self, path: Path) -> None:
        requests = self.read(path, arrival="gamma", rate=2.0, burstiness=0.3)
        assert [r.prompt_token_ids for r in requests] == [r.prompt_token_ids for r in self.read(path)]
        assert [r.arrival_s for r in requests] != [r.arrival_s for r in self.read(path)]

    @pytest.mark.parametrize(("window", "last"), [("100-200", 99), ("0.5-0.7", 1)])
    def test_a_window_without_a_request(self, path: Path, window: str, last: int) -> None:
        with pytest.raises(WorkloadError, match=f"holds no request in workload.window={window}; .* {last} s"):
            self.read(path, window=window)

    def test_a_sample_without_a_request(self, path: Path) -> None:
        with pytest.raises(WorkloadError, match=r"in workload\.sample=1e-06 of 100; take a larger"):
            self.read(path, sample=1e-6)


class TestPrompts:
    def test_equal_ids_are_equal_tokens_and_others_differ_from_their_first_block_on(self, path: Path) -> None:
        rows = ((0, 64, 1, [1, 2, 3, 4]), (0, 70, 1, [1, 2, 5, 4, 6]), (0, 40, 1, [1, 2, 3]))
        first, second, third = (
            tuple(r.prompt_token_ids) for r in read(path, "timed_trace", mooncake(*rows), block_tokens=16)
        )
        assert first[:32] == second[:32]
        assert first[32:48] != second[32:48]
        assert third == first[:40]  # a block of which 8 tokens are there

    @pytest.mark.parametrize(("vocab_size", "tokens"), [(2, 64), (500, 8), (151_936, 4), (2**40, 2)])
    def test_blocks_of_different_ids_differ_whatever_the_vocabulary(self, vocab_size: int, tokens: int) -> None:
        ids = [*range(300), 2**32, 2**63, 2**64 - 1]
        flat = tuple(HashedPrompt(ids, tokens, tokens * len(ids), vocab_size, 9))
        blocks = {flat[start : start + tokens] for start in range(0, len(flat), tokens)}
        assert len(blocks) == len(ids)
        assert 0 <= min(flat) <= max(flat) < vocab_size

    @pytest.mark.parametrize("ids", [range(2**40, 2**40 + 7), (5, 5, 9, 2**63, 0, 1, 5)])
    def test_any_part_is_made_as_in_the_whole(self, ids: Sequence[int]) -> None:
        prompt = HashedPrompt(ids, 16, 100, 500, 3)
        whole = tuple(prompt)
        assert len(prompt) == len(whole) == 100
        assert list(whole) == prompt.tolist() == np.array(prompt).tolist()
        for start in (0, 1, 15, 16, 40, 99, 100, 120, -3):
            for stop in (None, 0, 1, 16, 17, 97, 100, 200, -1):
                assert prompt[start:stop] == whole[start:stop]
        assert (prompt[::-1], prompt[80:20:-7], prompt[3:60:5]) == (whole[::-1], whole[80:20:-7], whole[3:60:5])
        assert (prompt[0], prompt[99], prompt[-100]) == (whole[0], whole[99], whole[0])
        with pytest.raises(IndexError):
            prompt[100]

    def test_tokens_are_made_for_a_sequence_that_runs_and_not_for_one_that_waits(self) -> None:
        class Unreadable(HashedPrompt):
            def tokens(self, start: int, count: int) -> Any:
                raise AssertionError("its tokens were made")

        engine = make_engine(max_batch_size=1, vocab_size=VOCAB)
        first = engine.add_request(request("first", 6, 9))
        waiting = Request("waits", Unreadable((1, 2), 4, 7, VOCAB, 0), SamplingParams(max_tokens=3))
        engine.add_request(waiting)
        while first.finish_reason is None:
            engine.step()
        with pytest.raises(AssertionError, match="its tokens were made"):
            engine.step()

    def test_a_hashed_prompt_of_another_vocabulary_is_checked_token_by_token(self) -> None:
        engine, sampling = make_engine(vocab_size=VOCAB), SamplingParams(max_tokens=3)
        with pytest.raises(RequestRefusedError, match="is outside the vocabulary"):
            engine.add_request(Request("a", HashedPrompt((1,), 64, 64, 10**6, 0), sampling))
        with pytest.raises(RequestRefusedError, match="an empty prompt"):
            engine.add_request(Request("a", HashedPrompt((), 64, 0, VOCAB, 0), sampling))

    def test_an_hour_of_long_prompts_takes_the_memory_of_its_ids(self, path: Path) -> None:
        rows = mooncake(*((number, 51_200, 1, [*range(number, number + 100)]) for number in range(200)))
        path.write_text(rows)
        config = WorkloadConfig(source="mooncake", path=str(path), arrival="trace")
        made: dict[str, Any] = {"vocab_size": 500, "seed": 0}
        requests = build_requests(config, **made, memory=4 * 2**20)
        assert sum(len(r.prompt_token_ids) for r in requests) == 10_240_000
        assert len(workload_digest(requests)) == 16
        path.write_text("num_prefill_tokens,num_decode_tokens\n" + "900000,1\n" * 100)
        own = build_requests(WorkloadConfig(source="sharegpt_lengths", path=str(path)), **made, memory=20 * 2**20)
        assert sum(len(r.prompt_token_ids) for r in own) == 90_000_000
        path.write_text(rows)
        with pytest.raises(CapacityError, match=r"take more than the 1\.0 MiB that are available"):
            build_requests(config, **made, memory=2**20)

    def test_tokens_spread_over_the_vocabulary(self) -> None:
        flat = HashedPrompt((7,), 10**5, 10**5, 10, 0).tolist()
        assert np.bincount(flat, minlength=10).min() > 9000

    def test_another_seed_gives_other_tokens_and_own_prompts_share_nothing(self, path: Path) -> None:
        path.write_text(AZURE_2024)
        config = WorkloadConfig(source="azure", path=str(path), arrival="trace")
        prompts = [r.prompt_token_ids[:6] for s in (0, 1) for r in build_requests(config, vocab_size=500, seed=s)]
        assert all(one != other for one, other in combinations(prompts, 2))


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BLOCKS = ", one for each 512 of 600 tokens (workload.block_tokens)"
WRONG: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("azure", "", "workload.path={}: holds no request; expected the columns TIMESTAMP, ContextTokens, "),
    "empty, JSON": ("mooncake", "\n", "workload.path={}: holds no request; expected a JSON object"),
    "columns without a row": ("azure", HEAD, "workload.path={}: holds no request; expected the columns TIMESTAMP"),
    "JSON as CSV": ("azure", mooncake((0, 1, 1, [0])), "{}, line 1: '{{\"timestamp\": 0"),
    "JSON as CSV, with its reader": ("azure", mooncake((0, 1, 1, [0])), "workload=timed_trace read JSON lines"),
    "CSV as JSON": ("mooncake", HEAD, "line 1: Expecting value (character 1); expected a JSON object with"),
    "CSV as JSON, with its reader": ("mooncake", LENGTHS, "; workload=sharegpt_lengths reads this one"),
    "lengths as azure": ("azure", LENGTHS, "GeneratedTokens; workload=sharegpt_lengths reads this one"),
    "an unknown table": ("burstgpt", "a,b\n1,2\n", "{}, line 1: 'a,b'; workload=burstgpt expects the columns"),
    "an open quote": ("azure", HEAD + '"2023', "{}, line 2: a cell in quotes does not end in this line"),
    "not text": ("azure", HEAD.encode() + b"\xff\xfe", "{}, line 2: it is not UTF-8 text (byte 1); expected the"),
    "cut in a character": ("azure", AZURE_2024.encode() + b"2\xc3", "{}, line 4: it is not UTF-8 text (byte 2);"),
    "compressed and cut": ("azure", gzip.compress(AZURE_2024.encode())[:-9], "; was it cut off?"),
    "compressed and damaged": ("mooncake", gzip.compress(b"{}")[:12] + bytes(20), "cannot be read: "),
    "cut in a line": ("azure", AZURE_2024[:-9], "column ContextTokens: is missing; expected 3 columns as in the"),
    "a fraction": ("azure", AZURE_2024.replace(",7,", ",7.5,"), "line 2, column ContextTokens: '7.5'; expected a"),
    "a prompt beyond reason": ("azure", AZURE_2024.replace(",7,", ",70000000,"), "from 1 to 10000000"),
    "a number without end": ("azure", AZURE_2024.replace(",7,", f",{'9' * 5000},"), "(5,002 characters); expected"),
    "other digits": ("azure", AZURE_2024.replace(",7,", ",\u0663,"), "column ContextTokens: '\u0663'; expected"),
    "negative": ("burstgpt", BURST_1.replace(",2,", ",-2,"), "column Response tokens: '-2'; expected"),
    "no time": ("burstgpt", BURST_1.replace("5,", "nan,", 1), "line 2, column Timestamp: 'nan'; expected a"),
    "a year": ("burstgpt", BURST_1.replace("7.5,", "4e7,"), "line 4, column Timestamp: more than a year after the"),
    "cut off": ("mooncake", mooncake((0, 1, 1, [0]))[:-9], "line 1: "),
    "no ids": ("mooncake", '{"timestamp": 0, "input_length": 1, "output_length": 1}', "hash_ids: is missing;"),
    "too few ids": ("mooncake", mooncake((0, 600, 1, [0])), "column hash_ids: 1 ids; expected 2" + BLOCKS),
    "another block size": ("mooncake", mooncake((0, 600, 1, [*range(38)])), "38 ids; expected 2" + BLOCKS),
    "ids of text": ("mooncake", mooncake((0, 600, 1, ["a", "b"])), "['a', 'b']; expected a list of whole numbers"),
    "ids of truth": ("mooncake", mooncake((0, 600, 1, [True, 1])), "expected a list of whole numbers below 2**64"),
    "no list": ("mooncake", mooncake((0, 600, 1, 7)), "column hash_ids: 7; expected a list"),
    "a time of text": ("mooncake", mooncake(("0", 1, 1, [0])), "column timestamp: '0'; expected a number of"),
    "a time of truth": ("mooncake", mooncake((True, 1, 1, [0])), "column timestamp: True; expected a number"),
    "a time beyond all": ("timed_trace", mooncake((10**400, 1, 1, [0])), "expected a number of seconds"),
    "a list as length": ("mooncake", mooncake((0, [1], 1, [0])), "column input_length: [1]; expected"),
    "no output": ("mooncake", mooncake((0, 1, 0, [0])), "; kvlab import makes a trace without requests of 0"),
    "backwards": (
        "mooncake",
        mooncake((1000, 1, 1, [0]), (3000, 1, 1, [0]), (2500, 1, 1, [0])),
        "{}, line 3, column timestamp: the time goes backwards: 1.5 s after the start; expected at least the 2 s",
    ),
}  # fmt: skip


def test_a_file_that_gzip_compressed_is_read(path: Path) -> None:
    plain, packed = (read(path, "azure", text) for text in (AZURE_2024, gzip.compress(AZURE_2024.encode())))
    assert shapes(packed) == shapes(plain)


@pytest.mark.parametrize(("source", "text", "message"), WRONG.values(), ids=list(WRONG))
def test_a_file_that_is_no_such_trace_is_refused(path: Path, source: str, text: str | bytes, message: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        read(path, source, text)
    assert message.format(path) in str(refused.value)


def test_text_of_a_spreadsheet_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("time,prompt_tokens\n1,7\n".encode("utf-16"))
    with pytest.raises(WorkloadError, match="is UTF-16 text; save it as UTF-8"):
        read_head(str(path))


def test_a_table_in_parquet_is_told_what_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"time": [1.0], "prompt_tokens": [7]}), tmp_path / "a.parquet")
    with pytest.raises(WorkloadError, match="is no trace of kvlab; kvlab import FILE makes one of other formats"):
        read_header(str(tmp_path / "a.parquet"))
