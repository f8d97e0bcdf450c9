"""Does the report tell what is different from what is not? Real runs of one configuration, compared with themselves
and with a run that was slowed down on purpose.

    python -m experiments.aa_test.benchmark
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from experiments.runs import configure
from kvlab.config import RunConfig
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine
from kvlab.lab.compare.groups import RunSet
from kvlab.lab.machine import describe
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.report.report import build_report
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.results.records import RunRecord
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.settings import flatten

SETTINGS = [
    "model=qwen3_tiny",
    "workload.num_requests=32",
    "workload.prompt_len={min: 64, max: 128}",
    "workload.output_len={min: 96, max: 128}",
]
SLOWER = 0.25  # of a step's time, waited after it: 20 % fewer tokens per second
SIDES = {"first": 0.0, "second": 0.0, "slowed": SLOWER}
THROUGHPUT = "throughput/output_tokens_per_s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = configure(SETTINGS)
    plan = plan_run(config)
    _run(plan, 0.0)  # warms up
    same = all_same = slower = 0
    spreads: list[float] = []
    print("| trial | second against first | words other than same | slowed against first |\n|---|---|---|---|")
    for trial in range(options.trials):
        runs = [_record(config, plan, trial, repeat, side) for repeat in range(options.repeats) for side in SIDES]
        words = {side: _words([run for run in runs if run.tags["side"] in ("first", side)]) for side in SIDES}
        others = [f"{metric} {word}" for metric, word in words["second"].items() if word != "same"]
        second, slowed = (words[side][THROUGHPUT] for side in ("second", "slowed"))
        print(f"| {trial} | {second} | {', '.join(others) or '-'} | {slowed} |", flush=True)
        same += second == "same"
        all_same += not others
        slower += slowed == "slower"
        rates = sorted(run.metrics[THROUGHPUT] for run in runs if run.tags["side"] == "first")
        spreads.append(100 * (rates[-1] / rates[0] - 1))
    print(
        f"\n{describe('cpu')}, {options.repeats} repeats: of {options.trials} comparisons of a configuration with "
        f"itself, {same} came out `same` in throughput, and {all_same} in every line of the report; of as many "
        f"with one that was slowed down by 20 %, {slower} came out `slower`. The fastest and the slowest repeat of "
        f"a group lay {median(spreads):.0f} % apart (median of the trials), at most {max(spreads):.0f} %."
    )


def _words(runs: list[RunRecord]) -> dict[str, str]:
    """The report's word for each metric."""
    if len({run.tags["side"] for run in runs}) == 1:
        return {}
    report = build_report([RunSet("trial", tuple(runs))], ReportOptions(by=["tags.side"]))
    return {row.metric: row.cells[1].word for row in report.rows}


def _record(config: RunConfig, plan: RunPlan, trial: int, repeat: int, side: str) -> RunRecord:
    started = time.time()
    return RunRecord(
        name=side,
        run_id=None,
        status="finished",
        error=None,
        config=flatten(dataclasses.asdict(config)) | {"repeat": repeat},
        choices={},
        metrics=_run(plan, SIDES[side]),
        tags={"side": side},
        directory=Path(f"trial{trial}") / f"{side}{repeat}",
        facts={"started": started},
    )


def _run(plan: RunPlan, slower: float) -> dict[str, float]:
    """The metrics of a run in a fresh engine, each step of which takes this share longer."""
    engine = build_engine(plan)
    log = drive(engine, plan.requests, on_step=_waits(slower))
    metrics = run_metrics(log, plan.pool, leaked_blocks=0)
    del engine
    gc.collect()
    return metrics


def _waits(share: float) -> Callable[[RunLog, StepRecord | None], None]:
    def wait(log: RunLog, record: StepRecord | None) -> None:
        if share and record is not None:
            until = time.perf_counter() + share * (record.end_s - record.start_s)
            while time.perf_counter() < until:  # sleep is too coarse for a step of a millisecond
                pass

    return wait


if __name__ == "__main__":
    main()
