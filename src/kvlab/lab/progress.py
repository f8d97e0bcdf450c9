"""The bar of a run in progress: requests, tokens per second, memory in use, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvlab.core import Request, StepRecord
from kvlab.engine.protocol import ServingEngine
from kvlab.lab.drive import RunLog

_PLAIN_EVERY_S = 10.0  # between lines where there is no terminal to draw a bar on
_DECODE_WEIGHT = 3.0  # a decode token's cost in prefill tokens, until enough steps of both were observed
_PRIOR_PREFILL, _PRIOR_DECODE = 512, 32  # tokens in a step that weigh as much as the prior


class RemainingTime:
    """Estimates the time left from what prefill and decode tokens have cost so far.

    Steps mix both kinds, so their costs come from a regularised least-squares fit of step time on the two counts,
    updated step by step; early on it leans on decode costing `_DECODE_WEIGHT` times prefill.
    """

    def __init__(self, requests: list[Request]) -> None:
        self._prefill_left = sum(len(request.prompt_token_ids) for request in requests)
        self._decode_left = sum(request.sampling.n * (request.sampling.max_tokens - 1) for request in requests)
        self._last_arrival = max((request.arrival_s for request in requests), default=0.0)
        self._time = self._tokens = 0.0
        self._pp = self._pd = self._dd = self._tp = self._td = 0.0

    def observe(self, record: StepRecord) -> None:
        """Learn from a step."""
        prefill, decode, seconds = record.prefill_tokens, record.decode_tokens, record.end_s - record.start_s
        self._prefill_left -= prefill - record.recomputed_tokens
        self._decode_left -= decode
        self._time += seconds
        self._tokens += prefill + _DECODE_WEIGHT * decode
        self._pp += prefill * prefill
        self._pd += prefill * decode
        self._dd += decode * decode
        self._tp += seconds * prefill
        self._td += seconds * decode

    def seconds(self, now: float) -> float | None:
        """Seconds left, arrivals still to come included; None before the first step."""
        if not self._tokens:
            return None
        prefill, decode = self._costs()
        work = max(0, self._prefill_left) * prefill + max(0, self._decode_left) * decode
        return max(work, self._last_arrival - now)

    def _costs(self) -> tuple[float, float]:
        prefill = self._time / self._tokens
        decode = _DECODE_WEIGHT * prefill
        # Ridge regression: a few steps that hardly differ must not outweigh the prior.
        pp, dd = self._pp + _PRIOR_PREFILL**2, self._dd + _PRIOR_DECODE**2
        tp, td = self._tp + _PRIOR_PREFILL**2 * prefill, self._td + _PRIOR_DECODE**2 * decode
        determinant = pp * dd - self._pd**2
        fitted_prefill = (tp * dd - td * self._pd) / determinant
        fitted_decode = (td * pp - tp * self._pd) / determinant
        if fitted_prefill > 0 and fitted_decode > 0:
            return fitted_prefill, fitted_decode
        return prefill, decode


@contextmanager
def show_progress(
    engine: ServingEngine, requests: list[Request], console: Console
) -> Iterator[Callable[[RunLog, StepRecord | None], None]]:
    """A bar on a terminal, elsewhere a line every ten seconds. Gives what is to be called after each step."""
    total = sum(request.sampling.n for request in requests)
    expected = sum(request.sampling.n * request.sampling.max_tokens for request in requests)
    columns = (TextColumn("{task.fields[requests]}"), BarColumn(bar_width=24), TextColumn("{task.fields[status]}"))
    terminal, remaining, printed = console.is_terminal, RemainingTime(requests), time.monotonic()
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not terminal)
    task = bar.add_task("", total=expected, requests="", status="first step ...")

    def after_step(log: RunLog, record: StepRecord | None) -> None:
        nonlocal printed
        if record is not None:
            remaining.observe(record)
        now = time.monotonic()
        # An engine's statistics cost more than a short step; four times a second is enough.
        if now - printed < (0.25 if terminal else _PLAIN_EVERY_S):
            return
        printed = now
        stats, at = engine.stats(), engine.clock.now()
        tokens = stats.output_tokens
        if tokens is None:
            tokens = sum(len(each.output_token_ids) for each in log.records)
        parts = [f"{tokens / max(at, 1e-9):6.1f} tok/s", f"{stats.running} running", f"{stats.waiting} waiting"]
        if stats.blocks_total and stats.blocks_in_use is not None:
            parts.append(f"KV {100 * stats.blocks_in_use / stats.blocks_total:3.0f} %")
        left = remaining.seconds(at)
        if left is not None:
            parts.append(f"{clock(left)} left")
        ended, status = f"{len(log.records)}/{total} requests", "  ".join(parts)
        if terminal:
            bar.update(task, completed=tokens, requests=ended, status=status)
        else:
            console.print(f"{clock(at)}  {ended}  {' '.join(status.split())}", highlight=False)

    with bar:
        yield after_step


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
