"""What a layer costs the host without CUDA graphs, for published cases, and how well one case says another.

python -m experiments.eager_steps.run
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvlab.config import FrameworkConfig

CASES = Path(__file__).with_name("cases.csv")
SLOWER = 1.2  # than with graphs: from so many times on the host is what an eager step waits for


class Case(NamedTuple):
    """A published time of decode steps."""

    host: str
    device: str
    model: str
    layers: int
    kind: str  # of layers: dense, mixture or hybrid
    server: str
    sequences: str
    eager_ms: float  # a step without CUDA graphs
    graphs_ms: float | None  # the same with them; None: not published
    address: str

    @property
    def waits_for_host(self) -> bool:
        """Whether the host decides how long the eager step takes."""
        return self.graphs_ms is None or self.eager_ms >= SLOWER * self.graphs_ms

    @property
    def layer_us(self) -> float:
        """Microseconds of the host for a layer, all else that it does included."""
        return 1e3 * self.eager_ms / self.layers


class Predicted(NamedTuple):
    """A case, and what others say of it."""

    case: Case
    ms: float

    @property
    def error(self) -> float:
        """Predicted / published - 1."""
        return self.ms / self.case.eager_ms - 1


@cache
def cases() -> tuple[Case, ...]:
    """All published cases, those of a host together."""
    with CASES.open(encoding="utf-8", newline="") as file:
        return tuple(
            Case(
                row["host"],
                row["device"],
                row["model"],
                int(row["layers"]),
                row["kind"],
                row["server"],
                row["sequences"],
                float(row["eager_ms"]),
                float(row["graphs_ms"]) if row["graphs_ms"] else None,
                row["address"],
            )
            for row in csv.DictReader(file)
        )


def firsts() -> list[Case]:
    """Of each host the first case that waits for it, the slowest last."""
    hosts = {case.host: case for case in reversed(cases()) if case.waits_for_host}
    return sorted(hosts.values(), key=lambda case: case.layer_us)


def between_hosts() -> Iterator[Predicted]:
    """Each host's first case by the median of the other hosts'."""
    for case in firsts():
        others = (other.layer_us for other in firsts() if other is not case)
        yield Predicted(case, _eager_ms(case, median(others)))


def on_one_host() -> Iterator[Predicted]:
    """All other cases of a host by its first one."""
    known = {case.host: case for case in firsts()}
    for host, group in groupby(cases(), key=lambda case: case.host):
        for case in group:
            if host in known and case is not known[host]:
                yield Predicted(case, _eager_ms(case, known[host].layer_us))


def _eager_ms(case: Case, layer_us: float) -> float:
    """As a simulated server has it, where a step of the device takes what it takes with graphs, host included."""
    framework = FrameworkConfig(step_us=0, sequence_us=0, cuda_graphs=False, eager_layer_us=layer_us)
    return 1e3 * framework.step_s(1e-3 * (case.graphs_ms or 0), 1, 1, case.layers)


def main() -> None:
    """Print a row for each case."""
    names = "device | model | layers | server | sequences | with graphs | eager"
    for title, predicted in (("other hosts", between_hosts()), ("same host", on_one_host())):
        print(f"| host | {names} | us a layer | predicted ({title}) | error |\n|{'---|' * 11}")
        rows = list(predicted)
        for row in rows:
            case = row.case
            host = f"[{case.host}]({case.address})" if case.address else case.host
            graphs = f"{case.graphs_ms:.1f}" if case.graphs_ms else "-"
            print(
                f"| {host} | {case.device} | {case.model} | {case.layers} | {case.server} | {case.sequences} "
                f"| {graphs} | {case.eager_ms:.1f} | {case.layer_us:.0f} | {row.ms:.1f} | {row.error:+.0%} |"
            )
        errors = [row.error for row in rows if row.case.kind != "hybrid"]
        within = sum(abs(error) <= 0.25 for error in errors)
        print(
            f"\nHybrids apart: {len(errors)} cases, {within} within 25 %, {median(map(abs, errors)):.0%} in the "
            f"median, {min(errors):+.0%} to {max(errors):+.0%}\n"
        )


if __name__ == "__main__":
    main()
