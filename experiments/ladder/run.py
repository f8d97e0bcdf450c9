"""The ladder: from one request at a time to pages, shared prefixes, chunks and speculation, each rung on the last.

python -m experiments.ladder.run [cpu] [h100] [http [ROUNDS]]      five minutes; a round of http two more
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from experiments.runs import configure, measure
from experiments.serving import server_process
from kvlab.lab.figures import style

REPEATS = 3
WHOLE = 4096  # tokens of a step that takes any prompt of these workloads at once
CHUNK = 256
METRICS = {
    "output tok/s": "throughput/output_tokens_per_s",
    "first token p50, ms": "latency/ttft_ms_p50",
    "first token p99, ms": "latency/ttft_ms_p99",
    "between tokens p99, ms": "latency/itl_ms_p99",
}
SLOTS = ("kv=contiguous", f"scheduler.max_batched_tokens={WHOLE}")
PAGES = ("kv=paged_unshared", f"scheduler.max_batched_tokens={WHOLE}")
SHARED = ("kv=paged", f"scheduler.max_batched_tokens={WHOLE}")
CHUNKED = ("kv=paged", f"scheduler.max_batched_tokens={CHUNK}")
SPECULATION = "scheduler.speculation.method=ngram"
RUNGS: dict[str, tuple[str, ...]] = {
    "one at a time": (*SLOTS, "scheduler=continuous", "scheduler.max_batch_size=1"),
    # A static batch computes its prompts in its first step, which has to hold those of all slots.
    "static batches": (
        *SLOTS,
        "scheduler=static",
        "scheduler.max_wait_ms=100",
        "scheduler.max_batched_tokens=65536",
    ),
    "continuous": (*SLOTS, "scheduler=continuous"),
    "pages": PAGES,
    "shared prefixes": SHARED,
    f"chunks of {CHUNK}": CHUNKED,
    "speculation": (*CHUNKED, SPECULATION),
}
#: Prompts begin with one system prompt; most are short, some long. Memory holds four slots of the longest sequence.
LENGTHS = (
    "workload=mixed32",
    "workload.arrival=poisson",
    "workload.prompt_len.distribution=lognormal",
    "workload.prompt_len.sigma=1.2",
    "tracking=off",
    "scheduler.admission_reserve=0",
)
PLACES: dict[str, tuple[str, ...]] = {
    "cpu": (
        *("model=qwen3_mini", "executor=cpu", "model.max_seq_len=2048", "kv.memory=64MiB"),
        *("scheduler.max_batch_size=32", "workload.num_requests=24", "workload.rate=8", "workload.system_len=256"),
        *("workload.prompt_len.median=64", "workload.prompt_len.min=16", "workload.prompt_len.max=1600"),
        *("workload.output_len.min=24", "workload.output_len.max=64"),
    ),
    "h100": (
        *("model=qwen3_8b", "executor=simulated", "hardware=h100_sxm", "executor.timing=roofline"),
        *("model.max_seq_len=8192", "kv.memory=16GiB", "scheduler.max_batch_size=128"),
        *("workload.num_requests=600", "workload.rate=40", "workload.system_len=1024"),
        *("workload.prompt_len.median=256", "workload.prompt_len.min=32", "workload.prompt_len.max=2900"),
        *("workload.output_len.min=64", "workload.output_len.max=256"),
    ),
}
THRESHOLDS = (512, 128)  # beside those of the rungs
#: In a closed loop a client sends when an answer has come: it cannot be late, beside the server on the same cores.
OVER_HTTP = ("workload.arrival=burst", "workload.rate=null", "workload.concurrency=12", "workload.num_requests=16")
Figures = Mapping[str, float]


def rungs_of(place: str) -> dict[str, tuple[str, ...]]:
    """The rungs that a place can climb: a simulated device computes no tokens that could be looked up."""
    return {name: rung for name, rung in RUNGS.items() if place == "cpu" or SPECULATION not in rung}


def climb(place: str, rungs: Mapping[str, Sequence[str]]) -> dict[str, Figures]:
    """The medians of each rung; on a simulated device one run says it. Repeats take turns."""
    found: dict[str, list[Figures]] = {name: [] for name in rungs}
    for _ in range(REPEATS if place == "cpu" else 1):
        for name, rung in rungs.items():
            _, _, metrics = measure(configure([*LENGTHS, *PLACES[place], *rung]))
            found[name].append(metrics)
            print(name, {key: round(metrics[metric], 1) for key, metric in METRICS.items()}, file=sys.stderr)
    return {name: medians(runs) for name, runs in found.items()}


def chunks(place: str, rungs: Mapping[str, Figures]) -> dict[str, Figures]:
    """The figures by the most tokens of a step, whole prompts first; two are rungs."""
    more = climb(place, {f"{size}": ("kv=paged", f"scheduler.max_batched_tokens={size}") for size in THRESHOLDS})
    known = {f"{WHOLE}": rungs["shared prefixes"], f"{CHUNK}": rungs[f"chunks of {CHUNK}"], **more}
    return {size: known[size] for size in sorted(known, key=int, reverse=True)}


def medians(runs: Sequence[Figures]) -> dict[str, float]:
    """Of each metric and of the peak of sequences at once."""
    names = [*METRICS.values(), "capacity/peak_running"]
    return {name: median(run[name] for run in runs) for name in names if all(name in run for run in runs)}


def over_http(rungs: Mapping[str, Sequence[str]], rounds: int) -> dict[str, Figures]:
    """Requests to `kvlab serve` with each rung's settings, as a client sees them: medians, in turns. Runs that are
    invalid are left out.
    """
    found: dict[str, list[Figures]] = {name: [] for name in rungs}
    for _ in range(rounds):
        for name, rung in rungs.items():
            with tempfile.TemporaryDirectory() as folder:
                status, metrics = ask(Path(folder), rung)
            found[name] += [metrics] if status == "finished" else []
            print(name, status, {key: round(metrics[m], 1) for key, m in METRICS.items()}, file=sys.stderr)
    return {name: medians(runs) for name, runs in found.items() if runs}


def ask(folder: Path, rung: Sequence[str]) -> tuple[str, Figures]:
    """How a run of a server with a rung's settings ended, and its metrics. RuntimeError where there are none."""
    served = [text for text in PLACES["cpu"] if not text.startswith("workload")]
    with server_process(folder, [*served, *rung, "scheduler.admission_reserve=0"]) as server:
        asked = [*LENGTHS, *PLACES["cpu"], *OVER_HTTP, "engine=openai", f"engine.url={server.url}", "figures=false"]
        command = [sys.executable, "-m", "src.run", *asked, f"hydra.run.dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    file = folder / "run" / "summary.json"
    if not file.is_file():
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    summary = json.loads(file.read_text())
    return summary["status"], summary["metrics"]


def table(rows: Mapping[str, Figures]) -> str:
    """Markdown, with how much faster each rung is than the first."""
    first = next(iter(rows.values()))[METRICS["output tok/s"]]
    heads = ["rung", *METRICS, "at once", "times the first"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, figures in rows.items():
        cells = [f"{figures[metric]:,.0f}" for metric in METRICS.values()]
        peak = figures.get("capacity/peak_running")
        cells += ["" if peak is None else f"{peak:.0f}", f"{figures[METRICS['output tok/s']] / first:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(places: Mapping[str, Mapping[str, Figures]]) -> None:
    """Tokens per second and the stall between tokens, rung by rung."""
    figure = style.new_figure(5.6)
    shown = {"output tok/s": style.BLUE, "between tokens p99, ms": style.SKY}
    for row, (place, rows) in enumerate(places.items()):
        for column, (name, colour) in enumerate(shown.items()):
            axes = figure.add_subplot(len(places), 2, 2 * row + column + 1)
            values = [figures[METRICS[name]] for figures in rows.values()]
            axes.barh(list(rows), values, color=colour)
            axes.invert_yaxis()
            style.tidy(axes, grid="x")
            style.title(axes, name, "measured here" if place == "cpu" else "simulated H100")
            if column:
                axes.set_yticklabels([])
    figure.savefig(Path(__file__).with_name("ladder.png"), dpi=110)


def main() -> None:
    """Print the tables of the places that are asked for; of both by default."""
    asked = sys.argv[1:] or ["cpu", "h100"]
    found = {}
    for place in (place for place in PLACES if place in asked):
        found[place] = climb(place, rungs_of(place))
        print(f"\n{place}\n\n{table(found[place])}", flush=True)
        if place == "h100":  # here other work hides it
            print(f"\n{place}, tokens of a step\n\n{table(chunks(place, found[place]))}", flush=True)
    if set(found) == set(PLACES):
        draw(found)
    if "http" in asked:
        rows = over_http(RUNGS, int(asked[-1]) if asked[-1].isdigit() else REPEATS)
        print(f"\nhttp\n\n{table(rows) if rows else 'no run was valid'}", flush=True)


if __name__ == "__main__":
    main()
