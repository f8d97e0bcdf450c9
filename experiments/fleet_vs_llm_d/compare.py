"""What was predicted beside what llm-d measured: tables, verdicts and a picture.

    python -m experiments.fleet_vs_llm_d.compare MEASURED [--report 37] [--open 800]

MEASURED is llm-d's report itself (benchmarking/37-capacity/README.md), or its figures as comma-separated values:
for each stage and router requests_per_s, router, output_tokens_per_s, ttft_p90_s, ttft_mean_s, itl_mean_s.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from experiments.fleet_vs_llm_d.run import REPORTS, ROUTERS, file_mark, predicted_file
from kvlab.lab.figures import style

Cells = dict[tuple[float, str], dict[str, float]]  # by rate and router
_LATE_S, _QUEUED_S = 2.0, 20.0
_SHOWN = ("output_tokens_per_s", "ttft_p90_s", "ttft_mean_s", "itl_mean_s")


def read_measured(path: Path) -> Cells:
    """The measured cells, of the columns that are compared."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return {
                (float(row["requests_per_s"]), row["router"]): {name: float(row[name]) for name in _SHOWN}
                for row in csv.DictReader(file)
            }
    cells: Cells = {}
    for stage in re.split(r"^### QPS = ", path.read_text(), flags=re.MULTILINE)[1:]:
        for router, row in re.findall(r"^\| (\w+)-scheduling \|(.*)", stage, re.MULTILINE):
            # Output tokens/s, requests/s, ttft (p90, mean) and itl; other columns have a sign in them.
            numbers = [float(cell) for cell in re.findall(r" ([\d.]+) (?=\|)", row)]
            own = {"default": "estimated"}.get(router, router)
            cells[float(stage.split()[0]), own] = dict(zip(_SHOWN, (numbers[0], *numbers[2:]), strict=True))
    return cells


def read_predicted(mark: str, counted: float) -> tuple[list[Cells], list[dict[str, float]]]:
    """The predicted cells of each seed, with output as the client counts it, and what each file says beside them.
    `mark`: in the files' names. `counted`: of what is generated.
    """
    seeds: list[Cells] = []
    runs: list[dict[str, float]] = []
    for seed in count():
        files = {router: predicted_file(router, mark, seed) for router in ROUTERS}
        if not all(file.exists() for file in files.values()):
            break
        cells: Cells = {}
        for router, file in files.items():
            run = json.loads(file.read_text())
            for stage in run["stages"]:
                output = counted * stage["output_tokens_per_s"]
                cells[stage["requests_per_s"], router] = stage | {"output_tokens_per_s": output}
            runs.append(run)
        seeds.append(cells)
    return seeds, runs


def medians(seeds: list[Cells]) -> Cells:
    """Each figure's median over the seeds."""
    return {
        key: {name: median(cells[key][name] for cells in seeds) for name in first}
        for key, first in seeds[0].items()
    }


def tables(measured: Cells, predicted: Cells) -> Iterator[str]:
    """A table for each router, in Markdown: predicted : measured."""
    for router in ROUTERS:
        yield f"\n**{router}**, predicted : measured\n"
        yield "| rate | output tokens/s | off by | ttft p90, s | ttft mean, s | itl mean, ms | found | preempted |"
        yield "|---|---|---|---|---|---|---|---|"
        for rate in _rates(measured):
            found, was = predicted[rate, router], measured[rate, router]
            yield (
                f"| {rate:g} | {found['output_tokens_per_s']:,.0f} : {was['output_tokens_per_s']:,.0f} "
                f"| {_off(found, was):+.0%} | {found['ttft_p90_s']:.2f} : {was['ttft_p90_s']:.2f} "
                f"| {found['ttft_mean_s']:.2f} : {was['ttft_mean_s']:.2f} "
                f"| {1000 * found['itl_mean_s']:.0f} : {1000 * was['itl_mean_s']:.0f} "
                f"| {found['hit_share']:.0%} | {found['preempted']:.0f} |"
            )


