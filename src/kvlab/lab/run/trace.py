"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: steps, requests, counters.

The format is the Trace Event Format: "X" is a slice on a thread, "b" and "e" begin and end a slice on a track of
its own (those of one `id` nest), "C" is a counter, "M" names a process or a thread.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from kvlab.core import RequestRecord, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.lab.files import replacing
from kvlab.lab.results.requests import request_phases
from kvlab.lab.run.profile import Part, ProfiledStep, Span

_MAX_SLICES = 200_000  # of parts, some 20 MB: later steps have a slice and counters alone
_MAX_STEPS = 100_000  # later steps are not in the trace
_MAX_REQUESTS = 1_000  # with a track each
_STEPS, _REQUESTS, _THREAD = 1, 2, 1  # processes, and the first thread, which others of a fleet's replicas follow
_TOGETHER = 1_000  # events that are encoded at once
_OF_POOL = ("has_pool", "pool.blocks_in_use", "pool.blocks_cached")
_OF_STEP = ("index", "start_s", "end_s", "schedule_ms", "running", "waiting", "replica")
_OF_BATCH = ("batch_seqs", "prefill_tokens", "decode_tokens", "context_tokens", "preempted")


def write_trace(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write the events as JSON. Raises OutputError."""
    # JSON escapes control characters in text, so that a NUL is nothing but the mark between two items.
    encode, left, before = json.JSONEncoder(separators=("\0", ":")).encode, iter(events), ""
    with replacing(path) as own, own.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        while some := list(islice(left, _TOGETHER)):
            text = encode(some)[1:-1].replace("}\0{", "},\n{")
            file.write(before + text.replace("\0", ","))
            before = ",\n"
        file.write("\n]}\n")


def trace_events(
    name: str,
    steps: Sequence[StepRecord],
    records: Sequence[RequestRecord] = (),
    profiled: Iterable[ProfiledStep] = (),
) -> Iterator[dict[str, Any]]:
    """Steps with their parts, requests with their phases, and counters of sequences and blocks; each replica has a
    thread and counters of its own. Times are microseconds since the run began.
    """
    log = StepLog.of(steps)
    replicas = int(log.column("replica").max(initial=0)) + 1
    names = ["engine"] if replicas == 1 else [f"replica {number}" for number in range(replicas)]
    yield {"name": "process_name", "ph": "M", "pid": _STEPS, "args": {"name": name}}
    for number, engine in enumerate(names):
        yield {"name": "thread_name", "ph": "M", "pid": _STEPS, "tid": _THREAD + number, "args": {"name": engine}}
    if records:
        yield {"name": "process_name", "ph": "M", "pid": _REQUESTS, "args": {"name": "requests"}}
    spans = {step.record.index: step.spans for step in profiled}
    left = _MAX_SLICES
    columns = (log.column(name)[:_MAX_STEPS].tolist() for name in (*_OF_STEP, *_OF_POOL, *_OF_BATCH))
    for index, start_s, end_s, schedule_ms, running, waiting, replica, has_pool, in_use, cached, *batch in zip(
        *columns, strict=True
    ):
        thread, suffix = _THREAD + replica, "" if replicas == 1 else f", {names[replica]}"
        kind = (f"step {index}", "step") if batch[0] else ("memory given back", "release")
        slice_ = _slice(*kind, start_s, end_s, thread)
        slice_["args"] = dict(zip(_OF_BATCH, batch, strict=True))
        yield slice_
        counters = {"sequences": {"running": running, "waiting": waiting}}
        if has_pool:
            counters["KV blocks"] = {"in use": in_use, "cached": cached}
        for counter, values in counters.items():
            yield {"name": counter + suffix, "ph": "C", "pid": _STEPS, "ts": _us(start_s), "args": values}
        if left <= 0 or not batch[0]:
            continue
        launched = start_s + schedule_ms / 1000
        parts = (Span(Part.SCHEDULING, start_s, launched), *spans.get(index, ()))
        for part, start, end in parts[:left]:
            yield _slice(part, "part", start, end, thread)
        if index not in spans:
            yield _slice("execution", "part", launched, end_s, thread)
        left -= len(parts)
    for number, request in enumerate(records[:_MAX_REQUESTS]):
        yield from _request(number, request)


def _request(number: int, record: RequestRecord) -> Iterator[dict[str, Any]]:
    track = {"cat": "request", "id": number, "pid": _REQUESTS, "tid": _THREAD}
    arguments = {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "preemptions": record.preemptions,
        "output_tokens": len(record.output_token_ids),
    }
    yield {"name": record.name, "ph": "b", "ts": _us(record.arrival_s), "args": arguments, **track}
    for phase, start, until in request_phases(record):
        yield {"name": phase, "ph": "b", "ts": _us(start), **track}
        yield {"name": phase, "ph": "e", "ts": _us(until), **track}
    yield {"name": record.name, "ph": "e", "ts": _us(max(record.finished_s, record.arrival_s)), **track}


def _slice(name: str, category: str, start: float, end: float, thread: int) -> dict[str, Any]:
    began = _us(start)
    # Between rounded times: slices that end together must do so to the last digit, or they do not nest.
    taken = round(_us(end) - began, 3)
    return {"name": name, "cat": category, "ph": "X", "pid": _STEPS, "tid": thread, "ts": began, "dur": taken}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
