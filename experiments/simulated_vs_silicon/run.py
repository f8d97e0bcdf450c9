"""Deployments that were measured on GPUs, simulated by kvlab's engine.

    python -m experiments.simulated_vs_silicon.run --every

Simulates each row of the sample that is not in results.csv yet, in an order in which any part of them is a fair
sample, and adds it there; then prints the tables and draws the pictures. `--campaign q32` takes those whose names
contain that, `--part 8` an eighth of them, `--again` those in results.csv too. Without `--every` it prints the
tables alone. `--fit` takes the rows that coefficients may be fitted on, writes nothing, and prints what fits
better; with `--grid` mean errors for each combination of values, as `--grid framework.request_us=0,2000
framework.output_token_us=40,45`, the least last.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.runs import configure
from experiments.simulated_vs_silicon import results as saved
from experiments.simulated_vs_silicon.campaigns import CAMPAIGNS, Campaign, campaign_of
from experiments.simulated_vs_silicon.picture import draw
from experiments.simulated_vs_silicon.results import Result
from experiments.simulated_vs_silicon.sample import Row, rows
from experiments.simulated_vs_silicon.tables import by, coefficients, left_out, table
from kvlab.engine.build import build_engine
from kvlab.engine.front_end import behind_front_end
from kvlab.errors import CapacityError, ConfigError
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.simulation.timings import StepTiming

HERE = Path(__file__).parent
Job = tuple[Campaign, Row]


def planned(settings: list[str]) -> RunPlan:
    """Blocks that left a sliding window are kept where the pool holds those of all sequences that run at once: none
    waits for memory either way, so that steps are the same and take less time to simulate.

    Raises ConfigError and CapacityError as `plan_run`.
    """
    config = configure(settings)
    with suppress(CapacityError):
        plan = plan_run(replace(config, kv=replace(config.kv, windows=False)))
        most = config.scheduler.max_batch_size * plan.pool.most_blocks(config.model.max_seq_len)
        if most <= plan.pool.num_blocks or all(layer.sliding_window is None for layer in plan.model.layers):
            return plan
    return plan_run(config)


def simulate(campaign: Campaign, row: Row, others: tuple[str, ...] = ()) -> Result | str:
    """With `others` beside the campaign's settings. Why not, for a deployment that cannot be simulated."""
    if (why := campaign.lacking(row)) is not None:
        return why
    try:
        plan = planned([*campaign.settings(row), *others])
    except CapacityError:
        return "not enough memory for one request"
    except ConfigError as error:
        return f"{campaign.name} on {row.system}: {error}"
    engine = behind_front_end(build_engine(plan), plan.config.framework)
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
        row.backend,
        row.system,
        row.model,
        row.experts or row.weights,
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


def grid(jobs: Sequence[Job], keys: Sequence[str], workers: int) -> list[str]:
    """For each combination of the keys' values, mean errors of ttft, each row's no more than 1, and of tpot; the
    least sum last.
    """
    names, values = zip(*(key.split("=") for key in keys), strict=True)
    found = []
    with ProcessPoolExecutor(workers) as pool:
        for chosen in product(*(each.split(",") for each in values)):
            others = tuple(f"{name}={value}" for name, value in zip(names, chosen, strict=True))
            done = pool.map(simulate, *zip(*jobs, strict=True), [others] * len(jobs))
            came = [result for result in done if isinstance(result, Result)]
            ttft, tpot = (fmean(min(abs(row.error(name)), 1) for row in came) for name in ("ttft", "tpot"))
            found.append((ttft + tpot, f"ttft {100 * ttft:.1f} %, tpot {100 * tpot:.1f} %: {' '.join(others)}"))
    return [text for _, text in sorted(found, reverse=True)]


def run(jobs: Sequence[Job], workers: int) -> Iterable[Result | str]:
    """Each in turn, as soon as it is done."""
    if workers == 1:
        yield from (simulate(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(simulate, *zip(*jobs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", action="store_true", help="simulate all rows that are not in results.csv")
    parser.add_argument("--again", action="store_true", help="with --every: those that are, too")
    parser.add_argument("--campaign", default="", help="only those whose names contain this")
    parser.add_argument("--weights", default="", help="only those with matrices in this, as the sample calls it")
    parser.add_argument("--part", type=int, default=1, help="of the rows, only one in so many")
    parser.add_argument("--fit", action="store_true", help="the rows for fitting, and coefficients")
    parser.add_argument("--grid", nargs="+", default=[], metavar="KEY=A,B", help="with --fit: values to try")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    begin = time.monotonic()
    chosen = [campaign for campaign in CAMPAIGNS if options.campaign.lower() in campaign.name.lower()]
    done = {} if options.fit or options.again else {result.id for result in saved.read()}
    every = sorted(rows(), key=lambda row: row.crc)
    jobs = [
        (campaign, row)
        for row in every
        if (campaign := campaign_of(row, chosen)) is not None and row.id not in done
        if options.weights in ("", row.experts or row.weights)
        if (row.crc >> 1) % options.part == 0 and not (options.fit and row.held_out)
    ]
    if options.grid:
        print("\n".join(grid(jobs, options.grid, options.workers)))
        return
    if options.fit:
        came = [result for result in run(jobs, options.workers) if isinstance(result, Result)]
        print("\n".join([*table(came), *coefficients(came)]))
        return
    if options.every:
        if options.again:
            names = {campaign.name for campaign in chosen}
            saved.write(result for result in saved.read() if result.campaign not in names)
        lacking = Counter[str]()
        for result in run(jobs, options.workers):
            if isinstance(result, Result):
                saved.append(result)
            else:
                lacking[result] += 1
        lacking.update("no such model" for row in every if campaign_of(row) is None)
        saved.write(saved.read())
        print("\n".join(f"{count} rows: {why}" for why, count in lacking.most_common()))
        print(f"{len(jobs)} rows tried in {time.monotonic() - begin:.0f} s\n")
    came = [result for result in saved.read() if not result.was_cached]
    for name, sparse in (("errors.png", False), ("errors_mixtures.png", True)):
        kind = [result for result in came if result.is_sparse == sparse]
        held_out = [result for result in kind if result.held_out]
        parts = [table(held_out), *(by(held_out, field) for field in ("framework", "device", "model", "weights"))]
        parts += [left_out(kind, field) for field in ("device", "model")]
        print("\n\n".join("\n".join(part) for part in parts), end="\n\n")
        draw(kind).savefig(HERE / name, dpi=90)


if __name__ == "__main__":
    main()
