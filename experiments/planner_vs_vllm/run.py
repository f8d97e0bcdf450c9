"""The planner's block count beside what vLLM reported at its start, for published cases.

python -m experiments.planner_vs_vllm.run
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.runs import configure
from kvlab.lab.capacity import plan_capacity

CASES = Path(__file__).with_name("cases.csv")


class Case(NamedTuple):
    """A published start of vLLM, and what the planner says of it. Blocks of 16 tokens, each on all devices."""

    card: str
    model: str
    version: str  # of vLLM; V0 and V1 where its engine is known and the version is not
    published: int
    planned: int
    address: str

    @property
    def ratio(self) -> float:
        """Planned to published."""
        return self.planned / self.published


def cases() -> Iterator[Case]:
    """Plan every published case."""
    with CASES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            plan = plan_capacity(configure(row["settings"].split()), device="cuda")
            blocks = float(row["published"])
            if row["unit"] == "GiB":
                blocks *= 2**30 / (16 * plan.spec.bytes_per_token)
            elif row["unit"] == "tokens":
                blocks /= 16
            planned = plan.paged.num_blocks
            yield Case(row["card"], row["model"], row["vllm"], int(blocks), planned, row["address"])


def main() -> None:
    """Print a row for each case."""
    print("| card | model | vLLM | published blocks | planned | ratio |\n|---|---|---|---|---|---|")
    for case in cases():
        print(
            f"| {case.card} | [{case.model}]({case.address}) | {case.version} "
            f"| {case.published:,} | {case.planned:,} | {case.ratio:.3f} |"
        )


if __name__ == "__main__":
    main()
