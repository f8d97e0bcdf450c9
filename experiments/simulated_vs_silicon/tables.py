"""Errors of simulated rows, as tables in Markdown, and what would make them less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from experiments.simulated_vs_silicon.results import Result

FIGURES = ("tpot", "ttft")


def by_campaign(results: Sequence[Result]) -> dict[str, list[Result]]:
    """In the order in which they come."""
    found: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        found[f"{result.campaign}, {result.device}, {result.weights}"].append(result)
    return found


def table(results: Sequence[Result]) -> Iterable[str]:
    """Errors by campaign, device and type of weights."""
    yield (
        "| deployments | rows | tpot | of the formula | ttft | of the formula | rank, tpot | rank, ttft |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, rows in by_campaign(results).items():
        errors = [
            f"{100 * median(abs(row.error(figure, by)) for row in rows):.1f} %"
            for figure in ("tpot", "ttft")
            for by in ("simulated", "formula")
        ]
        ranks = [
            f"{rank:.2f}" if (rank := correlation(rows, figure)) is not None else "-" for figure in ("tpot", "ttft")
        ]
        yield f"| {name} | {len(rows)} | {' | '.join(errors + ranks)} |"


def by(results: Sequence[Result], name: str) -> Iterable[str]:
    """Errors by what a field of the rows holds: medians, and means (MAPE)."""
    yield f"| {name} | rows | tpot, median | mean | ttft, median | mean |\n|---|---|---|---|---|---|"
    for value in sorted({str(getattr(row, name)) for row in results}):
        yield _line(value, [row for row in results if str(getattr(row, name)) == value])
    yield _line("all", results)


def _line(name: str, rows: Sequence[Result]) -> str:
    cells = []
    for figure in FIGURES:
        errors = [abs(row.error(figure)) for row in rows]
        cells += [f"{100 * median(errors):.1f} %", f"{100 * fmean(errors):.0f} %"]
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def left_out(results: Sequence[Result], name: str) -> Iterable[str]:
    """Errors of rows that nothing was fitted on, each device (or model) with what fits the others best: for each
    framework what a step and a sequence cost on the host and what a request waits outside, on the rows for fitting.
    """
    came: dict[str, list[Result]] = defaultdict(list)
    for value in sorted({getattr(row, name) for row in results}):
        for framework in sorted({row.framework for row in results}):
            own = [row for row in results if row.framework == framework]
            others = [row for row in own if getattr(row, name) != value and not row.held_out]
            asked = [row for row in own if getattr(row, name) == value and row.held_out]
            if not asked:
                continue
            if others:
                asked = refitted(asked, others)
            came[value] += asked
    yield f"| {name} left out | rows | tpot, median | mean | ttft, median | mean |\n|---|---|---|---|---|---|"
    for value, rows in came.items():
        yield _line(value, rows)
    yield _line("all", [row for rows in came.values() for row in rows])


def refitted(rows: Sequence[Result], others: Sequence[Result]) -> list[Result]:
    """With the host's cost and the wait outside that fit `others` best: a step and a sequence more or less for each
    token, and a constant for each request.
    """
    step, each = least(others, "tpot", [row.concurrency for row in others], np.arange(-1, 1.05, 0.05), 0.001)
    once, _ = least(others, "ttft", [0 for _ in others], np.arange(-60.0, 62.0, 2.0), 0.001)
    return [
        replace(
            row,
            simulated_tpot_ms=max(row.simulated_tpot_ms + step + each * row.concurrency, 0.0),
            simulated_ttft_ms=max(row.simulated_ttft_ms + once, 0.0),
        )
        for row in rows
    ]


def correlation(rows: Sequence[Result], figure: str) -> float | None:
    """Spearman's rank correlation over the concurrency, as a mean over deployments that were measured at three or
    more; over all rows where there are none.
    """
    curves: dict[tuple[int, int, int], list[Result]] = defaultdict(list)
    for row in rows:
        curves[row.devices, row.prompt, row.output].append(row)
    long = [curve for curve in curves.values() if len(curve) > 2] or [list(rows)]
    return fmean(_spearman(curve, figure) for curve in long) if len(rows) > 2 else None


def _spearman(rows: Sequence[Result], figure: str) -> float:
    def ranks(by: str) -> NDArray[np.float64]:
        return np.argsort(np.argsort([getattr(row, f"{by}_{figure}_ms") for row in rows])).astype(np.float64)

    return float(np.corrcoef(ranks("measured"), ranks("simulated"))[0, 1])


def coefficients(results: Sequence[Result]) -> Iterable[str]:
    """For each campaign, how much more or less the host and the front end would have to cost for the least mean
    absolute error, relative, over its rows.
    """
    for name, rows in by_campaign(results).items():
        step, each = least(rows, "tpot", [row.concurrency for row in rows], np.arange(-2, 2, 0.05), 0.002)
        once, token = least(rows, "ttft", [row.prompt for row in rows], np.arange(-60.0, 60.0, 2.0), 0.002)
        yield (
            f"{name}: framework.step_us {1000 * step:+.0f}, framework.sequence_us {1000 * each:+.0f}; "
            f"latency_ms {once:+.0f}, latency_us {1000 * token:+.0f}"
        )


def least(
    rows: Sequence[Result], figure: str, of: Sequence[int], constants: NDArray[np.float64], step: float
) -> tuple[float, float]:
    """What to add to the simulated figure: a constant, and a multiple of `of`."""
    measured = np.array([getattr(row, f"measured_{figure}_ms") for row in rows])
    simulated = np.array([getattr(row, f"simulated_{figure}_ms") for row in rows])
    factors = np.arange(-40, 41) * step
    added = constants[:, None, None] + factors[None, :, None] * np.array(of)[None, None, :]
    errors = np.abs((simulated + added) / measured - 1).mean(axis=2)
    at, factor = np.unravel_index(int(errors.argmin()), errors.shape)
    return float(constants[at]), float(factors[factor])
