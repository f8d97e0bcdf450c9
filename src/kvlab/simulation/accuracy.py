"""How far simulated deployments were from measured ones, so that a prediction says how sure it is.

`held_out.csv` has the errors of deployments that nothing was fitted to (`experiments/simulated_vs_silicon`, which
writes it). An error is relative to what is predicted, of a mean over requests: measured / predicted - 1.

An interval is the shortest of nine of ten of the deployments like the one asked about: of the most alike class of
`_CLASSES` that has `FEWEST`, the `NEAREST` by load. Deployments of measured models on measured devices say too
little of others, and by how much is known from leaving them out: `WIDENED`, which
`experiments/simulated_vs_silicon/calibration.py` finds, and checks on the other half of the rows.

A ratio of two predictions is nearer than either: `PAIRS`. Planned pools beside published ones: `PLANNED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass
from functools import cache
from heapq import nsmallest
from itertools import chain
from math import ceil, expm1, log1p, log2
from pathlib import Path
from statistics import median
from typing import NamedTuple

FILE = Path(__file__).parent / "held_out.csv"
FEWEST, NEAREST = 16, 40
_MOST_PERCENT = 2.0  # an error of more is said as a factor
FIGURES = ("tpot", "ttft")


class Case(NamedTuple):
    """A deployment, as far as errors depend on it. `device` as in conf/hardware, `model` as in conf/model."""

    framework: str  # as the tables call it: vllm, sglang, trtllm
    device: str
    model: str
    is_sparse: bool  # a mixture of experts
    devices: int
    prompt: float  # tokens, in the mean
    output: float
    concurrency: float  # requests in the server at once

    def distance(self, other: Case) -> float:
        """In load: doublings of lengths and of requests for each device."""
        pairs = (
            (self.prompt, other.prompt),
            (self.output, other.output),
            (self.concurrency / self.devices, other.concurrency / other.devices),
        )
        return sum(abs(log2(max(own, 1e-3) / max(another, 1e-3))) for own, another in pairs)


class HeldOut(NamedTuple):
    """A measured deployment and its errors."""

    case: Case
    part: int  # 0 or 1: intervals are checked on one half, widened by the other
    tpot: float
    ttft: float


class Interval(NamedTuple):
    """Nine of ten of `n` deployments had measured / predicted - 1 between `low` and `high`."""

    low: float
    high: float
    n: int

    @property
    def within(self) -> float:
        """The larger of the two, absolute."""
        return max(abs(self.low), abs(self.high))

    def widest(self, other: Interval) -> Interval:
        """That has both in it."""
        return Interval(min(self.low, other.low), max(self.high, other.high), min(self.n, other.n))

    def text(self) -> str:
        """In words, behind a predicted figure."""
        return f"measured deployments like this: within {bound(self.within)}, 90 % of them"


def bound(error: float) -> str:
    """The largest of some errors in words: in percent, or where most of it is no prediction as a factor."""
    return f"{100 * error:.0f} %" if error <= _MOST_PERCENT else f"a factor of {1 + error:,.0f}"


def _same_device_and_model(case: Case, other: Case) -> bool:
    return (case.device, case.model) == (other.device, other.model)


def _same_kind(case: Case, other: Case) -> bool:
    return case.is_sparse == other.is_sparse


def _same_device_or_model(case: Case, other: Case) -> bool:
    return _same_kind(case, other) and (case.device == other.device or case.model == other.model)


#: Deployments of the same framework that are alike, the most alike first.
_CLASSES: tuple[Callable[[Case, Case], bool], ...] = (_same_device_and_model, _same_device_or_model, _same_kind)


@dataclass(frozen=True, slots=True)
class PairErrors:
    """How far simulated ratios of mean latencies were from measured ones: half of the pairs of deployments were
    within `half`, nine of ten within `most`; `direction` had the right one slower.
    """

    pairs: int
    half: float
    most: float
    direction: float


#: Of pairs of measured deployments of one model on one device for the same lengths, with other numbers of requests
#: at once or of devices; from `experiments/simulated_vs_silicon/results.csv`, as tests/lab/test_advise.py computes.
#: By framework, and whether models are mixtures of experts.
PAIRS = {
    ("vllm", False): PairErrors(2677, 0.040, 0.112, 0.974),
    ("vllm", True): PairErrors(18129, 0.059, 0.160, 0.955),
    ("trtllm", False): PairErrors(5831, 0.042, 0.142, 0.977),
    ("trtllm", True): PairErrors(6356, 0.082, 0.241, 0.957),
    ("sglang", False): PairErrors(411, 0.045, 0.621, 0.951),
    ("sglang", True): PairErrors(5092, 0.110, 0.496, 0.912),
}


def pair_errors(framework: str, *, is_sparse: bool) -> PairErrors:
    """Of a framework without any the widest of the others."""
    alike = [errors for (_, sparse), errors in PAIRS.items() if sparse == is_sparse]
    widest = PairErrors(0, max(each.half for each in alike), max(each.most for each in alike), 0.0)
    return PAIRS.get((framework, is_sparse), widest)


def kind_of(is_sparse: bool) -> str:
    """What such models are called."""
    return "mixtures of experts" if is_sparse else "dense models"


#: Planned over published KV blocks at starts of vLLM 0.9 and later, by device (experiments/planner_vs_vllm).
PLANNED = {
    "a100_sxm": (1.005, 0.995),
    "h100_sxm": (1.0, 1.0, 0.997, 0.998, 0.998, 1.026, 1.027),
    "l40s": (0.903,),
    "rtx_4090": (0.991,),
    "rtx_pro_6000_server": (1.014, 0.983),
}
#: The same tokens at starts of SGLang that nothing is fitted to (experiments/planner_vs_sglang).
PLANNED_SGLANG = {
    "gb300": (1.0,),
    "h100_sxm": (1.002, 0.997),
    "l4": (1.072,),
    "rtx_a6000": (0.998,),
    "rtx_5080": (1.003,),
    "rtx_4090": (1.016,),
}
#: By how much an interval of a class and figure is widened about its median, in logarithms.
WIDENED: dict[str, tuple[float, ...]] = {"tpot": (1.3, 1.7, 2.1), "ttft": (1.2, 2.4, 2.2)}


@cache
def held_out() -> tuple[HeldOut, ...]:
    """All of the file."""
    found = list[HeldOut]()
    with FILE.open(newline="") as file:
        for row in DictReader(file):
            names = row["framework"], row["device"], row["model"]
            load = float(row["prompt"]), float(row["output"]), float(row["concurrency"])
            case = Case(*names, row["is_sparse"] == "1", int(row["devices"]), *load)
            found.append(HeldOut(case, int(row["part"]), float(row["tpot"]), float(row["ttft"])))
    return tuple(found)


def interval(case: Case, figure: str, among: Sequence[HeldOut] | None = None) -> Interval | None:
    """Of `figure`, tpot or ttft. None: too few deployments of the framework were measured.

    `among`: the deployments that are known; all, unless an error is to be told of one that is left out.
    """
    found = most_alike(case, held_out() if among is None else among)
    return None if found is None else spread(*found, figure)


def most_alike(case: Case, among: Sequence[HeldOut]) -> tuple[int, list[HeldOut]] | None:
    """The nearest deployments of the most alike class that has enough, and which class it is."""
    known = [row for row in among if row.case.framework == case.framework]
    for at, is_alike in enumerate(_CLASSES):
        alike = [row for row in known if is_alike(case, row.case)]
        if len(alike) >= FEWEST:
            return at, nsmallest(NEAREST, alike, key=lambda row: case.distance(row.case))
    return None


def spread(at: int, alike: Sequence[HeldOut], figure: str) -> Interval:
    """Of `figure`, from the errors of deployments of a class, widened."""
    # The shortest that holds nine of ten, so that two of forty that were measured otherwise do not decide it. In
    # logarithms of measured / predicted, which no widening makes negative.
    logs = sorted(log1p(getattr(row, figure)) for row in alike)
    held, middle = ceil(0.9 * len(logs)), median(logs)
    first = min(range(len(logs) - held + 1), key=lambda place: logs[place + held - 1] - logs[place])
    low, high = (middle + WIDENED[figure][at] * (end - middle) for end in (logs[first], logs[first + held - 1]))
    return Interval(expm1(low), expm1(high), len(logs))


def _quantile(errors: Sequence[float], share: float) -> float:
    """Of sorted values, on the side that holds more of them than asked for."""
    return errors[ceil(share * (len(errors) - 1))]


def how_sure(framework: str, device: str, *, is_sparse: bool, states: str = "") -> str | None:
    """What is known before a run, in words, of a model whose layers have such `states` if any. None: no such
    deployment of the framework was measured."""
    if states:
        return f"no deployment with {states} was measured"
    known = [row for row in held_out() if (row.case.framework, row.case.is_sparse) == (framework, is_sparse)]
    if not known:
        return None
    devices = sorted({row.case.device for row in known})
    figures = [f"{figure} within {bound(_within(known, figure))}" for figure in FIGURES]
    measured = f"{len(known)} measured {framework} deployments of {kind_of(is_sparse)}"
    text = f"nine of ten of {measured} had {' and '.join(figures)}"
    return text if device in devices else f"{text}; none is on {device}, where more is to be expected"


def sentence(figures_ms: Mapping[str, float], errors: Mapping[str, Interval]) -> str:
    """Predicted means of a run by the names of `FIGURES`, and how sure they are."""
    parts = []
    for figure, predicted in figures_ms.items():
        shown = f"{predicted / 1000:.3g} s" if predicted >= 1000 else f"{predicted:.3g} ms"
        parts.append(f"mean {figure} {shown} ({errors[figure].text()})")
    return "; ".join(parts)


def ratios(framework: str, *, is_sparse: bool) -> str:
    """How near predicted ratios of latencies were to measured ones, in words; empty where none were measured."""
    known = PAIRS.get((framework, is_sparse))
    if known is None:
        return ""
    measured = f"{known.pairs:,} pairs of measured {framework} deployments of {kind_of(is_sparse)}"
    return (
        f"of {measured} half had their ratio predicted within "
        f"{100 * known.half:.0f} %, nine of ten within {100 * known.most:.0f} %"
    )


def planned_pools(framework: str, device: str, *, graphs: bool = True) -> str:
    """How near planned pools were to those of published starts, in words; of servers with CUDA `graphs`, or not."""
    starts = {"vllm": PLANNED, "sglang": PLANNED_SGLANG}.get(framework)
    if starts is None:
        return f"how far pools that are planned for {framework} are off was not measured"
    errors = sorted(abs(1 / ratio - 1) for ratio in chain.from_iterable(starts.values()))
    within = 100 * _quantile(errors, 0.9)
    text = f"nine of ten of {len(errors)} published starts of {framework} had pools within {within:.0f} %"
    text += "" if device in starts else f"; none was on {device}"
    return text if graphs else f"{text}; none is known to have been without CUDA graphs"


def _within(rows: Sequence[HeldOut], figure: str) -> float:
    return _quantile(sorted(abs(getattr(row, figure)) for row in rows), 0.9)