def verdicts(measured: Cells, predicted: Cells, counted: float) -> Iterator[str]:
    """What has to hold, and whether it does."""
    shares = {"output tokens/s": 1.0}
    if counted < 1:
        shares = {"output tokens/s, as the client counts": 1.0, "as generated": 1 / counted}
    for name, share in shares.items():
        errors = [abs((1 + _off(found, measured[key])) * share - 1) for key, found in predicted.items()]
        within = sum(error <= 0.15 for error in errors)
        yield f"{name}: median error {median(errors):.1%} over {len(errors)} cells, {within} within 15 %"
    held, whole = [], []
    queues = min(rate for rate in _rates(measured) if measured[rate, "random"]["ttft_p90_s"] > _QUEUED_S)
    for rate in _rates(measured):
        if rate < queues:
            continue
        orders = [_order(cells, rate) for cells in (predicted, measured)]
        if orders[0] == orders[1]:
            held.append(f"{rate:g}")
        elif orders[0][:2] == orders[1][:2]:
            whole.append(f"{rate:g}")
    yield f"order of the four routers, from {queues:g}/s on: the same at {', '.join(held) or 'no stage'}"
    yield f"order of the first two, load and random the other way round: {', '.join(whole) or 'no stage'}"
    for router in ROUTERS:
        stages = [_late(cells, router) for cells in (predicted, measured)]
        yield f"ttft p90 above 2 s, {router}: predicted {stages[0]}, measured {stages[1]}"


def _rates(cells: Cells) -> list[float]:
    return sorted({rate for rate, _ in cells})


def _off(found: dict[str, float], was: dict[str, float]) -> float:
    return found["output_tokens_per_s"] / was["output_tokens_per_s"] - 1


def _order(cells: Cells, rate: float) -> list[str]:
    return sorted(ROUTERS, key=lambda router: -cells[rate, router]["output_tokens_per_s"])


def _late(cells: Cells, router: str) -> str:
    """The first stage from which on ttft p90 stays above the limit."""
    known = _rates(cells)
    late = [rate for rate in known if cells[rate, router]["ttft_p90_s"] > _LATE_S]
    stays = [rate for rate in late if all(other in late for other in known if other >= rate)]
    first = f"from {stays[0]:g}/s on" if stays else "never"
    return f"{first} (first at {late[0]:g}/s)" if late and late[:1] != stays[:1] else first


def draw(measured: Cells, predicted: Cells) -> Figure:
    """Four figures over the rate, a colour for each router: lines are predicted, marks measured."""
    titles = (
        "Output tokens per second",
        "First token (ttft), p90, s",
        "First token (ttft), mean, s",
        "itl, mean, s",
    )
    figure, rates = style.new_figure(6.4), _rates(measured)
    for axes, name, text in zip(figure.subplots(2, 2).flat, _SHOWN, titles, strict=True):
        style.tidy(axes, grid="both")
        style.title(axes, text)
        for router, colour in zip(ROUTERS, style.LINES, strict=False):
            axes.plot(rates, [predicted[rate, router][name] for rate in rates], color=colour, label=router)
            axes.plot(rates, [measured[rate, router][name] for rate in rates], "o", color=colour, markersize=4)
        if name.startswith("ttft"):
            axes.set_yscale("log")
            style.logarithmic(axes.yaxis, 0.05, 120)
        else:
            axes.set_ylim(0)
            style.plain(axes.yaxis)
        axes.set_xlabel("requests per second")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    figure.supxlabel(
        "lines: predicted; marks: measured by llm-d", x=0.99, ha="right", fontsize=8, color=style.FAINT
    )
    return figure


def main() -> None:
    """Print tables and verdicts; draw the curves of what was predicted with nothing given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("--report", choices=REPORTS, default="73")
    parser.add_argument("--framework", default="vllm_synchronous", help="as in run.py")
    parser.add_argument("--open", type=int, help="as in run.py; draws nothing")
    options = parser.parse_args()
    report = REPORTS[options.report]
    measured = read_measured(options.measured)
    mark = file_mark(options.report, options.framework, options.open)
    seeds, runs = read_predicted(mark, report.counted)
    for seed, cells in enumerate(seeds):
        print(f"\nseed {seed}\n" + "\n".join(verdicts(measured, cells, report.counted)))
    predicted = medians(seeds)
    print("\n".join(tables(measured, predicted)))
    print(f"\nmedians of {len(seeds)} seeds\n" + "\n".join(verdicts(measured, predicted, report.counted)))
    for pool in {run["pool_tokens"] for run in runs}:
        print(f"pool: {pool:,.0f} tokens, {pool / report.pool - 1:+.1%}")
    print(f"{sum(run['cpu_s'] for run in runs) / len(seeds):.0f} CPU s for the {len(predicted)} cells of a seed")
    if mark == file_mark(options.report, "vllm_synchronous", None):
        draw(measured, predicted).savefig(Path(__file__).parent / f"curves{mark}.png")


if __name__ == "__main__":
    main()
