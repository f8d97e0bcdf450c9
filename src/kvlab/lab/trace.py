"""A profiled run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvlab.lab.profile import Part, ProfiledStep, Span

_MAX_SLICES = 200_000  # of parts, some 20 MB: the steps behind have their own slice and their counters alone
_PROCESS, _THREAD = 1, 1


def write_trace(path: Path, name: str, steps: Iterable[ProfiledStep]) -> None:
    """Write the steps with their parts within them, and counters of sequences and blocks, as JSON in the Trace
    Event Format; times are microseconds since the run began.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in trace_events(name, steps)))
        file.write("\n]}\n")


def trace_events(name: str, steps: Iterable[ProfiledStep]) -> Iterator[dict[str, Any]]:
    """The events of a trace."""
    yield {"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": name}}
    yield {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": _THREAD, "args": {"name": "engine"}}
    left = _MAX_SLICES
    for step in steps:
        record = step.record
        of_batch = ("batch_seqs", "prefill_tokens", "decode_tokens", "context_tokens", "preempted")
        arguments = {name: getattr(record, name) for name in of_batch}
        yield _slice(f"step {record.index}", "step", record.start_s, record.end_s) | {"args": arguments}
        for counter, values in (
            ("sequences", {"running": record.running, "waiting": record.waiting}),
            ("KV blocks", {"in use": record.blocks_in_use, "cached": record.blocks_cached}),
        ):
            yield {"name": counter, "ph": "C", "pid": _PROCESS, "ts": _us(record.start_s), "args": values}
        planned = Span(Part.SCHEDULING, record.start_s, record.start_s + record.schedule_ms / 1000)
        for part, start, end in (planned, *step.spans)[: max(left, 0)]:
            yield _slice(part, "part", start, end)
        left -= 1 + len(step.spans)


def _slice(name: str, category: str, start: float, end: float) -> dict[str, Any]:
    where = {"pid": _PROCESS, "tid": _THREAD}
    return {"name": name, "cat": category, "ph": "X", "ts": _us(start), "dur": _us(end - start), **where}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
