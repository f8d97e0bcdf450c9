"""Single steps of vLLM on B300, as recorded, beside what the simulator says that they take.

    python -m experiments.simulated_steps.run            the tables, from steps.csv
    python -m experiments.simulated_steps.run FOLDER     steps.csv anew, from recordings

FOLDER holds tp1_ep1_past4096, tp2_..., each with its fpm_metrics_phase.csv.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, get_type_hints

import numpy as np

from experiments.runs import configure
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.simulation.timings import StepTiming

STEPS = Path(__file__).with_name("steps.csv")
DEVICES = (1, 2, 4, 8)
PROMPT = 4096  # tokens of the prompts of the mixed sweep
FEWEST = 3  # recorded steps, of which a median says something
_KIND = {"context": "prefill", "decode": "decode", "mixed": "mixed"}
_COLUMNS = ("ctx_tokens", "ctx_requests", "ctx_kv_tokens", "decode_requests", "decode_kv_tokens")


class Step(NamedTuple):
    """Recorded steps that did the same, or nearly: of decodes those with as many sequences and contexts alike."""

    devices: int
    kind: str  # prefill, decode or mixed
    prompt_tokens: int  # computed in it
    prompts: int  # of that many requests
    cached: int  # tokens of those that were computed before
    decodes: int
    context: int  # tokens of all that decode
    recorded: int  # how often
    ms: float  # median

    @property
    def load(self) -> str:
        """What it is told with, in a table."""
        if self.kind == "decode":
            return f"{_upto(self.decodes, (1, 4, 8, 16, 32))} sequences"
        return f"{_upto(self.prompt_tokens, (128, 1024, 4096, 8192))} tokens of prompts"

    def lengths(self) -> tuple[list[int], list[int]]:
        """New tokens of each sequence, and its length with them: of a prompt that goes on, then of whole ones."""
        new, before, left = list[int](), list[int](), self.prompt_tokens
        for at in range(self.prompts):
            had = self.cached if at == 0 else 0
            take = left if at == self.prompts - 1 else min(left, PROMPT - had)
            new.append(take)
            before.append(had)
            left -= take
        context = round(self.context / self.decodes) if self.decodes else 0
        new += [1] * self.decodes
        before += [context] * self.decodes
        return new, [one + other for one, other in zip(new, before, strict=True)]


def condensed(folder: Path) -> Iterator[Step]:
    """Medians of the recordings. Prompts of real traffic have lengths that are not told: such steps are left out,
    unless they have one prompt alone.
    """
    for devices in DEVICES:
        alike = defaultdict[tuple[str, ...], list[tuple[list[int], float]]](list)
        with (folder / f"tp{devices}_ep1_past4096" / "fpm_metrics_phase.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                counts = [int(row[name]) for name in _COLUMNS]
                tokens, prompts, cached, decodes, context = counts
                if prompts > 1 and row["workload_segment"] != "sweep":
                    continue
                bucket = int(np.log2(context / decodes) * 2) if decodes else 0
                # Steps with prompts are few, and differ in a token or two of what goes on.
                shape = (tokens // 64, prompts, cached // 64, decodes, bucket)
                alike[(_KIND[row["phase"]], *map(str, shape))].append((counts, float(row["latency_ms"])))
        for (kind, *_), rows in alike.items():
            if len(rows) >= FEWEST:
                means = [round(fmean(column)) for column in zip(*(counts for counts, _ in rows), strict=True)]
                tokens, prompts, cached, decodes, context = means
                ms = round(median(ms for _, ms in rows), 3)
                yield Step(devices, kind, tokens, prompts, cached, decodes, context, len(rows), ms)


def read() -> list[Step]:
    """steps.csv."""
    with STEPS.open(newline="") as file:
        _, *rows = csv.reader(file)
    kinds = [kind for _, kind in get_type_hints(Step).items()]
    return [Step(*(kind(text) for kind, text in zip(kinds, row, strict=True))) for row in rows]


@cache
def deployment(devices: int) -> tuple[RunPlan, StepTiming]:
    """Qwen3 32B in bfloat16 on so many B300, by the tables of measured operations."""
    given = [
        "executor=simulated",
        "executor.timing=silicon",
        "hardware=b300_sxm",
        "model=qwen3_32b",
        "tracking=off",
    ]
    given += ["framework=vllm", "framework.version=0.20.1", f"executor.tensor_parallel={devices}"]
    plan = plan_run(configure([*given, "workload.num_requests=1"]))
    if not isinstance(plan.timing, StepTiming):
        raise SystemExit("needs measured operations: pip install 'kvlab[silicon]'")
    return plan, plan.timing


def simulated_ms(step: Step) -> tuple[float, float]:
    """Of the device alone, and with its host."""
    plan, timing = deployment(step.devices)
    new, lengths = (np.array(each, np.int64) for each in step.lengths())
    device_s = timing.device_s(new, lengths, len(new))
    return 1000 * device_s, 1000 * plan.config.framework.step_s(
        device_s, len(new), int(new.sum()), plan.model.num_layers
    )


def table(steps: Sequence[Step]) -> Iterator[str]:
    """Errors by devices, kind and load."""
    yield "| devices | kind | load | shapes | recorded, ms | device alone | each | with its host | each |"
    yield "|---|---|---|---|---|---|---|---|---|"
    groups = defaultdict[tuple[int, str, str], list[Step]](list)
    for step in steps:
        groups[step.devices, step.kind, step.load].append(step)
    for (devices, kind, load), rows in groups.items():
        yield f"| {devices} | {kind} | {load} | {_cells(rows)} |"
    for kind, count in product(("prefill", "decode", "mixed"), (*DEVICES, 0)):
        rows = [step for step in steps if step.kind == kind and count in (step.devices, 0)]
        yield f"| {count or 'all'} | {kind} | all | {_cells(rows)} |"


def _cells(rows: Sequence[Step]) -> str:
    return f"{len(rows)} | {fmean(row.ms for row in rows):.1f} | {_errors(rows)}"


def _errors(rows: Iterable[Step]) -> str:
    """In the median, signed and absolute; of the device alone and with its host."""
    errors = [[came / row.ms - 1 for came in simulated_ms(row)] for row in rows]
    cells = []
    for each in zip(*errors, strict=True):
        cells += [f"{100 * median(each):+.1f} %", f"{100 * median(map(abs, each)):.1f} %"]
    return " | ".join(cells)


def _upto(value: int, ends: Sequence[int]) -> str:
    return f"up to {next((end for end in ends if value <= end), value):,}"


def main() -> None:
    if folder := sys.argv[1:]:
        steps = sorted(condensed(Path(folder[0])))
        with STEPS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([Step._fields, *steps])
    print("\n".join(table(read())))


if __name__ == "__main__":
    main()
