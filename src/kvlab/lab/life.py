"""What a request was doing when: queued, in prefill, decoding, preempted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]  # of requests.parquet
ENDED = ("stop", "length")
PHASES = ("queued", "prefill", "decode", "preempted")


@dataclass(slots=True)
class Life:
    """A request's phases, each (one of PHASES, start, end) in seconds, without gaps between them."""

    name: str
    arrival_s: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    first_token_s: float | None = None
    end_s: float = 0.0
    completed: bool = True


def request_life(row: Row) -> Life:
    """A row of requests.parquet as phases.

    After an admission a request is in prefill until its next token; a preemption ends either phase.
    """
    arrival, times = row["arrival_s"], row["token_times_s"] or []
    end = row["end_s"] if row["end_s"] is not None else times[-1] if times else arrival
    life = Life(
        name=row["request_id"] + (f" #{row['sample']}" if row["sample"] else ""),
        arrival_s=arrival,
        first_token_s=row["first_token_s"],
        end_s=max(end, arrival),
        completed=row["finish_reason"] in ENDED,
    )

    def add(phase: str, start: float, end: float) -> None:
        if end > start:
            life.phases.append((phase, start, end))

    scheduled = row["scheduled_s"]
    if scheduled is None:
        add("queued", arrival, life.end_s)
        return life
    add("queued", arrival, scheduled)
    gone, back = row.get("preempted_s") or [], row.get("resumed_s") or []
    for turn, entered in enumerate((scheduled, *back)):
        left = gone[turn] if turn < len(gone) else life.end_s
        token = min(next((time for time in times if time > entered), left), left)
        add("prefill", entered, token)
        add("decode", token, left)
        if turn < len(gone):
            add("preempted", left, back[turn] if turn < len(back) else life.end_s)
    return life
