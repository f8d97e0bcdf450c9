"""How often intervals hold that are made without the deployment that they are of: `kvlab.simulation.accuracy`.

    python -m experiments.simulated_vs_silicon.calibration

Writes the errors of the rows that nothing was fitted on to src/kvlab/simulation/held_out.csv, prints how many of
each half intervals hold that were widened to hold 90 % of the other, and by how much for 90 % of all (WIDENED).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from zlib import crc32

import numpy as np

from experiments.simulated_vs_silicon.results import Result, read
from kvlab.simulation import accuracy
from kvlab.simulation.accuracy import FIGURES, FILE, Case, HeldOut, held_out, most_alike, spread

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
        "moonshotai/Kimi-K2.5": "kimi_k2_5",
        "Qwen/Qwen3-235B-A22B-FP8": "qwen3_235b_a22b",
    }


def write(results: Iterable[Result]) -> None:
    """held_out.csv."""
    known = names()
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Case._fields, "part", *FIGURES))
        for row in results:
            if row.held_out and not row.was_cached:
                case = (row.framework, row.device, known[row.model], int(row.is_sparse), row.devices)
                errors = (f"{1 / (1 + row.error(figure)) - 1:.3f}" for figure in FIGURES)
                part = (crc32(row.id.encode()) >> 1) % 2
                writer.writerow((*case, row.prompt, row.output, row.concurrency, part, *errors))


def intervals(rows: Sequence[HeldOut], left: Callable[[Case, Case], bool], figure: str) -> list[tuple[bool, float]]:
    """Whether the interval of each of `rows` holds it, and within what it says an error is, where there is one."""
    found = []
    for row in rows:
        if (others := _others(row, left)) is not None:
            made = spread(*others, figure)
            found.append((made.low <= getattr(row, figure) <= made.high, made.within))
    return found


@cache
def _others(row: HeldOut, left: Callable[[Case, Case], bool]) -> tuple[int, list[HeldOut]] | None:
    """Those from which the interval of a row is made."""
    among = [other for other in held_out() if other is not row and not left(row.case, other.case)]
    return most_alike(row.case, among)


def widen(rows: Sequence[HeldOut]) -> None:
    """Set each of WIDENED to the least with which 90 % of `rows` are held: of the most alike class with nothing
    left out, and so on.
    """
    for figure in FIGURES:
        for at, left in ((0, LEFT_OUT["nothing"]), (1, LEFT_OUT["its device"]), (2, LEFT_OUT["both"])):
            for factor in np.arange(0.6, 6.01, 0.1):
                factors = accuracy.WIDENED[figure]
                accuracy.WIDENED[figure] = (*factors[:at], *[round(float(factor), 1)] * (len(factors) - at))
                holds = [held for held, _ in intervals(rows, left, figure)]
                if not holds or np.mean(holds) >= 0.9:
                    break


def table() -> Iterable[str]:
    """Shares of rows that intervals hold which were widened on the other half of the rows, by framework, and
    within what half of these say an error is.
    """
    found: dict[tuple[str, str, str], list[tuple[bool, float]]] = defaultdict(list)
    frameworks = sorted({row.case.framework for row in held_out()})
    for part in (0, 1):
        widen([row for row in held_out() if row.part != part])
        for framework, (name, left), figure in product(frameworks, LEFT_OUT.items(), FIGURES):
            rows = [row for row in held_out() if (row.part, row.case.framework) == (part, framework)]
            found[name, figure, framework] += intervals(rows, left, figure)
    yield f"| left out | figure | {' | '.join((*frameworks, 'all', 'within'))} |"
    yield f"|---|---|{'---|' * (len(frameworks) + 2)}"
    for name, figure in product(LEFT_OUT, FIGURES):
        shares = [found[name, figure, framework] for framework in frameworks]
        shares.append([each for share in shares for each in share])
        held = [
            f"{100 * np.mean([own for own, _ in share]):.0f} % of {len(share)}" if share else "-"
            for share in shares
        ]
        within = np.median([own for _, own in shares[-1]])
        yield f"| {name} | {figure} | {' | '.join(held)} | {100 * within:.0f} % |"


def main() -> None:
    write(read())
    held_out.cache_clear()
    print("\n".join(table()))
    widen(held_out())
    print(f"WIDENED = {accuracy.WIDENED}")


if __name__ == "__main__":
    main()
