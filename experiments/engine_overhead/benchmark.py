"""What the engine itself costs per step: schedule, reserve, view and bookkeeping, with an executor that returns at
once.

    python -m experiments.engine_overhead.benchmark [--running 64 256 2048] [--steps 1000] [--cpu-time]

Sequences of 2,000 tokens on average (prompts of 1,744, then 512 tokens of output); one that ends is replaced at
once, so that steps decode, prefill in chunks, admit and retire as in service. The view's tensors are built as a
model would have them built. A pool without tensors of its own.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import numpy as np

from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.garbage import gc_frozen
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.view import CacheView
from kvlab.lab.machine import describe

PROMPT, OUTPUT, BLOCK = 1_744, 512, 16
LIMITS_MS = {64: 1.0, 256: 3.0, 2_048: 10.0}
VOCAB = 150_000


class InstantExecutor:
    """Any token for each sequence that samples, as soon as the view's tensors are there."""

    def __init__(self) -> None:
        self._token = 0

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        _ = view.positions, view.slot_mapping, view.query_start, view.seq_lens, view.block_tables
        self._token = (self._token + 1) % VOCAB
        return StepResult([self._token] * len(step.sampled))


class Service:
    """An engine that is kept at `running` sequences."""

    def __init__(self, running: int, *, sharing: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        blocks = int(1.3 * running * -(-(PROMPT + OUTPUT) // BLOCK))
        pool = PagedKVCachePool(blocks, BLOCK, PROMPT + OUTPUT, prefix_sharing=sharing)
        budget = running + min(8 * running, 8_192)
        config = SchedulerConfig(max_batch_size=running, max_batched_tokens=budget, admission_reserve=0.0)
        self.engine = EngineCore(pool, build_scheduler(config), InstantExecutor(), WallClock())
        self._generator = np.random.default_rng(0)
        self._count = 0
        self._live: list[Sequence] = []
        for age in self._generator.integers(0, OUTPUT, running).tolist():
            self._submit(age)
        while len(self.engine.scheduler.waiting):
            self.step()

    def _submit(self, age: int = 0) -> None:
        prompt = tuple(self._generator.integers(0, VOCAB, PROMPT + age).tolist())
        request = Request(f"r{self._count}", prompt, SamplingParams(OUTPUT - age, ignore_eos=True))
        self._count += 1
        self._live.append(self.engine.add_request(request))

    def step(self) -> float:
        """One step and, outside of its time, a new request for each that ended; returns milliseconds."""
        start = self._clock()
        self.engine.step()
        took = (self._clock() - start) * 1000
        if any(sequence.finish_reason is not None for sequence in self._live):
            before = len(self._live)
            self._live = [sequence for sequence in self._live if sequence.finish_reason is None]
            for _ in range(before - len(self._live)):
                self._submit()
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=sorted(LIMITS_MS))
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, for a machine that is not quiet")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    print(f"{describe('cpu')}; {arguments.steps} steps each, {time.strftime('%Y-%m-%d')}\n")
    print(
        "| running | prefix sharing | p50, ms | p99, ms | at most, ms | p50 per sequence, µs | limit for p99, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for running in arguments.running:
        for sharing in (True, False):
            service = Service(running, sharing=sharing, clock=clock)
            gc.collect()
            with gc_frozen():
                times = [service.step() for _ in range(arguments.steps)]
            p50, p99 = np.percentile(times, [50, 99])
            limit = f"{LIMITS_MS[running]:.0f}" if running in LIMITS_MS else ""
            cells = (running, "on" if sharing else "off", f"{p50:.2f}", f"{p99:.2f}", f"{max(times):.2f}")
            row = " | ".join(map(str, (*cells, f"{1000 * p50 / running:.1f}", limit)))
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
