"""How fast each format of K and V is read: decode attention alone, over 4,096 tokens.

python -m experiments.precision.decode                  the fastest of 30 alternating calls, on a quiet machine
python -m experiments.precision.decode --one-thread     the median of their CPU time, which other work disturbs less
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from kvlab.kernels.cpu.attention import paged_attention
from kvlab.kernels.cpu.memory import empty
from kvlab.kv.formats import FORMATS

NAMES = ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
LENGTH, BLOCK, SEQUENCES, KV_HEADS, HEAD_DIM = 4096, 16, 8, 8, 128
TURNS = 30


def calls(group: int) -> dict[str, Callable[[], torch.Tensor]]:
    """A decode step of 8 sequences in each format, `group` query heads to a KV head."""
    blocks = SEQUENCES * LENGTH // BLOCK
    tables = torch.randperm(blocks, dtype=torch.int32).view(SEQUENCES, -1)
    lengths = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32)
    start = torch.arange(SEQUENCES + 1, dtype=torch.int32)
    q = torch.randn(SEQUENCES, group * KV_HEADS, HEAD_DIM).bfloat16()
    kv = [torch.randn(blocks, KV_HEADS, BLOCK, HEAD_DIM).bfloat16() for _ in range(2)]
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name in NAMES:
        (keys, key_scales), (values, value_scales) = ([_placed(x) for x in FORMATS[name].pack(each)] for each in kv)
        assert keys is not None
        assert values is not None
        found[name] = partial(
            paged_attention,
            q,
            keys,
            values,
            tables,
            lengths,
            start,
            scale=HEAD_DIM**-0.5,
            key_scales=key_scales,
            value_scales=value_scales,
        )
    return found


def _placed(x: torch.Tensor | None) -> torch.Tensor | None:
    """In large pages, as a pool has them."""
    return None if x is None else empty(tuple(x.shape), x.dtype).copy_(x)


def main() -> None:
    """Print a row for each group: milliseconds, and times the speed of bfloat16."""
    alone = "--one-thread" in sys.argv
    if alone:
        torch.set_num_threads(1)
    clock, typical = (time.process_time, median) if alone else (time.perf_counter, min)
    torch.manual_seed(0)
    print(f"| query heads to a KV head | {' | '.join(NAMES)} | bfloat16 reads |")
    for group in (1, 2, 4):
        formats = calls(group)
        taken: dict[str, list[float]] = {name: [] for name in NAMES}
        for turn in range(TURNS + 2):
            for name, call in formats.items():
                begin = clock()
                call()
                if turn >= 2:
                    taken[name].append(clock() - begin)
        best = {name: typical(times) for name, times in taken.items()}
        base = best["bfloat16"]
        cells = [f"{1000 * each:.1f} ms, {base / each:.2f}" for each in best.values()]
        read = 2 * SEQUENCES * LENGTH * KV_HEADS * HEAD_DIM * 2 / base / 1e9
        print(f"| {group} | {' | '.join(cells)} | {read:.1f} GB/s |", flush=True)


if __name__ == "__main__":
    main()
