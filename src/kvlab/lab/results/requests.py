"""What records of requests show: latencies of all, and the phases of one."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.core import RequestRecord

SampleKey = tuple[str, int]  # a request's id and which of its samples it is


class Phase(NamedTuple):
    """What a request was doing from `start_s` to `end_s`: queued, prefill, decode or preempted."""

    name: str
    start_s: float
    end_s: float


def latencies_ms(records: Iterable[RequestRecord]) -> dict[str, NDArray[np.float64]]:
    """Latencies of completed requests, in their order; `itl` has every gap between tokens. See RequestRecord."""
    done = [record for record in records if record.completed]
    gaps = [np.diff(record.token_times_s) * 1000 for record in done]
    values = {"itl": np.concatenate([np.empty(0), *gaps])}
    for name in ("ttft", "tpot", "e2el", "queue"):
        latencies = [getattr(record, f"{name}_ms") for record in done]
        values[name] = np.array([value for value in latencies if value is not None], dtype=np.float64)
    return values


def is_within(record: RequestRecord, latency: str, most: float) -> bool:
    """Whether a request completed with no more than `most` milliseconds of a latency: ttft or tpot."""
    if latency == "tpot" and len(record.token_times_s) < 2:
        return record.completed  # no token came after the first
    value: float | None = getattr(record, f"{latency}_ms")
    return record.completed and value is not None and value <= most


def request_phases(record: RequestRecord) -> list[Phase]:
    """The phases of a request, without gaps from its arrival to its end.

    After an admission a request is in prefill until its next token; a preemption ends either phase. Where the
    admission is not known, all before the first token counts as queued.
    """
    end, admitted = max(record.finished_s, record.arrival_s), record.scheduled_s
    if admitted is None:
        first = end if record.first_token_s is None else record.first_token_s
        known = [Phase("queued", record.arrival_s, first), Phase("decode", first, end)]
        return [phase for phase in known if phase.end_s > phase.start_s]
    phases = [Phase("queued", record.arrival_s, admitted)]
    for turn, start in enumerate((admitted, *record.resumed_s)):
        preempted = record.preempted_s[turn] if turn < len(record.preempted_s) else None
        until = end if preempted is None else preempted
        token = min(next((time for time in record.token_times_s if time > start), until), until)
        phases += [Phase("prefill", start, token), Phase("decode", token, until)]
        if preempted is not None:
            back = record.resumed_s[turn] if turn < len(record.resumed_s) else end
            phases.append(Phase("preempted", preempted, back))
    return [phase for phase in phases if phase.end_s > phase.start_s]
