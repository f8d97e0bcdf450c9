"""How often intervals hold that are made without the deployment that they are of: `kvlab.simulation.accuracy`.

    python -m experiments.simulated_vs_silicon.calibration

Writes the errors of the rows that nothing was fitted on to src/kvlab/simulation/held_out.csv, prints by how much
intervals have to be widened for 90 % of one half of them (WIDENED), and how many of the other half they hold.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np

from experiments.simulated_vs_silicon.results import Result, read
from kvlab.simulation import accuracy
from kvlab.simulation.accuracy import FIGURES, FILE, Case, HeldOut, held_out, interval

#: Which rows are left out of what is known of one: itself; its device or its model; both.
LEFT_OUT: dict[str, Callable[[Case, Case], bool]] = {
    "nothing": lambda case, other: False,
    "its device": lambda case, other: case.device == other.device,
    "its model": lambda case, other: case.model == other.model,
    "both": lambda case, other: case.device == other.device or case.model == other.model,
}


def names() -> dict[str, str]:
    """Models of the sample by their names in conf/model."""
    return {
        "meta-llama/Llama-3.1-70B": "llama3_1_70b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama3_1_8b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama3_1_8b",
        "Qwen/Qwen3-32B": "qwen3_32b",
        "nvidia/Qwen3-32B-NVFP4": "qwen3_32b",
        "openai/gpt-oss-120b": "gpt_oss_120b",
        "MiniMaxAI/MiniMax-M2.5": "minimax_m2",
        "deepseek-ai/DeepSeek-V3": "deepseek_v3",
        "deepseek-ai/DeepSeek-R1": "deepseek_v3",
        "moonshotai/Kimi-K2.5": "kimi_k2",
        "Qwen/Qwen3-235B-A22B-FP8": "qwen3_235b_a22b",
    }


def write(results: Iterable[Result]) -> None:
    """held_out.csv."""
    known = names()
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Case._fields, "part", *FIGURES))
        for row in results:
            if row.held_out:
                case = (row.framework, row.device, known[row.model], int(row.is_sparse), row.devices)
                errors = (f"{1 / (1 + row.error(figure)) - 1:.3f}" for figure in FIGURES)
                part = (crc32(row.id.encode()) >> 1) % 2
                writer.writerow((*case, row.prompt, row.output, row.concurrency, part, *errors))


def coverage(rows: Sequence[HeldOut], left: Callable[[Case, Case], bool], figure: str) -> list[bool]:
    """Whether the interval of each of `rows` holds it, where one can be made."""
    found = []
    for row in rows:
        among = [other for other in held_out() if other is not row and not left(row.case, other.case)]
        made = interval(row.case, figure, among)
        if made is not None:
            found.append(made.low <= getattr(row, figure) <= made.high)
    return found


def widen() -> None:
    """Set each of WIDENED to the least with which 90 % of the first half are held: that of the most alike class
    with nothing left out, and so on.
    """
    first = [row for row in held_out() if row.part == 0]
    for figure in FIGURES:
        for at, left in enumerate(LEFT_OUT.values()):
            for factor in np.arange(0.7, 6.01, 0.1):
                factors = accuracy.WIDENED[figure]
                accuracy.WIDENED[figure] = (*factors[:at], *[round(float(factor), 1)] * (len(factors) - at))
                holds = coverage(first, left, figure)
                if not holds or np.mean(holds) >= 0.9:
                    break


def table() -> Iterable[str]:
    """Shares of the second half that intervals hold, by framework."""
    second = [row for row in held_out() if row.part == 1]
    frameworks = sorted({row.case.framework for row in second})
    yield f"| left out | figure | {' | '.join(frameworks)} | all |\n|---|---|{'---|' * (len(frameworks) + 1)}"
    for name, left in LEFT_OUT.items():
        for figure in FIGURES:
            shares = [
                coverage([row for row in second if row.case.framework == framework], left, figure)
                for framework in frameworks
            ]
            shares.append([each for share in shares for each in share])
            cells = [f"{100 * np.mean(share):.0f} % of {len(share)}" if share else "-" for share in shares]
            yield f"| {name} | {figure} | {' | '.join(cells)} |"


def main() -> None:
    write(read())
    held_out.cache_clear()
    widen()
    print(f"WIDENED = {accuracy.WIDENED}")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
