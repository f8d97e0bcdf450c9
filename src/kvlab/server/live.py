"""What the live page shows: the pool block by block, the requests, and the last minute."""

import asyncio
import json
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from kvlab.core import Sequence, StepRecord
from kvlab.engine.clock import Clock, PacedClock
from kvlab.engine.core import EngineCore
from kvlab.engine.protocol import EngineStats
from kvlab.engine.service import Engine
from kvlab.kv.journal import BlockState
from kvlab.kv.pool import BlockPool

_SECONDS = 60  # of history
_PERIOD_S = 0.25  # between two looks at the engine, however many pages are open
_COUNTERS = ("prompt_tokens", "hit_tokens", "blocks_allocated", "blocks_freed", "evicted_blocks")
_SUMS = ("output_tokens", *_COUNTERS)
_MOST_ROWS = 240  # requests that are listed; with the block states they fit a byte


@dataclass(frozen=True, slots=True)
class ServerStats(EngineStats):
    """What `/stats` says: the engine's figures, and per second what was counted in the last minute."""

    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    hit_tokens_per_s: float = 0.0
    blocks_allocated_per_s: float = 0.0
    blocks_freed_per_s: float = 0.0
    evicted_blocks_per_s: float = 0.0
    simulated_s: float | None = None  # that a simulated device computed
    late_s: float | None = None  # by which its steps began late, since this machine did not keep up


def pace(clock: Clock) -> dict[str, float]:
    """How a simulated device was kept up with, for `/stats` and the page; nothing for a real one."""
    if not isinstance(clock, PacedClock):
        return {}
    return {"simulated_s": clock.simulated_s, "late_s": max(0.0, clock.late_s)}


@dataclass(slots=True)
class _Second:
    """A second of the engine's clock in which it stepped."""

    second: int
    blocks_in_use: int = 0  # at its end
    sums: Counter[str] = field(default_factory=Counter)  # by the names of _SUMS


class History:
    """The last minute, second by second, on the engine's clock. `step` and `minute` are called with no other thread
    stepping.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=_SECONDS + 1)

    def step(self, record: StepRecord) -> None:
        """A step was done."""
        second = int(record.end_s)
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(_Second(second))
        latest = self._seconds[-1]
        latest.sums["output_tokens"] += record.output_tokens
        if record.counters is not None:
            for name in _COUNTERS:
                latest.sums[name] += getattr(record.counters, name)
        if record.pool is not None:
            latest.blocks_in_use = record.pool.blocks_in_use

    def minute(self, now: float) -> dict[str, list[int]]:
        """The last 60 whole seconds before `now`, oldest first; fewer where the engine is younger."""
        known = {row.second: row for row in self._seconds}
        end = int(now)
        begin = max(end - _SECONDS, 0)
        before = [row.blocks_in_use for row in self._seconds if row.second < begin]
        rows, in_use = [], before[-1] if before else 0
        for second in range(begin, end):
            row = known.get(second) or _Second(second, in_use)
            in_use = row.blocks_in_use
            rows.append(row)
        return {name: [row.sums[name] for row in rows] for name in _SUMS} | {
            "blocks_in_use": [row.blocks_in_use for row in rows]
        }

    def rates(self, now: float) -> dict[str, float]:
        """What was counted in the last 60 seconds before `now`, per second. Any thread may ask."""
        since = max(now - _SECONDS, 0.0)
        known = [second for second in list(self._seconds) if second.second >= since]
        span = max(now - since, 1.0)
        return {f"{name}_per_s": sum(second.sums[name] for second in known) / span for name in _SUMS}


class LiveView:
    """The JSON of `/live`. The engine is looked at between two steps, and the same look serves all that ask within
    a quarter of a second. Prompts and outputs are not in it.
    """

    def __init__(self, engine: Engine, history: History, about: dict[str, Any], status: Callable[[], str]) -> None:
        self._engine = engine
        self._history = history
        self._about = about
        self._status = status
        self._begun = 0.0
        self._taking: asyncio.Task[bytes] | None = None

    async def body(self) -> bytes:
        """The newest view, at most a quarter of a second old when a step is not waited for."""
        now = time.monotonic()
        if self._taking is None or (self._taking.done() and now - self._begun >= _PERIOD_S):
            self._begun = now
            self._taking = asyncio.create_task(self._take())
        return await asyncio.shield(self._taking)

    async def _take(self) -> bytes:
        view = await asyncio.wrap_future(self._engine.inspect(self._look))
        pool = view["pool"]
        if pool is not None:
            pool["map"] = b64encode(pool["map"]).decode()
        return json.dumps({"status": self._status(), **self._about, **view}, separators=(",", ":")).encode()

    def _look(self, core: EngineCore) -> dict[str, Any]:
        """Between two steps: nothing here may take long."""
        now, scheduler, pool = core.clock.now(), core.scheduler, core.pool
        running = [sequence for sequence in scheduler.running if sequence.finish_reason is None]
        listed = list(islice(chain(running, scheduler.waiting), _MOST_ROWS))
        decoding = sum(sequence.is_decoding for sequence in running)
        blocks = pool if isinstance(pool, BlockPool) else None
        return {
            "now_s": now,
            "queue": len(scheduler.waiting),
            "prefill": len(running) - decoding,
            "decode": decoding,
            "requests": [_row(sequence, now, blocks) for sequence in listed],
            "stats": asdict(core.stats()) | pace(core.clock),
            "pool": None if blocks is None else _pool(blocks, listed),
            "minute": self._history.minute(now),
        }


def _row(sequence: Sequence, now: float, pool: BlockPool | None) -> dict[str, Any]:
    """A request that waits or runs, or one of its samples."""
    runs = sequence.slot is not None
    return {
        "id": sequence.request.request_id,
        "sample": sequence.index,
        "state": "decode" if sequence.is_decoding else "prefill" if runs else "queue",
        "prompt_tokens": sequence.num_prompt_tokens,
        "output_tokens": len(sequence.token_times_s),
        "max_tokens": sequence.request.sampling.max_tokens,
        "computed_tokens": sequence.num_prefilled,
        "cached_tokens": sequence.cached_tokens,
        "age_s": round(now - sequence.request.arrival_s, 3),
        "preemptions": sequence.preemptions,
        "admission": sequence.admission,
        "blocks": 0 if pool is None or sequence.slot is None else len(pool.blocks(sequence.slot)),
    }


def _pool(pool: BlockPool, listed: Iterable[Sequence]) -> dict[str, Any]:
    """The pool with a byte for each block: its BlockState; or, of a block that one listed request alone uses, the
    number of that request in the list, counted on from the last state.
    """
    states = pool.allocator.states()
    states[pool.eviction.kept()] = BlockState.PINNED
    counts = np.bincount(states, minlength=len(BlockState)).tolist()
    running = [(number, row.slot) for number, row in enumerate(listed, len(BlockState)) if row.slot is not None]
    if running:
        held = [pool.blocks(slot) for _, slot in running]
        numbers = np.repeat(np.array([number for number, _ in running], dtype=np.uint8), list(map(len, held)))
        blocks = np.concatenate(held)
        alone = states[blocks] == BlockState.IN_USE
        states[blocks[alone]] = numbers[alone]
    return {
        "unit": pool.unit,
        "block_size": pool.block_size,
        **{state.name.lower(): count for state, count in zip(BlockState, counts, strict=True)},
        "map": states.tobytes(),
    }
