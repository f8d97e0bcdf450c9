"""Speculative decoding by lookup on a published model: tokens per step and per second, with repetition and without.

kvlab fetch smollm2
python -m experiments.speculation.benchmark [alone|batch|float32]      five minutes, on a quiet machine
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiments.runs import configure
from kvlab.config import RunConfig
from kvlab.engine.build import build_engine
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics, speculation_metrics
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

TEXTS = (Path(__file__).parent.parent / "precision" / "text.txt").read_text(encoding="utf-8").split("\n---\n")
CHARS, TOKENS = 500, 96  # of a text, and of an answer at most
BASE = [
    "model=smollm2_135m",
    "executor=cpu",
    "model.max_seq_len=1024",
    "kv=paged_unshared",
    "kv.num_blocks=1024",
    "tracking=off",
]
ROUNDS = 2
METHOD = "scheduler.speculation.method=ngram"
OFF, PROPOSED = "off", (2, 5, 10)
CASES = {"alone": ("bfloat16", 1, 6), "batch": ("bfloat16", 8, 16), "float32": ("float32", 1, 6)}


@dataclass(frozen=True)
class Served:
    """A run, and what it came to."""

    log: RunLog
    metrics: dict[str, float]

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.metrics["throughput/output_tokens_per_s"]

    @property
    def answers(self) -> dict[str, tuple[int, ...]]:
        """The tokens of each request."""
        return {record.request_id: record.output_token_ids for record in self.log.records}


def copying(path: Path, count: int) -> list[str]:
    """A workload that asks for texts to be repeated, as an editor's model has to when it changes little."""
    texts = [text.strip()[:CHARS] for text in TEXTS[:count]]
    asked = [f"Repeat the following text word for word.\n\n{text}" for text in texts]
    rows = ({"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS} for text in asked)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["workload=jsonl", f"workload.path={path}"]


def chatting(count: int) -> list[str]:
    """Short questions, whose answers repeat nothing."""
    return [
        "workload=chat",
        f"workload.num_requests={count}",
        f"workload.output_len={{min: {TOKENS}, max: {TOKENS}}}",
    ]


class Variant:
    """An engine that serves a workload as often as asked."""

    def __init__(self, config: RunConfig) -> None:
        plan = plan_run(config)
        self.requests, self.engine = plan.requests, build_engine(plan)
        drive(self.engine, self.requests[:1])  # warms it

    def serve(self) -> Served:
        """All requests, from the first to the last."""
        log = drive(self.engine, self.requests)
        return Served(log, run_metrics(log) | speculation_metrics(log.steps))


def compare(title: str, workload: list[str], *settings: str) -> None:
    """Print a row for each number of proposed tokens. Variants alternate, so that all have the same machine."""
    names = {
        OFF: [],
        **{str(count): [METHOD, f"scheduler.speculation.num_speculative_tokens={count}"] for count in PROPOSED},
    }
    variants = {name: Variant(configure([*BASE, *workload, *settings, *more])) for name, more in names.items()}
    found: dict[str, list[Served]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            found[name].append(variant.serve())
    plain = found[OFF]
    for name, runs in found.items():
        rates = [run.rate for run in runs]
        ratio = statistics.median(run.rate / off.rate for run, off in zip(runs, plain, strict=True))
        answers = plain[0].answers
        same = sum(runs[0].answers[key] == tokens for key, tokens in answers.items())
        share = runs[0].metrics.get("speculation/acceptance_rate")
        cells = [
            title,
            name,
            "-" if share is None else f"{share:.0f} %",
            f"{runs[0].metrics['speculation/tokens_per_step']:.2f}",
            f"{len(runs[0].log.steps)}",
            f"{statistics.median(rates):.0f}",
            f"{ratio:.2f}",
            f"{runs[0].metrics['latency/itl_ms_p50']:.1f}",
            f"{runs[0].metrics['latency/itl_ms_p99']:.1f}",
            f"{same} of {len(answers)}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table, or the rows of the cases that the command names."""
    columns = (
        "requests|proposed|accepted|tokens per step|steps|tok/s|against off|itl p50, ms|itl p99, ms|same answers"
    )
    print("| " + columns.replace("|", " | ") + " |")
    print("|---" * len(columns.split("|")) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            dtype, running, count = CASES[name]
            texts = copying(Path(folder) / "texts.jsonl", count)
            for what, workload in (("copy", texts), ("chat", chatting(count))):
                settings = [f"executor.dtype={dtype}", f"scheduler.max_batch_size={running}"]
                compare(f"{what}, {running} at once, {dtype}", workload, *settings)


if __name__ == "__main__":
    main()
