"""Storms over `kvlab.Engine`: threads submit, stream, leave, abort and fail, while the executor fails too.

What has to hold whatever happens: each sample is told its end exactly once, every token and text is right up to
there, what nobody disturbed ends as it would alone, and the engine is empty and sound afterwards. The requests and
faults follow from a seed; what the threads do to each other does not.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvlab.config import FaultsConfig, PreemptionConfig, SchedulerConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.service import Engine
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import RequestRefusedError
from kvlab.kv.pool import BlockPool
from kvlab.kv.view import CacheView
from tests.engine.storm_client import Client, text_of
from tests.support.table import VOCAB, TableExecutor, table_pool, table_slots, table_tiers

THREADS = 6
TIMEOUT_S = 120  # of a whole storm, on a busy machine
LONGEST = 64  # tokens of a sequence
POOLS: dict[str, Callable[[], BlockPool]] = {
    "shared-lru": lambda: table_pool(40, 4, max_seq_len=LONGEST, sharing=True),
    "shared-fifo": lambda: table_pool(60, 2, max_seq_len=LONGEST, sharing=True, eviction="fifo"),
    "shared-lfu": lambda: table_pool(24, 8, max_seq_len=LONGEST, sharing=True, eviction="lfu"),
    "tiers": lambda: table_tiers(30, 6, 20, max_seq_len=LONGEST),
    "private": lambda: table_pool(36, 4, max_seq_len=LONGEST),
    "contiguous": lambda: table_slots(4, LONGEST),
}
RATE = 0.02  # of passes that a fault strikes, or of requests


class OddExecutor:
    """The table, with faults that a real device, model or sampler has; see `FAULTS`."""

    def __init__(self, executor: Executor, kind: str, seed: int) -> None:
        self._executor, self._kind, self._seed = executor, kind, seed
        self._draws = random.Random(seed)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        if (step.token_ids >= VOCAB).any():  # as a table of embeddings does
            raise IndexError("index out of range in self")
        kind, strikes = self._kind, self._draws.random() < RATE
        if kind == "slow" and self._draws.random() < 0.1:
            time.sleep(0.002)
        result = self._executor.execute(step, view)
        if kind == "memory" and strikes:
            raise MemoryError("not enough memory: you tried to allocate 17179869184 bytes")
        if kind == "short" and strikes:
            return StepResult(result.token_ids[1:])
        if kind == "nan" and result.token_ids:
            logits = torch.zeros(len(result.token_ids), 4)
            logits[self.struck(step)] = torch.nan
            Sampler()(logits, step.sampling())
        if kind == "vocabulary":
            for row in self.struck(step):
                result.token_ids[row] = VOCAB + 1
        return result

    def struck(self, step: StepInput) -> list[int]:
        """Rows of the sampled sequences whose token is the one that their request goes wrong at."""
        rows = step.sampled.tolist()
        return [
            row
            for row, sequence in enumerate(rows)
            if step.num_outputs[sequence] == self.goes_wrong_at(step.sequences[sequence].request_id)
        ]

    def goes_wrong_at(self, request_id: str) -> int | None:
        draws = random.Random(f"{self._seed} {request_id}")
        return draws.randrange(8) if draws.random() < 5 * RATE else None


#: What goes wrong below the engine. `forward`, `sampler` and `sequence` are those of `debug.faults`; `memory`: a
#: pass cannot have its memory; `nan`: logits of a request; `short`: a token too few comes back; `vocabulary`: a
#: token that is none, on which the next pass fails; `slow`: a pass takes long.
FAULTS = ("none", "slow", "forward", "sampler", "sequence", "memory", "nan", "short", "vocabulary")


@dataclass(frozen=True)
class StormConfig:
    """What a storm is over."""

    fault: str
    pool: str

    @property
    def name(self) -> str:
        """What a command line calls it."""
        return f"{self.fault}-{self.pool}"


CONFIGS = {config.name: config for config in (StormConfig(fault, pool) for fault in FAULTS for pool in POOLS)}


class Storm:
    """An engine, and all that happens to it."""

    def __init__(self, seed: int, config: StormConfig) -> None:
        self.seed, self.config = seed, config
        self.counts: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.problems: list[str] = []
        self.clients: list[Client] = []
        draws = random.Random(f"{seed} {config.name}")
        self.table = TableExecutor()
        executor: Executor = OddExecutor(self.table, config.fault, seed)
        if config.fault in ("forward", "sampler", "sequence"):
            executor = FaultyExecutor(self.table, FaultsConfig(config.fault, RATE, seed))
        settings = SchedulerConfig(
            order=draws.choice(["fcfs", "prefill_first", "decode_round_robin", "shortest_first", "priority"]),
            preemption=PreemptionConfig(draws.choice(["last_admitted", "fewest_generated", "priority"])),
            max_batch_size=draws.choice([3, 8, 16]),
            max_batched_tokens=draws.choice([16, 48]),
            long_prefill_threshold=draws.choice([None, 8]),
            mixed=draws.random() < 0.7,
            admission_reserve=draws.choice([0.0, 0.2]),
            max_waiting_requests=draws.choice([None, 12]),
        )
        core = EngineCore(
            POOLS[config.pool](),
            build_scheduler(settings),
            executor,
            WallClock(),
            vocab_size=VOCAB,
            detokenize=text_of,
        )
        self.engine = Engine(core)

    def wrong(self, problem: str) -> None:
        self.problems.append(problem)

    def client(self, draws: random.Random, name: str) -> Client:
        """A request of 1 to 40 tokens, behind a common beginning for most, for up to 16 tokens."""
        common = tuple(range(100, 100 + draws.choice([0, 4, 8, 13, 16])))
        own = tuple(draws.choices(range(1000, 9000), k=draws.randint(1, 24)))
        sampling = SamplingParams(
            draws.randint(1, 16),
            n=draws.choice([1, 1, 1, 1, 3]),
            stop=draws.choice([(), (), ("q", "ab")]),
        )
        salt = draws.choice([None, None, None, "tenant", draws.randrange(1000)])
        request = Request(name, common + own, sampling, priority=draws.randrange(3), salt=salt)
        client = Client(self, request, draws)
        self.clients.append(client)
        return client

    # What a thread does, with requests of its own

    def generate(self, draws: random.Random, name: str) -> None:
        clients = {
            each.request.request_id: each
            for each in (self.client(draws, f"{name}.{k}") for k in range(draws.randint(1, 3)))
        }
        try:
            for output in self.engine.generate([each.request for each in clients.values()]):
                client = clients[output.request_id]
                client.read(output)
                if client.leaves:
                    break
        except RequestRefusedError:
            self.counts["refused"] += 1
        else:
            if not any(client.left for client in clients.values()):
                return
        for client in clients.values():
            client.left = True  # who leaves one leaves all

    def stream(self, draws: random.Random, name: str) -> None:
        async def read(client: Client) -> None:
            stream = self.engine.stream(client.request)
            try:
                async for output in stream:
                    client.read(output)
                    if client.draws.random() < 0.1:
                        await asyncio.sleep(client.draws.random() * 0.003)
                    if client.leaves:
                        break
            except RequestRefusedError:
                self.counts["refused"] += 1
                client.left = True
            finally:
                await stream.aclose()

        async def main() -> None:
            tasks = {}
            for k in range(draws.randint(1, 5)):
                client = self.client(draws, f"{name}.{k}")
                tasks[asyncio.create_task(read(client))] = client
            for task, client in tasks.items():
                if draws.random() < 0.15:
                    await asyncio.sleep(draws.random() * 0.005)
                    client.left = task.cancel() or client.left
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self.wrong(f"{name}: a stream raised {type(result).__name__}: {result}")

        asyncio.run(main())

    def submit(self, draws: random.Random, name: str) -> None:
        client = self.client(draws, name)
        try:
            self.engine.submit(client.request, client.callback, client.finish)
        except RequestRefusedError:
            self.counts["refused"] += 1
            client.left = True
            return
        while not client.ended.wait(0.0005):
            if client.leaves and self.engine.abort(name):
                break
            self.engine.step()
        if set(client.records.values()) != {1} or not client.ended.wait(1):
            self.wrong(f"{name}: {dict(client.records)} records of its samples")

    def abort(self, draws: random.Random, name: str) -> None:
        with suppress(IndexError):
            victim = draws.choice(self.clients).request.request_id
            self.aborted.add(victim)
            self.engine.abort(victim)

    def ask(self, draws: random.Random, name: str) -> None:
        stats = self.engine.stats()
        if not 0 <= (stats.blocks_in_use or 0) <= (stats.blocks_total or 0):
            self.wrong(f"{name}: {stats}")

    # The storm

    def blow(self, jobs: int) -> None:
        left = iter(range(jobs))
        lock = threading.Lock()
        actions = [self.generate, self.stream, self.stream, self.submit, self.submit, self.abort, self.ask]

        def work() -> None:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                draws = random.Random(f"{self.seed} {self.config.name} {number}")
                action = draws.choice(actions)
                try:
                    action(draws, f"{action.__name__}{number}")
                except Exception:
                    self.wrong(f"{action.__name__}{number} raised {traceback.format_exc()}")

        threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
        deadline = time.monotonic() + TIMEOUT_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if hanging := [thread for thread in threads if thread.is_alive()]:
            frames = sys._current_frames()
            shown = ["".join(traceback.format_stack(frames[thread.ident])) for thread in hanging if thread.ident]
            self.wrong(f"{len(hanging)} threads hang:\n" + "\n".join(shown))
            return
        self.calm(deadline)

    def calm(self, deadline: float) -> None:
        """Everybody has gone: the engine is to be empty and sound."""
        engine, core = self.engine, self.engine.core
        while engine._worker is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        while engine._broken is None and engine.has_work() and time.monotonic() < deadline:
            engine.step()
        outputs, stats, counters = core._outputs, core.pool.stats(), core.pool.counters()
        remains = {
            "error": engine._broken,
            "worker": engine._worker,
            "inbox": list(engine._inbox),
            "calls": engine._calls,
            "requests": outputs.requests,
            "callbacks": {**outputs._on_output, **outputs._on_finish},
            "texts": outputs._texts,
            "running": list(core.scheduler.running),
            "waiting": list(core.scheduler.waiting),
            "memory": (stats.blocks_in_use, stats.sequences, stats.tokens_stored),
            "audit": core.audit(),
            "allocated, not freed": counters.blocks_allocated - counters.blocks_freed,
            "mixed up": self.table.errors,
        }
        for name, value in remains.items():
            if value and value != (0, 0, 0):
                self.wrong(f"left behind: {name}: {value}")
        for client in self.clients:
            client.check()
        self.counts["steps"] = core._steps
        self.counts["preemptions"] = core._preemptions
        self.counts["hit_tokens"] = counters.hit_tokens


class StormFailure(AssertionError):
    """What was wrong, with the way to see it again."""


def run(seed: int, jobs: int, config: StormConfig) -> Counter[str]:
    """A storm of this many calls of an engine. Returns the ends of its streams, and what the engine counted.

    Raises StormFailure, which names the seed and the first problems.
    """
    storm = Storm(seed, config)
    storm.blow(jobs)
    if storm.problems:
        shown = "\n  ".join(storm.problems[:8])
        raise StormFailure(
            f"seed {seed}, {config.name}: {len(storm.problems)} problems in {len(storm.clients)} requests\n"
            f"python -m experiments.soak.run storms --config {config.name} --seed {seed} --jobs {jobs}\n  {shown}"
        )
    return storm.counts
