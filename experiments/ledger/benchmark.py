"""Speed of the ledger alone, no tensors: a table of medians, and beside vLLM's BlockPool where there is one.

    python -m experiments.ledger.benchmark [--vllm-python <python of an environment with vLLM>]
                                           [--trace <mooncake_conversation.jsonl>]

With a trace it also replays it, request after request, for each eviction policy and pool size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.lab.machine import describe

COUNTS = (1, 16, 256)
ROUNDS = 7
VLLM = """
import json, sys, time
from vllm.v1.core.block_pool import BlockPool
pool = BlockPool(num_gpu_blocks=100_000, enable_caching=False, hash_block_size=16)
def rate(count):
    calls = max(200_000 // count, 1)
    start = time.perf_counter()
    for _ in range(calls):
        pool.free_blocks(pool.get_new_blocks(count))
    return calls * count / (time.perf_counter() - start)
rate(16)
for line in sys.stdin:
    print(json.dumps(rate(int(line))), flush=True)
"""


def allocate_and_free_rate(count: int) -> float:
    """Blocks per second through allocate(count) + free."""
    allocator = BlockAllocator(100_000)
    calls = max(200_000 // count, 1)
    start = time.perf_counter()
    for _ in range(calls):
        allocator.free(allocator.allocate(count))
    return calls * count / (time.perf_counter() - start)


def median_ms(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def allocate_and_free(vllm_python: str | None) -> list[tuple[str, ...]]:
    """Rows of blocks per second, ours and theirs in turn."""
    peer = None
    if vllm_python:
        peer = subprocess.Popen(
            [vllm_python, "-c", VLLM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    rows = []
    for count in COUNTS:
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(allocate_and_free_rate(count))
            if peer is not None and peer.stdin and peer.stdout:
                print(count, file=peer.stdin, flush=True)
                theirs.append(json.loads(next(line for line in peer.stdout if line[0].isdigit())))
        mine = statistics.median(ours)
        row = [f"allocate + free, {count} per call", f"{mine / 1e6:.2f} M blocks/s"]
        if theirs:
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            row += [f"{statistics.median(theirs) / 1e6:.2f} M blocks/s", f"{statistics.median(ratios):.1f}x"]
        rows.append(tuple(row))
    if peer is not None:
        peer.kill()
    return rows


def large_pool() -> list[tuple[str, ...]]:
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    pool = PagedKVCachePool(1_000_000, 16, 16_384, prefix_sharing=True)
    seconds = time.perf_counter() - start
    size = (process.memory_info().rss - before) / 2**20
    assert pool.allocator.num_free() == 1_000_000
    return [
        ("pool of 1,000,000 blocks: time", f"{seconds:.3f} s"),
        ("pool of 1,000,000 blocks: memory", f"{size:.0f} MiB"),
    ]


def cached_prompt() -> tuple[str, ...]:
    pool = PagedKVCachePool(8_000, 16, 110_000, prefix_sharing=True)
    tokens = np.random.default_rng(0).integers(0, 150_000, 100_000).tolist()
    slot = pool.allocate_slot(token_ids=tokens)
    pool.view([slot], [len(tokens)]).advance()
    pool.free_slot(slot)
    index = pool.index
    assert index is not None
    assert len(index.match(tokens)) == 6_250
    return ("match a cached prompt of 100,000 tokens", f"{median_ms(lambda: index.match(tokens)):.2f} ms")


def decode_view() -> tuple[str, ...]:
    pool = PagedKVCachePool(256 * 260, 16, 4_200)
    slots = [pool.allocate_slot(4_000) for _ in range(256)]
    pool.view(slots, [4_000] * 256).advance()
    ones = [1] * 256

    def step() -> None:
        view = pool.view(slots, ones)
        _ = view.positions, view.slot_mapping, view.query_start, view.seq_lens, view.block_tables
        view.rollback()

    return ("view of a decode step, 256 sequences of 4,000 tokens", f"{median_ms(step, 51):.2f} ms")


def replay(requests: list[list[int]], policy: str, blocks: int) -> tuple[float, float, float]:
    """Cached when reached, usable as a prefix (both as shares of all blocks), and seconds.

    A block of the trace is 512 tokens with one id for it and all before it; here each of its tokens has that id.
    """
    size = 512
    pool = PagedKVCachePool(blocks, size, size * 512, prefix_sharing=True, eviction=EVICTION_POLICIES.get(policy)())
    start = time.perf_counter()
    for ids in requests:
        tokens = [token for block in ids for token in (block,) * size]
        slot = pool.allocate_slot(token_ids=tokens)
        pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
        pool.free_slot(slot)
    done = pool.counters()
    total = done.prompt_tokens / size
    hits = done.hit_tokens / size
    return (hits + done.merged_blocks) / total, hits / total, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM, to measure its BlockPool beside")
    parser.add_argument("--trace", type=Path, help="mooncake_conversation.jsonl, to replay")
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 50_000, 30_000, 10_000, 1_000])
    arguments = parser.parse_args()
    print(f"{describe('cpu')}; medians of {ROUNDS}, {time.strftime('%Y-%m-%d')}\n")
    peer = bool(arguments.vllm_python)
    print("| what | kvlab |" + (" vLLM BlockPool | ratio |" if peer else ""))
    print("|---|---|" + ("---|---|" if peer else ""))
    for row in [*allocate_and_free(arguments.vllm_python), *large_pool(), cached_prompt(), decode_view()]:
        cells = [*row, *[""] * (4 - len(row))] if peer else list(row)
        print("| " + " | ".join(cells) + " |", flush=True)
    if arguments.trace:
        requests = [json.loads(line)["hash_ids"] for line in arguments.trace.read_text().splitlines()]
        print("\n| policy | blocks | cached when reached | usable as a prefix | seconds |\n|---|---|---|---|---|")
        for policy in EVICTION_POLICIES.names():
            for blocks in arguments.blocks:
                reached, usable, seconds = replay(requests, policy, blocks)
                print(f"| {policy} | {blocks:,} | {reached:.4f} | {usable:.4f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
