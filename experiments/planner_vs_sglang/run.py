"""The planner's tokens beside what SGLang reported at its start, for published cases.

python -m experiments.planner_vs_sglang.run
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.runs import configure
from kvlab.lab.capacity import plan_capacity

CASES = Path(__file__).with_name("cases.csv")
_SIMULATED = ("executor=simulated", "executor.dtype=bfloat16", "framework=sglang", "tracking=off")


class Case(NamedTuple):
    """A published start of SGLang, and what the planner says of it: tokens, each on all devices."""

    number: int  # by tokens, from 1: even ones judge alone
    card: str
    model: str
    version: str
    published: int
    before: int | None  # planned by kvlab's own share; None: it did not fit
    planned: int
    address: str  # empty: the page was found by its words alone

    @property
    def ratio(self) -> float:
        """Planned to published."""
        return self.planned / self.published


def cases() -> Iterator[Case]:
    """Plan every published case."""
    with CASES.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            plan = plan_capacity(configure([*_SIMULATED, *row["settings"].split()]), device="cuda")
            before = int(row["before"]) if row["before"] else None
            planned, published = plan.paged.token_slots, int(row["published"])
            names = row["card"], row["model"], row["sglang"]
            yield Case(number, *names, published, before, planned, row["address"])


def main() -> None:
    """Print a row for each case."""
    print("| | card | model | SGLang | published tokens | planned | ratio | before |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases():
        model = f"[{case.model}]({case.address})" if case.address else case.model
        before = f"{case.before / case.published:.3f}" if case.before else "none"
        print(
            f"| {case.number} | {case.card} | {model} | {case.version} "
            f"| {case.published:,} | {case.planned:,} | {case.ratio:.3f} | {before} |"
        )


if __name__ == "__main__":
    main()
