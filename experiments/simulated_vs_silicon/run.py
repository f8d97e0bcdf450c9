"""Deployments that were measured on GPUs, simulated by kvlab's engine.

    python -m experiments.simulated_vs_silicon.run

Simulates the rows that no coefficient was fitted on, in two processes; prints the table of errors, and writes each
row to results.csv and the picture to errors.png. `--campaign q32` takes those whose names contain that; `--fit`
simulates the other rows instead, and prints the coefficients that fit them best; with `--grid` it prints mean
errors for each combination of values, as `--grid framework.request_us=0,2000 framework.output_token_us=40,45`, the
least last.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from experiments.runs import configure
from experiments.simulated_vs_silicon.campaigns import CAMPAIGNS, Campaign, Row
from experiments.simulated_vs_silicon.picture import draw
from kvlab.engine.build import build_engine
from kvlab.errors import CapacityError
from kvlab.lab.run.drive import drive
from kvlab.engine.front_end import behind_front_end
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.simulation.timings import StepTiming

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
_TYPES = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Result:
    """A row: measured, simulated, and by the formula of one line."""

    campaign: str
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

    def error(self, figure: str, by: str = "simulated") -> float:
        """Relative error of tpot or ttft."""
        measured: float = getattr(self, f"measured_{figure}_ms")
        predicted: float = getattr(self, f"{by}_{figure}_ms")
        return predicted / measured - 1


def simulate(campaign: Campaign, row: Row, others: tuple[str, ...] = ()) -> Result | None:
    """With `others` beside the campaign's settings. None for a deployment whose requests do not fit in the memory
    that the planner leaves for them.
    """
    config = configure([*campaign.settings(row), *others])
    try:
        plan = plan_run(config)
    except CapacityError:
        return None
    engine = behind_front_end(build_engine(plan), config.framework)
    records = drive(engine, plan.requests, concurrency=row.concurrency).records
    size = row.concurrency
    waves = [records[start : start + size] for start in range(0, len(records), size)]

    def mean(figure: str) -> float:
        """Over the first wave, the last, and the one between as often as there were others."""
        first, between, last = (fmean(getattr(record, figure) for record in wave) for wave in waves)
        return (first + (campaign.waves - 2) * between + last) / campaign.waves

    front_ms = campaign.latency_ms + campaign.latency_us * row.prompt / 1000
    decode_ms, prefill_ms = (1000 * seconds for seconds in _steps_s(plan, row))
    return Result(
        campaign.name,
        row.id,
        row.devices,
        row.prompt,
        row.output,
        row.concurrency,
        row.tpot_ms,
        mean("tpot_ms"),
        decode_ms + row.concurrency / row.output * prefill_ms,
        row.ttft_ms,
        mean("ttft_ms") + front_ms,
        prefill_ms,
    )


def _steps_s(plan: RunPlan, row: Row) -> tuple[float, float]:
    """Seconds of a decode step of all sequences halfway, and of one prompt's prefill: the formula's."""
    if not isinstance(plan.timing, StepTiming):
        raise RuntimeError("the plan has no timing")
    ones, middle = np.ones(row.concurrency, np.int64), row.prompt + row.output // 2
    decode = plan.timing.device_s(ones, ones * middle, row.concurrency)
    prompt = np.array([row.prompt])
    return decode, plan.timing.device_s(prompt, prompt, 1)


def table(results: Sequence[Result]) -> Iterable[str]:
    """Errors by campaign, as a table in Markdown."""
    yield (
        "| deployments | rows | tpot | of the formula | ttft | of the formula | rank, tpot | rank, ttft |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for campaign in CAMPAIGNS:
        if not (rows := [result for result in results if result.campaign == campaign.name]):
            continue
        errors = [
            f"{100 * median(abs(row.error(figure, by)) for row in rows):.1f} %"
            for figure in ("tpot", "ttft")
            for by in ("simulated", "formula")
        ]
        ranks = [
            f"{rank:.2f}" if (rank := correlation(rows, figure)) is not None else "-" for figure in ("tpot", "ttft")
        ]
        yield f"| {campaign.name} | {len(rows)} | {' | '.join(errors + ranks)} |"


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
    for campaign in CAMPAIGNS:
        if not (rows := [result for result in results if result.campaign == campaign.name]):
            continue
        step, each = _least(rows, "tpot", [row.concurrency for row in rows], np.arange(-2, 2, 0.05), 0.002)
        once, token = _least(rows, "ttft", [row.prompt for row in rows], np.arange(-60.0, 60.0, 2.0), 0.002)
        yield (
            f"{campaign.name}: framework.step_us {1000 * step:+.0f}, framework.sequence_us {1000 * each:+.0f}; "
            f"latency_ms {once:+.0f}, latency_us {1000 * token:+.0f}"
        )


def _least(
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


def grid(jobs: Sequence[tuple[Campaign, Row]], keys: Sequence[str], workers: int) -> list[str]:
    """For each combination of the keys' values, mean errors of ttft, each row's no more than 1, and of tpot; the
    least sum last.
    """
    names, values = zip(*(key.split("=") for key in keys), strict=True)
    found = []
    with ProcessPoolExecutor(workers) as pool:
        for chosen in product(*(each.split(",") for each in values)):
            others = tuple(f"{name}={value}" for name, value in zip(names, chosen, strict=True))
            done = pool.map(simulate, *zip(*jobs, strict=True), [others] * len(jobs))
            results = [result for result in done if result is not None]
            ttft, tpot = (fmean(min(abs(row.error(name)), 1) for row in results) for name in ("ttft", "tpot"))
            found.append((ttft + tpot, f"ttft {100 * ttft:.1f} %, tpot {100 * tpot:.1f} %: {' '.join(others)}"))
    return [text for _, text in sorted(found, reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--campaign", default="", help="only those whose names contain this")
    parser.add_argument("--fit", action="store_true", help="simulate the rows for fitting, and print coefficients")
    parser.add_argument("--grid", nargs="+", default=[], metavar="KEY=A,B", help="with --fit: values to try")
    parser.add_argument("--every", type=int, default=1, help="of the rows, only each n-th")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    begin = time.monotonic()
    chosen = [campaign for campaign in CAMPAIGNS if options.campaign.lower() in campaign.name.lower()]
    jobs = [(campaign, row) for campaign in chosen for row in campaign.rows() if row.held_out != options.fit]
    jobs = sorted(jobs[:: options.every], key=lambda job: -job[1].output * job[1].concurrency)
    if options.grid:
        print("\n".join(grid(jobs, options.grid, options.workers)))
        return
    with ProcessPoolExecutor(options.workers) as pool:
        done = list(pool.map(simulate, *zip(*jobs, strict=True)))
    results = [result for result in done if result is not None]
    print("\n".join(table(results)))
    print(f"\n{len(results)} of {len(jobs)} rows in {time.monotonic() - begin:.0f} s")
    if options.fit:
        print("\n".join(coefficients(results)))
        return
    names = {campaign.name for campaign in chosen}
    write([*(row for row in read() if row.campaign not in names), *results])
    draw(read()).savefig(HERE / "errors.png")


def read() -> list[Result]:
    """What results.csv holds, if there is one."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return [
            Result(*(_TYPES[str(field.type)](row[field.name]) for field in fields(Result)))
            for row in csv.DictReader(file)
        ]


def write(results: list[Result]) -> None:
    """Write results.csv, in the order of the campaigns."""
    order = {campaign.name: at for at, campaign in enumerate(CAMPAIGNS)}
    results.sort(
        key=lambda row: (order[row.campaign], row.devices, row.prompt, row.output, row.concurrency, row.id)
    )
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Result))
        for row in results:
            values = (getattr(row, field.name) for field in fields(Result))
            writer.writerow(f"{value:.2f}" if isinstance(value, float) else value for value in values)


if __name__ == "__main__":
    main()
