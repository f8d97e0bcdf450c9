"""Steps about traffic of one's own: files of others, imported by the real command."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from itertools import starmap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from features.steps.server_logs import agent_spans, otel_span, vllm_chats, vllm_lines
from kvlab.cli import export, import_, replay
from kvlab.workloads.trace_format import TracedRequest, read_header, read_trace
from tests.support.commands import Command, call

#: Arrival in seconds, prompt and output tokens, and ids of the prompt's blocks of 16 tokens.
ROWS = [(10.0, 48, 3, [1, 2, 3]), (10.5, 48, 4, [1, 2, 4]), (12.0, 48, 5, [5, 6, 7])]
SYSTEM = {
    "role": "system",
    "content": "You answer with great care, and never lie to anybody about anything at all, or so they say.",
}


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def of_mooncake(units: float, tokens: int, blocks_of: int) -> str:
    """The rows as Mooncake has them, or vLLM: so many units a second, prompts of so many tokens, and blocks."""
    rows = []
    for at, _, output, ids in ROWS:
        hashes = ids[: -(-tokens // blocks_of)]
        row = {"timestamp": at * units, "input_length": tokens, "output_length": output, "hash_ids": hashes}
        rows.append(row if blocks_of == 512 else row | {"chat_id": 1})
    return lines(*rows)


def aiperf_row(row: tuple[float, int, int, list[int]], phase: str = "profiling") -> dict[str, Any]:
    at, prompt, output, _ = row
    metrics = {"input_sequence_length": prompt, "output_sequence_length": output, "time_to_first_token": 9.5}
    return {
        "metadata": {"benchmark_phase": phase, "conversation_id": "a", "request_start_ns": int(at * 1e9)},
        "metrics": {name: {"value": value, "unit": ""} for name, value in metrics.items()},
    }


def dynamo_row(row: tuple[float, int, int, list[int]]) -> dict[str, Any]:
    at, prompt, output, ids = row
    replay = {"trace_block_size": 16, "input_length": prompt, "input_sequence_hashes": ids[: prompt // 16]}
    request = {"request_received_ms": int(at * 1000), "output_tokens": output, "ttft_ms": 9.5, "replay": replay}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}


SPANS = (
    {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "GET", "startTimeUnixNano": "1"}]}]}]},
    {"resourceSpans": [{"scopeSpans": [{"spans": list(map(otel_span, reversed(ROWS)))}]}]},
)
FILES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:15:{at:09.6f},{prompt},{output}\n" for at, prompt, output, _ in ROWS),
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{at},GPT-4,{prompt},{output},9,API log\n" for at, prompt, output, _ in ROWS),
    "moon.jsonl": of_mooncake(1000, 448, 512),
    "timed.jsonl": of_mooncake(1, 48, 16),
    "own.csv": "created_at,input_tokens,output_tokens\n"
    + "".join(f"{at},{prompt},{output}\n" for at, prompt, output, _ in ROWS),
    "own.jsonl": lines(
        *({"arrival_s": at, "prompt_tokens": prompt, "output_tokens": output, "block_ids": ids}
          for at, prompt, output, ids in ROWS)
    ),
    "bench.json": json.dumps(
        {
            "request_throughput": 1.5,
            "input_lens": [48, 48, 48],
            "output_lens": [5, 3, 4],
            "ttfts": [0.5, 0.25, 0.125],
            "itls": [[0.1] * 4, [0.1] * 2, [0.1] * 3],
            "start_times": [12.0, 10.0, 10.5],
        }
    ),
    "aiperf.jsonl": lines(aiperf_row((1.0, 9, 9, []), "warmup"), *map(aiperf_row, [ROWS[1], ROWS[2], ROWS[0]])),
    "guide.json": json.dumps(
        {"metadata": {"guidellm_version": "0.8.0"}, "benchmarks": [{"requests": {"successful": [
            {"prompt_tokens": prompt, "request_start_time": at, "output_tokens": output, "request_latency": 0.5}
            for at, prompt, output, _ in reversed(ROWS)
        ]}}]}
    ),
    "perf.json": json.dumps(
        [{"start_time": at, "end_time": at + 1, "request": "{}", "error": None, "info": {
            "request_metrics": {"text": {"input_tokens": prompt}},
            "response_metrics": {"output_tokens": output, "output_token_times": [at + 0.25, at + 0.5]},
        }} for at, prompt, output, _ in reversed(ROWS)]
    ),
    "spans.json": lines(*SPANS),
    "indented.json": "\n".join(json.dumps(batch, indent=2) for batch in SPANS),
    "dynamo.jsonl": lines(
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_start", "tool": {}},
        *map(dynamo_row, reversed(ROWS)),
    ),
    "vllm.log": "INFO 11-16 18:15:00 [api_server.py:1] vLLM API server\n"
    + "".join(starmap(vllm_lines, enumerate(ROWS))),
    "chats.log": "".join(f"{line}\n" for line in vllm_chats(ROWS)),
    "agent.json": lines(agent_spans(), {"resourceMetrics": []}),
    "litellm.jsonl": lines(
        *({"startTime": at, "messages": [SYSTEM], "response": {"usage": usage}}
          for usage in [{"prompt_tokens": 33, "completion_tokens": 4}] for at, *_ in ROWS)
    ),
    "batch.jsonl": lines(
        *(
            {"custom_id": text, "body": {"messages": [SYSTEM, {"role": "user", "content": text}]}}
            for text in ("Hi there", "What is it?")
        )
    ),
    "calls.jsonl": lines(
        {"prompt": "abcd", "n": 3, "usage": {"completion_tokens": 10}},
        {"prompt": ["abcd", "efghi"], "usage": {"completion_tokens": 8}},
        {"prompt": [[100200, 100201, 100202]], "usage": {"completion_tokens": 4}},
        {"messages": [{"role": "user"}], "tools": [{"type": "function"}], "usage": {"completion_tokens": 4}},
    ),
}  # fmt: skip


@pytest.fixture
def traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of imports."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@given(parsers.re(r'a file "(?P<name>\S+)" of .*'))
def file_of_others(traffic: Path, name: str) -> None:
    (traffic / name).write_text(FILES[name], encoding="utf-8")


@given(parsers.parse('a file "{name}" with "{names}" and {rows}'))
@given(parsers.re(r'a file "(?P<name>\S+)" with "(?P<names>)" and (?P<rows>.*)'))
def file_with(traffic: Path, name: str, names: str, rows: str) -> None:
    (traffic / name).parent.mkdir(exist_ok=True)
    (traffic / name).write_text("\n".join([*([names] if names else []), *rows.split("; ")]) + "\n")


@given(parsers.parse('a log of three requests as "{name}"'))
def log_of_three(traffic: Path, name: str) -> None:
    times = [datetime(2026, 11, 20, 9, 0, second, 500000 * half, UTC) for second, half in ((0, 0), (1, 1), (2, 0))]
    tokens = [(7, 1), (8, 2), (9, 3)]
    if name == "naive.parquet":
        times = [time.replace(tzinfo=None) for time in times]
    rows: list[dict[str, Any]] = []
    for time, (prompt, output) in zip(times, tokens, strict=True):
        if name == "deep.parquet":
            usage = {"prompt_tokens": Decimal(prompt), "completion_tokens": output}
            rows.append({"id": "a", "request": {"created_at": time}, "usage": usage})
        else:
            rows.append({"created_at": time, "input_tokens": prompt, "output_tokens": float(output)})
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), traffic / name)
    else:
        text = json.dumps(rows, default=datetime.isoformat, indent=2 if name == "pretty.json" else None)
        (traffic / name).write_text(text)


@when(parsers.re(r'I import "(?P<name>[^"]+)"'))
def import_file(traffic: Path, commands: list[Command], name: str) -> None:
    commands.append(call(import_.main, name))


@when(parsers.re(r'I import "(?P<name>\S+)" with "(?P<settings>.*)"'))
def import_with(traffic: Path, commands: list[Command], name: str, settings: str) -> None:
    commands.append(call(import_.main, name, *settings.split()))


@when(
    parsers.re(
        r'I import "(?P<name>\S+)" twice(?: with "(?P<settings>.*)")?, into "(?P<one>\S+)" and "(?P<other>\S+)"'
    )
)
def import_twice(
    commands: list[Command], traffic: Path, name: str, settings: str | None, one: str, other: str
) -> None:
    for path in (one, other):
        commands.append(call(import_.main, name, f"to={path}", *(settings or "").split()))
        assert commands[-1].code == 0, commands[-1].output


@when(parsers.re(r'I run the trace "(?P<name>\S+)" with "(?P<text>.*)" on a tiny model'))
def run_imported(lab: Runner, commands: list[Command], traffic: Path, name: str, text: str) -> None:
    commands.append(lab.run(f"{text} workload.path={traffic / name}"))


@when(parsers.re(r'I export "(?P<name>\S+)" with "(?P<settings>.*)"'))
def export_with(traffic: Path, commands: list[Command], name: str, settings: str) -> None:
    commands.append(call(export.main, name, *settings.split()))


@when("I import the run's directory")
def import_run(traffic: Path, commands: list[Command]) -> None:
    commands.append(call(import_.main, str(commands[-1].directory), "to=run.trace.jsonl"))


@when("I replay the trace")
def replay_imported(commands: list[Command], traffic: Path) -> None:
    commands.append(call(replay.main, "workload=recorded", f"workload.path={imported(commands)}"))


@when(parsers.parse('the last {count:d} bytes of "{name}" are lost'))
def lose_bytes(traffic: Path, count: int, name: str) -> None:
    data = (traffic / name).read_bytes()
    (traffic / name).write_bytes(data[:-count])


def imported(commands: list[Command]) -> str:
    """The path of the last trace."""
    assert commands[-1].code == 0, commands[-1].output
    return commands[-1].output.split("written: ")[1].splitlines()[0]


def traced(path: str | Path) -> list[TracedRequest]:
    return [request for _, request in read_trace(str(path))]


@then("both served the same requests")
def served_the_same(commands: list[Command]) -> None:
    names = ("arrival_s", "prompt_tokens", "cached_tokens", "output_token_ids")
    one, other = (
        [[row[name] for name in names] for row in each.rows("requests.parquet")] for each in commands[-2:]
    )
    assert one == other
    assert len(one) == 3
    assert any(row[2] for row in one)


@then(parsers.parse("it served {count:d} requests"))
def served_some(commands: list[Command], count: int) -> None:
    assert len(commands[-1].rows("requests.parquet")) == count


@then(parsers.parse("the trace has {count:d} requests whose first {equal:d} hashes are equal, and no text"))
def hashes_alike(commands: list[Command], traffic: Path, count: int, equal: int) -> None:
    path = imported(commands)
    found = [request.hashes for request in traced(path)]
    assert len(found) == count
    first, second = (list(each or ()) for each in found)
    assert len(first) > equal
    assert first[:equal] == second[:equal]
    assert not set(first[equal:]) & set(second[equal:])
    text = Path(path).read_text()
    assert not any(word in text for word in ("care", "Hi there", "system"))


@then(parsers.parse("the trace has {prompts:d} prompts, of {each:d} requests each"))
def prompts_in_common(commands: list[Command], traffic: Path, prompts: int, each: int) -> None:
    counts = Counter(tuple(request.hashes or ()) for request in traced(imported(commands)))
    assert () not in counts
    assert list(counts.values()) == [each] * prompts


@then(parsers.parse("the trace's requests arrive at {times} s"))
def arrive_at(commands: list[Command], traffic: Path, times: str) -> None:
    assert [request.arrival_s for request in traced(imported(commands))] == [
        float(each) for each in times.split(",")
    ]


@then("no trace is left")
def no_trace(traffic: Path) -> None:
    assert not list(traffic.glob("*.trace.jsonl*"))


@then("they have no hash in common, and different key ids")
def no_hash_in_common(traffic: Path) -> None:
    one, other = (
        {each for request in traced(name) for each in request.hashes or ()} for name in ("a.jsonl", "b.jsonl")
    )
    assert one
    assert not one & other
    assert read_header("a.jsonl").key_id != read_header("b.jsonl").key_id


@then("they have the same hashes")
def same_hashes(traffic: Path) -> None:
    assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()


@then(parsers.re(r'"(?P<one>\S+)" is "(?P<other>\S+)", byte for byte'))
def same_file(traffic: Path, one: str, other: str) -> None:
    assert (traffic / one).read_bytes() == (traffic / other).read_bytes()


@then(parsers.re(r'"(?P<one>\S+)" and "(?P<other>\S+)" have the same times and lengths'))
def same_requests(traffic: Path, one: str, other: str) -> None:
    found = [
        [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in traced(traffic / name)] for name in (one, other)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3


@then(parsers.re("as many tokens of prompts are found again (?P<where>.*)"))
def shared_tokens(traffic: Path, where: str) -> None:
    shares = []
    for name in ("moon.trace.jsonl", "again.trace.jsonl"):
        size, seen, tokens = read_header(str(traffic / name)).block_tokens, set[int](), 0
        for request in traced(traffic / name):
            tokens += min(size * len(seen & set(request.hashes or ())), request.prompt_tokens)
            seen.update(request.hashes or ())
        shares.append(tokens)
    assert shares[0] > 0
    assert shares[1] == (shares[0] if where == "in both" else 0)


@then(parsers.parse("at most {running:d} ran at once, and each got {tokens:d} tokens"))
def ran_at_once(commands: list[Command], running: int, tokens: int) -> None:
    assert commands[-1].summary["metrics"]["capacity/peak_running"] == running
    assert {len(row["output_token_ids"]) for row in commands[-1].rows("requests.parquet")} == {tokens}
