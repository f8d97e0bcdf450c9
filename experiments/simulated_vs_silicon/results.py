"""results.csv: each row of the sample that was simulated, beside what was measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from zlib import crc32

RESULTS = Path(__file__).parent / "results.csv"
_TYPES = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Result:
    """A row: measured, simulated, and by the formula of one line."""

    campaign: str
    framework: str
    device: str
    model: str
    weights: str
    id: str
    devices: int
    prompt: int
    output: int
    concurrency: int
    measured_tpot_ms: float
    simulated_tpot_ms: float
    formula_tpot_ms: float
    measured_ttft_ms: float
    simulated_ttft_ms: float
    formula_ttft_ms: float

    @property
    def is_sparse(self) -> bool:
        """Whether the model is a mixture of experts."""
        return not any(name in self.model for name in ("Llama-3.1", "Qwen3-32B"))

    @property
    def held_out(self) -> bool:
        """Whether nothing was fitted on it."""
        return crc32(self.id.encode()) % 2 == 1

    @property
    def was_cached(self) -> bool:
        """Whether more prompts were served than could have been computed one by one in the time: they were in the
        prefix cache, and all of them are computed here.
        """
        whole_ms = self.measured_ttft_ms + self.output * self.measured_tpot_ms
        return self.concurrency * self.formula_ttft_ms > 1.1 * whole_ms

    def error(self, figure: str, by: str = "simulated") -> float:
        """Relative error of tpot or ttft."""
        measured: float = getattr(self, f"measured_{figure}_ms")
        predicted: float = getattr(self, f"{by}_{figure}_ms")
        return predicted / measured - 1


def read(path: Path = RESULTS) -> list[Result]:
    """What the file holds, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Result(*(_TYPES[str(field.type)](row[field.name]) for field in fields(Result)))
            for row in csv.DictReader(file)
        ]


def append(result: Result) -> None:
    """Add one at the end."""
    _lines([result], "a" if RESULTS.exists() else "w")


def write(results: Iterable[Result]) -> None:
    """Write the file anew, by campaign, device and shape."""
    order = ("campaign", "device", "weights", "devices", "prompt", "output", "concurrency", "id")
    _lines(sorted(results, key=lambda row: [getattr(row, name) for name in order]), "w")


def _lines(results: Iterable[Result], mode: str) -> None:
    with RESULTS.open(mode, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if mode == "w":
            writer.writerow(field.name for field in fields(Result))
        for row in results:
            values: Iterator[object] = (getattr(row, field.name) for field in fields(Result))
            writer.writerow(f"{value:.2f}" if isinstance(value, float) else value for value in values)
