"""Do gains hold on traffic that they were not seen on? Public traces in windows; an interval against later gains.

python -m experiments.advice_halves.run AZURE.csv MOONCAKE.jsonl [WINDOWS]

A gain and its interval come from two windows that follow each other, as `kvlab advise` joins its two parts. It
holds where the gains of the two windows behind them are within.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvlab.cli.compose import compose_run
from kvlab.config import RunConfig
from kvlab.core import Request
from kvlab.engine.threads import usable_cores
from kvlab.lab.advise.changes import Change
from kvlab.lab.advise.goal import Goal
from kvlab.lab.advise.segments import Segment
from kvlab.lab.advise.simulations import Settings, Simulations, here
from kvlab.lab.run.requests import requests_of

REQUESTS = 300  # of a window
CHANGES: tuple[Settings, ...] = (
    {"scheduler.max_batched_tokens": 1024},
    {"scheduler.max_batched_tokens": 4096},
    {"scheduler.max_batched_tokens": 512},
    {"scheduler.max_batch_size": 32},
    {"scheduler.order": "shortest_first"},
    {"executor.weights": "fp8"},
    {"kv.dtype": "fp8_e4m3"},
    {"fleet.replicas": 2, "fleet.router": "precise"},
)
TRACES = {
    "azure": ("workload=azure", "hardware=l40s", "workload.rate_scale=0.8"),
    "mooncake": ("workload=mooncake", "hardware=h100_sxm", "workload.rate_scale=0.15"),
}
COMMON = (
    "executor=simulated",
    "model=llama3_1_8b",
    "figures=false",
    "tracking=off",
    "scheduler.max_batched_tokens=2048",
)


def windows(requests: Sequence[Request], count: int) -> list[Segment]:
    """So many windows, evenly over the trace; the first 15 % of each fill the cache."""
    found = []
    for number in range(count):
        first = number * (len(requests) - REQUESTS) // max(count - 1, 1)
        start_s = requests[first].arrival_s
        part = [replace(each, arrival_s=each.arrival_s - start_s) for each in requests[first : first + REQUESTS]]
        counted = frozenset(request.request_id for request in part[int(0.15 * REQUESTS) :])
        found.append(Segment(f"window {number}", part, counted))
    return found


def gains(config: RunConfig, parts: Sequence[Segment], folder: Path) -> list[dict[str, object]]:
    """Every change in every four windows that follow each other."""
    goal = Goal.of(config, at_once=False)
    simulations = Simulations(config, folder / "simulations.jsonl", here(usable_cores().logical))
    rows: list[dict[str, object]] = []
    outcomes = [simulations.run([{}, *CHANGES], part) for part in parts]
    for number, settings in enumerate(CHANGES, 1):
        seen = [None if own[number].error else goal.gain(own[0], own[number]) for own in outcomes]
        for at in range(0, len(seen) - 3, 2):
            first, second, *later = seen[at : at + 4]
            if first is None or second is None or None in later:
                continue
            joined = second.joined(first)
            for each in filter(None, later):
                rows.append(
                    {
                        "change": Change("", settings).text, "windows": at, "gain": round(joined.value, 2),
                        "low": round(joined.low, 2), "high": round(joined.high, 2), "later": round(each.value, 2),
                        "holds": bool(joined.low <= each.value <= joined.high),
                        "verdict": joined.verdict, "later_verdict": each.verdict,
                    }
                )  # fmt: skip
    return rows


def main() -> None:
    """Both traces; writes results.json."""
    paths, count = dict(zip(TRACES, sys.argv[1:3], strict=True)), int(sys.argv[3]) if len(sys.argv) > 3 else 12
    found: dict[str, list[dict[str, object]]] = {}
    for name, words in TRACES.items():
        config = compose_run([*COMMON, *words, f"workload.path={paths[name]}"]).config
        with tempfile.TemporaryDirectory() as folder:
            found[name] = gains(config, windows(requests_of(config), count), Path(folder))
        rows = found[name]
        held = sum(bool(row["holds"]) for row in rows)
        better = [row for row in rows if row["verdict"] == "better"]
        kept = sum(float(str(row["later"])) > 0 for row in better)
        print(f"{name}: {held} of {len(rows)} later gains within the interval; of {len(better)} gains that were")
        print(f"    better {kept} gained later too", flush=True)
    Path(__file__).with_name("results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
