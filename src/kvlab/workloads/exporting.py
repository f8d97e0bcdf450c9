"""Traces in the formats of others: lengths and times, and in JSON lines what prompts have in common."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.errors import WorkloadError, shown
from kvlab.workloads.trace_format import Header, TracedRequest, read_header, read_trace, whole


class Exported(NamedTuple):
    """How many requests were written, how many were not, since they had no output, and what of them the file
    cannot tell.
    """

    requests: int
    without_output: int
    left_out: tuple[str, ...]


class _Blocks:
    """Ids of a prompt's blocks, numbered as they come, which are equal as far as prompts are known to be."""

    def __init__(self, size: int, traced: int) -> None:
        self._size, self._traced = size, traced
        self._numbers: dict[tuple[object, int], int] = {}

    def ids(self, request: TracedRequest, number: int) -> list[int]:
        """The hash of the last traced block that a block reaches into covers all before it."""
        ids = []
        for place in range(-(-request.prompt_tokens // self._size)):
            end = min((place + 1) * self._size, request.prompt_tokens)
            own = ("request", number)  # of which nobody knows what it has in common with others
            key = own if request.hashes is None else request.hashes[(end - 1) // self._traced]
            ids.append(self._numbers.setdefault((key, place), len(self._numbers)))
        return ids


def _azure(header: Header, requests: Iterable[TracedRequest]) -> Iterator[list[Any]]:
    yield ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    for request in requests:
        moment = datetime.fromtimestamp((header.started or 0.0) + (request.arrival_s or 0.0), UTC)
        yield [f"{moment:%Y-%m-%d %H:%M:%S.%f}0", request.prompt_tokens, request.output_tokens]


def _burstgpt(header: Header, requests: Iterable[TracedRequest]) -> Iterator[list[Any]]:
    yield ["Timestamp", "Session ID", "Request tokens", "Response tokens", "Total tokens"]
    for request in requests:
        prompt, output = request.prompt_tokens, request.output_tokens or 0
        yield [request.arrival_s, request.session or "", prompt, output, prompt + output]


def _mooncake(header: Header, requests: Iterable[TracedRequest]) -> Iterator[dict[str, Any]]:
    blocks = _Blocks(512, header.block_tokens)
    for number, request in enumerate(requests):
        yield {"timestamp": round(1000 * (request.arrival_s or 0.0))} | _shape(request, blocks.ids(request, number))


def _timed_trace(header: Header, requests: Iterable[TracedRequest]) -> Iterator[dict[str, Any]]:
    """Turns of one session are a chat; each has one before it."""
    blocks, chats = _Blocks(16, header.block_tokens), dict[str, int]()
    for number, request in enumerate(requests):
        parent = chats.get(request.session, -1) if request.session else -1
        if request.session:
            chats[request.session] = number
        about = {"chat_id": number, "parent_chat_id": parent, "timestamp": request.arrival_s}
        yield about | _shape(request, blocks.ids(request, number))


def _shape(request: TracedRequest, ids: list[int]) -> dict[str, Any]:
    return {"input_length": request.prompt_tokens, "output_length": request.output_tokens, "hash_ids": ids}


#: Each gives lists, which become CSV, or objects, which become JSON lines.
FORMATS: dict[str, Callable[[Header, Iterable[TracedRequest]], Iterator[Any]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "timed_trace": _timed_trace,
}


def export_trace(trace: str, name: str, path: Path) -> Exported:
    """Write a trace in one of `FORMATS`. Raises WorkloadError for one that cannot be read or written, and for one
    without arrivals or output lengths, which every format has.
    """
    header = read_header(trace)
    missing = {"times": "arrival times", "outputs": "output lengths"}
    if lacking := [text for what, text in missing.items() if what in header.unknown]:
        raise WorkloadError(f"{shown(trace)}: has no {' and no '.join(lacking)}, which format={name} needs")
    count, without_output, has_blocks = 0, 0, False

    def counted() -> Iterator[TracedRequest]:
        nonlocal count, without_output
        for _, request in read_trace(trace):
            if request.output_tokens == 0:
                without_output += 1
                continue
            count += 1
            yield request

    with whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        for row in FORMATS[name](header, counted()):
            if isinstance(row, dict):
                file.write(json.dumps(row) + "\n")
                has_blocks = True
            else:
                table.writerow(row)
    left_out = ["what the server did"]
    if not has_blocks or "prefixes" in header.unknown:
        left_out.append("what prompts have in common")
    return Exported(count, without_output, tuple(left_out))
