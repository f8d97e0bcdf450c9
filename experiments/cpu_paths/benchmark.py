"""Rates of each way in which this processor can multiply, by the number of rows.

    python -m experiments.cpu_paths.benchmark [--arch native x86-64-v3 x86-64] [--rounds 5]

The library is built for each of the architectures (KVLAB_CPU_ARCH), in a process of its own, and products are
measured with each of its paths in turn, those in float32 beside PyTorch's with the same instructions. Their weights
are more than the second-level caches hold, as a model's are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import load, paths
from kvlab.kernels.cpu.paths import TILES, Paths, rates_in_registers, take

ROWS = (1, 2, 4, 8, 12, 16, 24, 48, 96, 192, 512)
OUTPUTS, INPUTS, WEIGHTS = 3072, 1024, 16  # 100 MB
IN_PROCESS = "KVLAB_EXPERIMENT_CPU_PATHS"  # set in the processes that measure
# What holds PyTorch's libraries to an architecture's instructions.
HELD = {
    "x86-64-v3": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "x86-64": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """GFLOP/s of each path on all threads: in registers, and by the number of rows. Medians."""
    library, threads = load(), torch.get_num_threads()
    names = library.kvlab_paths().decode().split()
    vectors = [name for name in names if name != TILES]
    choices = {name: Paths(name == TILES, name, name, {}) for name in vectors}
    if TILES in names:
        choices[TILES] = Paths(True, vectors[0], vectors[0], {})
    weights = [PackedWeight(torch.randn(OUTPUTS, INPUTS).bfloat16()) for _ in range(WEIGHTS)]
    limits = rates_in_registers(library, threads)
    rates = {name: {"registers": limits[name] / 1e9} for name in names}
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, choice in choices.items():
                take(library, choice)
                start = time.perf_counter()
                for weight in weights:
                    weight.multiply(x)
                taken[name].append(time.perf_counter() - start)
        for name, seconds in taken.items():
            work = 2 * rows * OUTPUTS * INPUTS * WEIGHTS
            rates[name][str(rows)] = work / statistics.median(seconds) / 1e9
    take(library, paths())
    return rates | measure_float32(names[0], rounds)


def measure_float32(path: str, rounds: int) -> dict[str, dict[str, float]]:
    """GFLOP/s of products in float32 on all threads, by kernels and by PyTorch in turns. Medians."""
    weights = [torch.randn(OUTPUTS, INPUTS) for _ in range(WEIGHTS // 2)]
    ways: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        f"{path}, float32": [PackedWeight(weight).multiply for weight in weights],
        f"PyTorch, float32, as on `{path}`": [partial(functional.linear, weight=weight) for weight in weights],
    }
    rates: dict[str, dict[str, float]] = {name: {} for name in ways}
    for rows in ROWS:
        x = torch.randn(rows, INPUTS)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, products in ways.items():
                start = time.perf_counter()
                for product in products:
                    product(x)
                taken[name].append(time.perf_counter() - start)
        for name, seconds in taken.items():
            rates[name][str(rows)] = 2 * rows * OUTPUTS * INPUTS * len(weights) / statistics.median(seconds) / 1e9
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["native", "x86-64-v3", "x86-64"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if IN_PROCESS in os.environ:
        print(json.dumps(measure(arguments.rounds)))
        return
    columns = ("registers", *map(str, ROWS))
    print(f"| path | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for architecture in arguments.arch:
        environment = {**os.environ, **HELD.get(architecture, {}), "KVLAB_CPU_ARCH": architecture, IN_PROCESS: "1"}
        command = [sys.executable, "-m", "experiments.cpu_paths.benchmark", "--rounds", str(arguments.rounds)]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
        for name, rates in json.loads(said).items():
            cells = (f"{rates[column]:,.0f}" if column in rates else "" for column in columns)
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
