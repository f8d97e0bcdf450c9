"""The bar of a run in progress: requests, tokens per second, memory in use, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn

from kvlab.core import Request, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import ServingEngine
from kvlab.lab.results.log import RunLog
from kvlab.lab.terminal import Terminal

_PLAIN_EVERY_S = 10.0  # between lines where there is no terminal to draw a bar on
_DECODE_WEIGHT = 3.0  # guess: a decode token's cost in prefill tokens
_PRIOR = np.square([512.0, 32.0])  # prefill and decode tokens in a step that count as much as that guess


class RemainingTime:
    """Estimates the time left from what prefill and decode tokens have cost so far.

    Steps mix both kinds, so the costs come from a least-squares fit of step time on the two counts, regularised
    (ridge regression) towards a decode token that costs `_DECODE_WEIGHT` times a prefill token.
    """

    def __init__(self, requests: list[Request]) -> None:
        prompts = sum(len(request.prompt_token_ids) for request in requests)
        outputs = sum(request.sampling.n * (request.expected_tokens - 1) for request in requests)
        self._tokens = np.array([prompts, outputs])  # to prefill and to decode
        self._last_arrival = max((request.arrival_s for request in requests), default=0.0)
        self._seen = 0  # steps, of which there are
        self._sums, self._products = np.zeros(4), np.zeros((4, 4))  # of prefill, decode, seconds, recomputed

    def seconds(self, now: float, log: StepLog) -> float | None:
        """Seconds left on the engine's clock after all steps so far, arrivals still to come included; None before
        the first step.
        """
        new, self._seen = partial(log.column, first=self._seen), len(log)
        decoded = new("decode_tokens") - new("proposed_tokens") + new("accepted_tokens")
        seconds = new("end_s") - new("start_s")
        steps = np.column_stack([new("prefill_tokens"), decoded, seconds, new("recomputed_tokens")])
        self._sums += steps.sum(axis=0)
        self._products += steps.T @ steps
        weights = np.array([1.0, _DECODE_WEIGHT])
        tokens = weights @ self._sums[:2]
        if not tokens:
            return None
        guess = weights * self._sums[2] / tokens
        costs = np.linalg.solve(self._products[:2, :2] + np.diag(_PRIOR), self._products[:2, 2] + _PRIOR * guess)
        if costs.min() <= 0:
            costs = guess
        left = self._tokens - self._sums[:2] + (self._sums[3], 0)
        at_once = max(1.0, self._sums[2] / now) if now > 0 else 1.0  # replicas that are busy, in the mean
        return max(float(costs @ left.clip(min=0)) / at_once, self._last_arrival - now)


@contextmanager
def show_progress(
    engine: ServingEngine, requests: list[Request], console: Terminal
) -> Iterator[Callable[[RunLog, StepRecord | None], None]]:
    """A bar on a terminal, elsewhere a line every ten seconds. Gives what is to be called after each step."""
    total = sum(request.sampling.n for request in requests)
    expected = sum(request.sampling.n * request.expected_tokens for request in requests)
    columns = (TextColumn("{task.fields[requests]}"), BarColumn(bar_width=24), TextColumn("{task.fields[status]}"))
    terminal, remaining, printed = console.is_terminal, RemainingTime(requests), time.monotonic()
    began = printed
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not terminal)
    task = bar.add_task("", total=expected, requests="", status="first step ...")

    def after_step(log: RunLog, record: StepRecord | None) -> None:
        nonlocal printed
        now = time.monotonic()
        # Drawing costs more than a short step; four times a second is enough.
        if now - printed < (0.25 if terminal else _PLAIN_EVERY_S):
            return
        printed = now
        stats, at = engine.stats(), engine.clock.now()
        tokens = stats.output_tokens
        if tokens is None:
            tokens = sum(len(ended_record.output_token_ids) for ended_record in log.records)
        parts = [f"{tokens / max(at, 1e-9):6.1f} tok/s", f"{stats.running} running", f"{stats.waiting} waiting"]
        if stats.blocks_total and stats.blocks_in_use is not None:
            parts.append(f"KV {100 * stats.blocks_in_use / stats.blocks_total:3.0f} %")
        if log.next_arrival_s is not None and not stats.running + stats.waiting:
            parts.append(f"next request in {clock(max(0.0, log.next_arrival_s - at))}")
        left = remaining.seconds(at, log.steps)
        if left is not None:
            # A simulated clock, or one of replicas as if side by side, goes at another pace than the user's.
            pace = (now - began) / at if at > 0 else 1.0
            parts.append(f"{clock(left * pace)} left")
        if stats.hit_rate is not None:
            parts.append(f"prefix hits {100 * stats.hit_rate:.0f} %")
        if stats.batches is not None:
            parts.append(f"{stats.batches:,} batch{'es' * (stats.batches != 1)}")
        ended, status = f"{len(log.records)}/{total} requests", "  ".join(parts)
        if terminal:
            bar.update(task, completed=tokens, requests=ended, status=status)
        else:
            console.print(f"{clock(at)}  {ended}  {' '.join(status.split())}")

    with bar:
        yield after_step


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
