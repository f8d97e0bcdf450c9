"""Products whose weights are prefetched into the first cache beside those that prefetch into the second.

    python -m experiments.cpu_paths.prefetches [--arch native] [--rounds 9] [--rows 1 2 4 8 12 16 24 48 96 512]

One library is built as for a first cache of 48 KB, one as for one of 32 KB (`KVLAB_FIRST_CACHE_KB`). They multiply
the same weights, more than any cache holds, in turns, on one thread by its processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight

OUTPUTS, INPUTS, WEIGHTS = 3072, 1024, 12  # 75 MB in bfloat16
ROWS = (1, 2, 4, 8, 12, 16, 24, 48, 96, 512)
FORMATS = {
    "bfloat16": WeightFormat.PLAIN,
    "int8": WeightFormat.INT8,
    "int8_w8a8": WeightFormat.INT8_W8A8,
    "float32": WeightFormat.PLAIN,
}
CACHES = {"first": 48, "second": 32}  # KB of the first cache for which a library prefetches there


def packed(format: str, weights: list[torch.Tensor]) -> dict[str, list[PackedWeight]]:
    """The weights by either library."""
    found = {}
    for cache, size in CACHES.items():
        os.environ["KVLAB_CXXFLAGS"] = f"-UKVLAB_FIRST_CACHE_KB -DKVLAB_FIRST_CACHE_KB={size}"
        found[cache] = [PackedWeight(weight, FORMATS[format]) for weight in weights]
    return found


def seconds(weights: list[PackedWeight], x: torch.Tensor) -> float:
    """Processor time of this thread."""
    start = time.thread_time()
    for weight in weights:
        weight.multiply(x)
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="native")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    os.environ["KVLAB_CPU_ARCH"] = arguments.arch
    torch.set_num_threads(1)
    print(
        "| weights | rows | first cache, GFLOP/s | second, GFLOP/s | times as fast (quartiles) |",
        f"|{'---|' * 5}",
        sep="\n",
    )
    for format in arguments.formats:
        dtype = torch.float32 if format == "float32" else torch.bfloat16
        sides = packed(format, [torch.randn(OUTPUTS, INPUTS).to(dtype) for _ in range(WEIGHTS)])
        for rows in arguments.rows:
            x = torch.randn(rows, INPUTS).to(dtype)
            rounds = [
                {cache: seconds(weights, x) for cache, weights in sides.items()} for _ in range(arguments.rounds)
            ]
            rates = (
                2e-9 * rows * OUTPUTS * INPUTS * WEIGHTS / min(each[cache] for each in rounds) for cache in CACHES
            )
            low, middle, high = statistics.quantiles([each["first"] / each["second"] for each in rounds], n=4)
            cells = (
                format,
                str(rows),
                *(f"{rate:.0f}" for rate in rates),
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
