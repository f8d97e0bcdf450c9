"""Products of a decoder step with weights in 16 and in 12 bits, in turns in one process.

python -m experiments.compact_weights.benchmark [MODEL]      28 layers of Qwen3 0.6B, or another of conf/model
python -m experiments.compact_weights.benchmark sizes FILE   bits a number of published weights (GGUF)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch

from kvlab.cli.compose import compose_run
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.models.families import decoder_config
from kvlab.models.gguf import read_gguf
from kvlab.planning.memory import Matrix, matrices

ROWS = (1, 8, 16, 32, 48, 256, 1024)
TURNS = 5
FORMATS = (WeightFormat.PLAIN, WeightFormat.COMPACT)


def packed(matrix: Matrix, format: WeightFormat) -> list[PackedWeight]:
    """The matrix as often as the model has it, with random weights."""
    shape = matrix.outputs, matrix.inputs
    return [PackedWeight((torch.randn(shape) * 0.02).bfloat16(), format) for _ in range(matrix.times)]


def milliseconds(model: list[list[PackedWeight]], rows: int) -> float:
    """Of all products of a step, layer by layer; the output layer has 64 rows at most."""
    *layers, output = model
    x = {weights[0].inputs: torch.randn(rows, weights[0].inputs).bfloat16() for weights in model}
    start = time.perf_counter()
    for layer in zip(*layers, strict=True):
        for weight in layer:
            weight.multiply(x[weight.inputs])
    output[0].top1(x[output[0].inputs][:64])
    return (time.perf_counter() - start) * 1e3


def compare(name: str) -> None:
    """Print a row for each number of rows."""
    config = decoder_config(compose_run([f"model={name}"]).config.model)
    models = {format: [packed(matrix, format) for matrix in matrices(config)] for format in FORMATS}
    num_bytes = [sum(each.num_bytes for part in model for each in part) for model in models.values()]
    print(f"bytes: {num_bytes[0]:,} and {num_bytes[1]:,} ({num_bytes[1] / num_bytes[0]:.4f})")
    print("| rows | 16 bits, ms | 12 bits, ms | times as fast |\n|---|---|---|---|")
    for rows in ROWS:
        times: dict[WeightFormat, list[float]] = {format: [] for format in FORMATS}
        for turn in range(TURNS + 1):
            for format, model in models.items():
                taken = milliseconds(model, rows)
                if turn:  # the first one touches memory
                    times[format].append(taken)
        plain, compact = (median(each) for each in times.values())
        print(f"| {rows} | {plain:.1f} | {compact:.1f} | {plain / compact:.2f} |", flush=True)


def sizes(file: Path) -> None:
    """Print what the matrices of a GGUF file take, and how many of them stay in 16 bits."""
    gguf = read_gguf(file)
    bits = plain = numbers = 0
    for name, tensor in gguf.tensors.items():
        if len(tensor.shape) == 2:
            weight = torch.from_numpy(gguf.read(name).copy()).bfloat16()
            one = PackedWeight(weight, WeightFormat.COMPACT)
            bits += 8 * one.num_bytes
            numbers += weight.numel()
            plain += one.format is WeightFormat.PLAIN
    print(f"{bits / numbers:.3f} bits a number; {plain} matrices in 16 bits")


if __name__ == "__main__":
    if sys.argv[1:2] == ["sizes"]:
        sizes(Path(sys.argv[2]))
    else:
        compare(*(sys.argv[1:] or ["qwen3_0_6b"]))
