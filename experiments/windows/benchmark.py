"""What giving back the blocks that left a sliding window buys: sequences that fit, and output tokens per second.

    python -m experiments.windows.benchmark simulated --figure experiments/windows/windows.png   two minutes
    python -m experiments.windows.benchmark here                                                 a minute

`simulated` is Gemma 3 27B on an H100 and an H200, the same on every machine; `here` is a small Gemma 3 with random
weights on this CPU, windows on and off in turn.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from experiments.runs import configure, measure
from kvlab.lab.capacity import plan_capacity
from kvlab.lab.machine import describe

LONGEST = 66_000
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
DEVICES = ("h100_sxm", "h200_sxm")
GEMMA = [
    "model=gemma3_27b",
    "executor=simulated",
    f"model.max_seq_len={LONGEST}",
    "tracking=off",
    "executor.memory_utilization=0.9",
]
GEMMA += ["executor.timing=roofline", "scheduler.max_batch_size=48", "scheduler.max_batched_tokens=512"]
SERVED = (2048, 8192, 16_384, 32_768)  # tokens of a prompt
REQUESTS, OUTPUT = 48, 1024
#: A Gemma 3 of 45 million parameters, so large that a step's time is that of its weights.
SMALL = [
    "model=gemma3_tiny",
    "executor=cpu",
    "tracking=off",
    "model.max_seq_len=4096",
    "kv.memory=24MiB",
    "scheduler.max_batch_size=16",
    *(
        f"model.architecture.{key}={value}"
        for key, value in {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 6,
        }.items()
    ),
]
SMALL_SERVED, ROUNDS = (64, 1024), 2
MORE: dict[bool, list[str]] = {True: [], False: ["kv.windows=false"]}


class Rate(NamedTuple):
    """A run: output tokens per second, and sequences in its largest batch."""

    tokens_per_s: float
    running: int


def fit(device: str, *more: str) -> list[int]:
    """Sequences that fit, of each length."""
    plan = plan_capacity(configure([*GEMMA, f"hardware={device}", *more]), device="cuda", lengths=LENGTHS)
    return [row.sequences["paged"] for row in plan.lengths]


def serve(overrides: list[str], prompt: int, *, requests: int = REQUESTS, output: int = OUTPUT) -> Rate:
    """All requests at once."""
    workload = ["workload=burst16", f"workload.num_requests={requests}"]
    for key, tokens in (("prompt_len", prompt), ("output_len", output)):
        workload += [f"workload.{key}.min={tokens}", f"workload.{key}.max={tokens}"]
    _, log, metrics = measure(configure([*overrides, *workload]))
    running = max(step.batch_seqs for step in log.steps)
    return Rate(metrics["throughput/output_tokens_per_s"], running)


def table(head: list[str], rows: list[list[object]]) -> None:
    """Print it in Markdown."""
    lines: list[list[object]] = [[*head], ["---"] * len(head), *rows]
    for line in lines:
        print("|", " | ".join(str(cell) for cell in line), "|", flush=True)
    print()


def simulated(figure: Path | None) -> None:
    """Capacity and throughput of Gemma 3 27B."""
    sequences = {(device, windows): fit(device, *MORE[windows]) for device in DEVICES for windows in (True, False)}
    rows: list[list[object]] = []
    for row, length in enumerate(LENGTHS):
        cells: list[object] = [f"{length:,}"]
        for device in DEVICES:
            more, fewer = sequences[device, True][row], sequences[device, False][row]
            cells += [fewer, more, f"{more / fewer:.1f}" if fewer else "-"]
        rows.append(cells)
    table(["tokens", *(f"{d} {what}" for d in DEVICES for what in ("all tokens", "windows", "times"))], rows)
    rates: dict[tuple[str, bool], list[float]] = {}
    rows = []
    for prompt in SERVED:
        cells = [f"{prompt:,}"]
        for device in DEVICES:
            on, off = (serve([*GEMMA, f"hardware={device}", *MORE[windows]], prompt) for windows in (True, False))
            rates.setdefault((device, True), []).append(on.tokens_per_s)
            rates.setdefault((device, False), []).append(off.tokens_per_s)
            cells += [f"{each.tokens_per_s:.0f} ({each.running})" for each in (off, on)]
            cells.append(f"{on.tokens_per_s / off.tokens_per_s:.2f}")
        rows.append(cells)
    table(["prompt", *(f"{d} {what}" for d in DEVICES for what in ("all tokens", "windows", "times"))], rows)
    if figure is not None:
        draw(figure, sequences, rates)


def here() -> None:
    """Throughput of a small model, windows on and off in turn."""
    rows: list[list[object]] = []
    for prompt in SMALL_SERVED:
        found: dict[bool, list[Rate]] = {True: [], False: []}
        for _ in range(ROUNDS):
            for windows in (False, True):
                found[windows].append(serve([*SMALL, *MORE[windows]], prompt, requests=12, output=128))
        off, on = (statistics.median(each.tokens_per_s for each in found[windows]) for windows in (False, True))
        batches = [found[windows][0].running for windows in (False, True)]
        rows.append([prompt, f"{off:.0f} ({batches[0]})", f"{on:.0f} ({batches[1]})", f"{on / off:.2f}"])
    print(describe("cpu"), "\n")
    table(["prompt", "all tokens", "windows", "times"], rows)


def draw(
    path: Path, sequences: dict[tuple[str, bool], list[int]], rates: dict[tuple[str, bool], list[float]]
) -> None:
    """Both tables, over the length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for device, colour in zip(DEVICES, ("#0072b2", "#d55e00"), strict=True):
        for windows, style in ((True, "-"), (False, "--")):
            label = f"{device}, {'windows' if windows else 'all tokens'}"
            counts = sequences[device, windows]
            kept = [(length, count) for length, count in zip(LENGTHS, counts, strict=True) if count]
            left.plot(*zip(*kept, strict=True), style, marker="o", ms=4, color=colour, label=label)
            right.plot(SERVED, rates[device, windows], style, marker="o", ms=4, color=colour, label=label)
    left.set(title="Sequences that fit", xlabel="tokens of a sequence", yscale="log")
    right.set(title="Output tokens per second, 48 requests", xlabel="tokens of a prompt", yscale="log")
    for axes, ticks in ((left, LENGTHS), (right, SERVED)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulated", "here"))
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "simulated":
        simulated(arguments.figure)
    else:
        here()


if __name__ == "__main__":
    main()
