"""What the ledger takes of main memory, and a run's peak beside its plan.

python -m experiments.memory.run [--blocks 1000000] [--sequences 2048] [--models qwen3_mini,qwen3_0_6b]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.engine_overhead.benchmark import InstantExecutor
from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.scheduler import build_scheduler
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.lab.machine import describe

BLOCK, VOCAB = 16, 150_000
RUN = (
    "executor.device=cpu", "executor.dtype=bfloat16", "workload=burst16", "workload.num_requests=2", "kv=paged",
    "kv.memory=512MiB", "tracking=off", "executor.weights=plain",
)  # fmt: skip
MIB = 2**20


def ledger(blocks: int, sequences: int) -> Iterator[tuple[str, float, str]]:
    """(what, bytes, of each of what), without tensors: Python's own count of what it allocates."""
    tokens = blocks // sequences * BLOCK
    generator, ids = np.random.default_rng(0), list(range(VOCAB))
    # Made before anything is counted: a sequence has its tokens whether there is a ledger or not.
    prompts = [[ids[i] for i in generator.integers(0, VOCAB, tokens).tolist()] for _ in range(sequences)]
    for sharing in (False, True):
        where = "with prefix sharing" if sharing else "without sharing"
        tracemalloc.start()
        pool = PagedKVCachePool(blocks, BLOCK, tokens + BLOCK, prefix_sharing=sharing)
        empty = _traced()
        yield f"pool of {blocks:,} free blocks, {where}", empty / blocks, "block"
        slots = []
        for prompt in prompts:
            slot = pool.allocate_slot(token_ids=prompt)
            pool.view([slot], [tokens]).advance()
            slots.append(slot)
        full = _traced()
        held = blocks // sequences * sequences
        yield f"blocks of {sequences:,} sequences of {tokens:,} tokens, {where}", (full - empty) / held, "block"
        for slot in slots:
            pool.free_slot(slot)
        if sharing:
            yield "the same, cached and free", (_traced() - empty) / held, "block"
        tracemalloc.stop()
        del pool, slots
        gc.collect()


def engine(sequences: int) -> Iterator[tuple[str, float, str]]:
    """(what, bytes, of each of what): a request of 16 tokens in and 8 out, beside what the caller made of it."""
    prompt = tuple(range(16))
    for number in (1, sequences):  # the first time, what a step imports is loaded
        pool = PagedKVCachePool(4 * number, BLOCK, 64)
        config = SchedulerConfig(max_batch_size=number, max_batched_tokens=32 * number, admission_reserve=0.0)
        core = EngineCore(pool, build_scheduler(config), InstantExecutor(), WallClock())
        requests = [Request(f"r{one}", prompt, SamplingParams(8, ignore_eos=True)) for one in range(number)]
        tracemalloc.start()
        found = []
        live = [core.add_request(request) for request in requests]
        found.append(("a request that waits", _traced() / number, "request"))
        core.step()
        found.append(("a request that runs, with its slot", _traced() / number, "request"))
        while any(sequence.finish_reason is None for sequence in live):
            core.step()
        live.clear()
        found.append(("a request that has ended", _traced() / number, "request"))
        tracemalloc.stop()
    yield from found


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def planned_and_peak(overrides: list[str]) -> dict[str, int]:
    """A run in this process: resident bytes before it, at its peak, and what was planned."""
    import psutil

    from experiments.runs import configure
    from kvlab.engine.build import build_engine
    from kvlab.lab.run.drive import drive
    from kvlab.lab.run.plan import plan_run

    plan = plan_run(configure(overrides))
    assert plan.kernels is not None
    base = psutil.Process().memory_info().rss
    engine = build_engine(plan)
    drive(engine, plan.requests)
    return {
        "base": base,
        "peak": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024,  # of this program
        "weights": plan.weights.total,
        "cache": plan.pool.num_bytes,
        "working": plan.working.peak - plan.working.small,
        "margin": plan.working.small,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=2_048)
    parser.add_argument("--models", default="qwen3_mini,qwen3_0_6b")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)  # a run in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(planned_and_peak(arguments.one)))
        return
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}\n\n| what | bytes | of each |\n|---|---|---|")
    for what, count, each in (*ledger(arguments.blocks, arguments.sequences), *engine(arguments.sequences)):
        print(f"| {what} | {count:,.0f} | {each} |", flush=True)
    columns = (
        "weights",
        "K and V",
        "working memory",
        "margin",
        "planned, MiB",
        "peak",
        "peak / plan",
        "without margin",
    )
    print(f"\n| model | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    for model in filter(None, arguments.models.split(",")):
        command = [sys.executable, "-m", "experiments.memory.run", "--one", f"model={model}", *RUN]
        found = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )
        names = ("weights", "cache", "working", "margin")
        planned, taken = sum(found[name] for name in names), found["peak"] - found["base"]
        parts = " | ".join(f"{found[name] / MIB:,.0f}" for name in names)
        ratios = f"{taken / planned:.3f} | {taken / (planned - found['margin']):.3f}"
        print(f"| {model} | {parts} | {planned / MIB:,.0f} | {taken / MIB:,.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
