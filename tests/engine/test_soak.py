"""Hours of overload in seconds: nothing lost, nothing leaked, memory flat.

`KVLAB_SOAK_REQUESTS=50000 pytest tests/engine/test_soak.py -s` takes as many requests and prints what happened.
"""

from __future__ import annotations

import gc
import heapq
import os
import random
import time
from collections import Counter

import psutil
import pytest

from kvlab.config import FaultsConfig, PreemptionConfig
from kvlab.core import FinishReason, Request, SamplingParams, StepOutput
from kvlab.engine.clock import LogicalClock
from kvlab.engine.core import EngineCore
from kvlab.errors import RequestRefusedError
from tests.support.engines import assert_empty
from tests.support.table import TableExecutor, table_engine, table_pool, undisturbed

REQUESTS = int(os.environ.get("KVLAB_SOAK_REQUESTS", "1200"))
OVERLOAD, ABORTED, FAULTS = 1.5, 0.01, 0.01
_SYSTEM = [tuple(range(1000 * group, 1000 * group + 24)) for group in range(4)]


class Soak:
    """An engine under load, and what became of each request. Keeps nothing of those that ended."""

    def __init__(self, order: str, victim: str, faults: float) -> None:
        self.clock = LogicalClock()
        self.executor = TableExecutor(step_s=1e-3, token_s=2e-5)
        self.engine: EngineCore = table_engine(
            table_pool(80, 8, max_seq_len=160, sharing=True),
            self.executor,
            self.clock,
            FaultsConfig("any", faults, seed=1),
            order=order,
            preemption=PreemptionConfig(victim),
            max_decode_seqs=6,
            max_batch_size=12,
            max_batched_tokens=96,
            long_prefill_threshold=48,
            admission_reserve=0.0,
            max_waiting_requests=64,
        )
        self.random = random.Random(0)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.open: dict[str, tuple[Request, list[int]]] = {}  # accepted and not ended, with its tokens so far

    def request(self, number: int, arrival_s: float) -> Request:
        """A prompt of 1-64 tokens, behind a common one for most, and 1-64 tokens of output, few of them long."""
        own = tuple(self.random.choices(range(10_000, 900_000), k=self.random.randint(1, 64)))
        prompt = self.random.choice([(), *_SYSTEM]) + own
        output = min(64, max(1, round(self.random.lognormvariate(2.5, 0.9))))
        return Request(f"r{number}", prompt, SamplingParams(output), arrival_s, priority=number % 3)

    def submit(self, request: Request) -> bool:
        self.open[request.request_id] = (request, [])
        try:
            self.engine.add_request(request, self.read)
        except RequestRefusedError:
            del self.open[request.request_id]
            self.counts["refused"] += 1
            return False
        self.counts["accepted"] += 1
        return True

    def read(self, output: StepOutput) -> None:
        if output.request_id not in self.open:  # raising here would only end the sequence
            self.errors.append(f"{output.request_id}: told after its end")
            return
        request, tokens = self.open[output.request_id]
        if output.token_id is not None:
            tokens.append(output.token_id)
        if output.finish_reason is None:
            return
        del self.open[output.request_id]
        self.executor.forget(output.request_id)
        self.counts[output.finish_reason.value] += 1
        expected = undisturbed(request)
        if tokens != (expected if output.finish_reason is FinishReason.LENGTH else expected[: len(tokens)]):
            self.errors.append(f"{output.request_id}: {tokens} instead of {expected}")

    def step(self) -> None:
        record = self.engine.step()
        assert self.engine.pool.audit() == []
        if record is not None:
            self.counts["steps"] += 1
            for name in ("preempted", "failed_passes", "recomputed_tokens"):
                self.counts[name] += getattr(record, name)
            for name in ("hit_tokens", "recompute_hit_tokens"):
                self.counts[name] += getattr(record.counters, name)
            self.counts["computed_tokens"] += record.prefill_tokens + record.decode_tokens
        if len(self.executor.steps) > 1000:
            self.executor.steps.clear()

    def drain(self) -> None:
        while self.engine.has_work():
            self.step()


def capacity(order: str, victim: str) -> float:
    """Requests per second of a full engine."""
    soak = Soak(order, victim, faults=0.0)
    for number in range(150):
        soak.submit(soak.request(number, 0.0))
        while len(soak.engine.scheduler.waiting) > 40:
            soak.step()
    soak.drain()
    return 150 / soak.clock.now()


def objects_and_bytes() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "victim", "share"),
    [
        ("fcfs", "last_admitted", 0.5),
        ("prefill_first", "fewest_generated", 0.25),
        ("decode_round_robin", "last_admitted", 0.25),
        ("shortest_first", "fewest_generated", 0.25),
        ("priority", "priority", 0.25),
    ],
)
def test_overload_with_aborts_and_faults(order: str, victim: str, share: float) -> None:
    began = time.perf_counter()
    rate = OVERLOAD * capacity(order, victim)
    soak = Soak(order, victim, FAULTS)
    total = round(REQUESTS * share)
    arrival_s, memory = 0.0, []
    aborts: list[tuple[float, str]] = []
    for number in range(total):
        arrival_s += soak.random.expovariate(rate)
        while soak.engine.has_work() and soak.clock.now() < arrival_s:
            soak.step()
            while aborts and aborts[0][0] <= soak.clock.now():
                soak.engine.abort(heapq.heappop(aborts)[1])
        soak.clock.wait_until(arrival_s)
        if soak.submit(soak.request(number, arrival_s)) and soak.random.random() < ABORTED:
            heapq.heappush(aborts, (arrival_s + soak.random.expovariate(5.0), f"r{number}"))
        if number in (total // 3, total - 1):
            memory.append(objects_and_bytes())
    soak.drain()
    counts = soak.counts
    assert not soak.open
    assert soak.errors == soak.executor.errors == []
    assert counts["accepted"] + counts["refused"] == total
    assert counts["accepted"] == counts["length"] + counts["aborted"] + counts["failed"]
    assert_empty(soak.engine)
    (objects, size), (later_objects, later_size) = memory
    assert later_objects < 1.05 * objects + 2000
    assert later_size - size < 16 * 2**20
    for name in ("preempted", "failed_passes", "failed", "aborted", "hit_tokens", "recompute_hit_tokens"):
        assert counts[name] > 0, name
    assert counts["refused"] > 0 or order == "shortest_first"  # which keeps the waiting queue short
    assert counts["length"] > 0.9 * counts["accepted"]
    recomputed = counts["recomputed_tokens"] / counts["computed_tokens"]
    print(
        f"\n{order}, {victim}: {total} requests at {rate:.0f} per second for {soak.clock.now():.0f} s; "
        f"{dict(counts)}; recomputed {100 * recomputed:.1f} %; objects {objects} -> {later_objects}, "
        f"memory {size / 2**20:.0f} -> {later_size / 2**20:.0f} MiB; {time.perf_counter() - began:.1f} s"
    )
