"""Products of a decoder with weights in int8 beside bfloat16, in turns in one process, by instruction set.

    python -m experiments.cpu_paths.int8 [--arch native skylake-avx512 x86-64-v3 x86-64] [--rounds 9] [--layers 8]

The library is built for each architecture (KVLAB_CPU_ARCH) in a process of its own. A round multiplies all matrices
of the layers of Qwen3 0.6B, which no second-level cache holds, once with each format, on one thread. A ratio is
that of the thread's two times in a round; printed are the median of all rounds and their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from experiments.cpu_paths.benchmark import HELD, IN_PROCESS
from kvlab.cli.compose import compose_run
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import instruction_set
from kvlab.models.families import decoder_config
from kvlab.planning.memory import matrices

ROWS = (1, 4, 16, 128, 512, 2048)
FORMATS = tuple(format for format in WeightFormat if format is not WeightFormat.COMPACT)


def measure(rounds: int, layers: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by rows and format."""
    torch.set_num_threads(1)  # so that a thread's CPU time is that of the products, whatever else runs
    config = decoder_config(compose_run(["model=qwen3_0_6b"]).config.model)
    *shapes, _ = matrices(config)
    weights = [
        (torch.randn(shape.outputs, shape.inputs) * 0.02).bfloat16() for _ in range(layers) for shape in shapes
    ]
    models = {format: [PackedWeight(weight, format) for weight in weights] for format in FORMATS}
    found: dict[str, dict[str, list[float]]] = {}
    for rows in ROWS:
        x = {shape.inputs: torch.randn(rows, shape.inputs).bfloat16() for shape in shapes}
        times: dict[str, list[float]] = {format.name: [] for format in FORMATS}
        for turn in range(rounds + 1):
            for format, model in models.items():
                start = time.thread_time()
                for weight in model:
                    weight.multiply(x[weight.inputs])
                if turn:  # the first one touches memory
                    times[format.name].append(time.thread_time() - start)
        found[str(rows)] = times
    return {"name": {instruction_set(): []}, **found}


def ratio(over: list[float], under: list[float]) -> str:
    """The median of the rounds' ratios, and their quartiles."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["native", "skylake-avx512", "x86-64-v3", "x86-64"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    if IN_PROCESS in os.environ:
        print(json.dumps(measure(arguments.rounds, arguments.layers)))
        return
    others = [format.name for format in FORMATS[1:]]
    print(f"| path | rows | bfloat16, ms | {' | '.join(f'{name.lower()}, times as fast' for name in others)} |")
    print(f"|---|---|---|{'---|' * len(others)}")
    for architecture in arguments.arch:
        environment = {**os.environ, **HELD.get(architecture, {}), "KVLAB_CPU_ARCH": architecture, IN_PROCESS: "1"}
        numbers = "--rounds", str(arguments.rounds), "--layers", str(arguments.layers)
        command = [sys.executable, "-m", "experiments.cpu_paths.int8", *numbers]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
        (name, *_), *rows = (times for times in json.loads(said).values())
        for count, times in zip(ROWS, rows, strict=True):
            plain = times[WeightFormat.PLAIN.name]
            first = f"| `{name}` ({architecture}) | {count} | {1e3 * statistics.median(plain):.1f} |"
            print(first, " | ".join(ratio(plain, times[other]) for other in others), "|", flush=True)


if __name__ == "__main__":
    main()
