"""Quality beside bytes, for real weights: what fewer bits of weights, K and V change in the next token of a text.

kvlab fetch smollm2
python -m experiments.precision.benchmark              quality and bytes: a few minutes
python -m experiments.precision.benchmark --figure experiments/precision/quality.png
python -m experiments.precision.benchmark --speed      also the speed of the chat workload: on a quiet machine
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.runs import configure, measure
from kvlab.engine.build import plan_engine
from kvlab.engine.plan import EnginePlan
from kvlab.lab.results.quality import compare, logits_of
from kvlab.models.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("text.txt")
TOKENS, WINDOW = 3000, 500
MEMORY = 2**30  # of weights and cache together, for the sequences that fit
LENGTH = 1024
BASE = ["model=smollm2_135m", "executor=cpu", "model.max_seq_len=1024", "scheduler.max_batch_size=16"]
VARIANTS = {
    "float32": ["executor.dtype=float32"],
    "bfloat16": ["executor.dtype=bfloat16"],
    "bfloat16, K and V in int8": ["executor.dtype=bfloat16", "kv.dtype=int8"],
    "bfloat16, weights in int8": ["executor.dtype=bfloat16", "executor.weights=int8"],
    "bfloat16, weights and activations in int8": ["executor.dtype=bfloat16", "executor.weights=int8_w8a8"],
    "bfloat16, both in int8": ["executor.dtype=bfloat16", "kv.dtype=int8", "executor.weights=int8"],
    "float32, K and V in int8": ["executor.dtype=float32", "kv.dtype=int8"],
    "float32, K and V in fp8_e4m3": ["executor.dtype=float32", "kv.dtype=fp8_e4m3"],
    "float32, K and V in fp8_e5m2": ["executor.dtype=float32", "kv.dtype=fp8_e5m2"],
    "float32, K in int8, V in int4": ["executor.dtype=float32", "kv.dtype=int8", "kv.value_dtype=int4"],
    "float32, K in int4, V in int8": ["executor.dtype=float32", "kv.dtype=int4", "kv.value_dtype=int8"],
    "float32, K and V in int4": ["executor.dtype=float32", "kv.dtype=int4"],
}


def planned(name: str, *more: str) -> EnginePlan:
    """The engine of a variant."""
    return plan_engine(configure([*BASE, *VARIANTS[name], *more]))


def main() -> None:
    """Print a row for each variant."""
    tokenizer = load_tokenizer(planned("float32").config.model)
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    texts = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    everywhere = [range(len(text)) for text in texts]
    following = [token for text in texts for token in (*text[1:], None)]
    print(f"{len(tokens):,} tokens in windows of {WINDOW}")
    expected = logits_of(planned("float32"), texts, everywhere)
    print("| | perplexity | same most likely token | mean KL, nats | weights | K and V of a token | sequences |")
    divergences = {}
    for name in VARIANTS:
        plan = planned(name)
        found = logits_of(plan, texts, everywhere)
        rows = [slice(start, start + WINDOW) for start in range(0, len(found), WINDOW)]
        parts = [compare(found[row], expected[row], following[row]) for row in rows]
        del found
        weights = [len(range(*row.indices(len(tokens)))) / len(tokens) for row in rows]

        def mean(key: str, parts: list[dict[str, float]] = parts, weights: list[float] = weights) -> float:
            return sum(part[f"quality/{key}"] * weight for part, weight in zip(parts, weights, strict=True))

        divergences[name] = mean("kl_mean")
        logs = [math.log(part["quality/perplexity"]) for part in parts]
        perplexity = math.exp(sum(log * weight for log, weight in zip(logs, weights, strict=True)))
        cache = MEMORY - plan.weights.parameters
        fit = max(0, cache) // (plan.pool.bytes_per_token * LENGTH)
        bytes_per_token = f"{plan.pool.bytes_per_token:,} B"
        line = f"| {name} | {perplexity:.3f} | {100 * mean('top1_agreement'):.1f} % "
        line += f"| {mean('kl_mean'):.1e} | {plan.weights.parameters / 2**20:.0f} MiB | {bytes_per_token} | {fit} |"
        print(line + (f" {speed(name):.0f} tok/s |" if "--speed" in sys.argv else ""), flush=True)
    if "--figure" in sys.argv:
        draw(divergences, Path(sys.argv[sys.argv.index("--figure") + 1]))


def draw(divergences: Mapping[str, float], path: Path) -> None:
    """The divergence of each format of K and V alone over the bytes of a token."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, divergence in divergences.items():
        if "K" not in name or not name.startswith("float32, "):
            continue
        size = planned(name).pool.bytes_per_token
        axis.plot(size, divergence, "o", color="#0072B2")
        axis.annotate(
            name.removeprefix("float32, "), (size, divergence), (6, 4), textcoords="offset points", fontsize=8
        )
    axis.axhline(divergences["bfloat16"], color="#8A8A8A", linewidth=1)
    axis.text(
        5500, divergences["bfloat16"] * 1.08, "bfloat16 throughout (23,040 bytes)", fontsize=8, color="#666666"
    )
    axis.set(
        yscale="log",
        xlim=(5400, 15500),
        xlabel="bytes of K and V of a token (float32: 46,080)",
        ylabel="mean KL of the next token, nats",
        title="SmolLM2 135M in float32: what each format of K and V changes",
    )
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=100)


def speed(name: str) -> float:
    """Output tokens per second of the chat workload."""
    _, _, metrics = measure(configure([*BASE, *VARIANTS[name], "workload=chat", "tracking=off"]))
    return metrics["throughput/output_tokens_per_s"]


if __name__ == "__main__":
    main()
