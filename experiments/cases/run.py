"""Two cases of advice on public traces: runs their commands, and puts what they print and draw into docs/cases.

python -m experiments.cases.run mooncake [conversation_trace.jsonl]
python -m experiments.cases.run azure [AzureLLMInferenceTrace_conv.csv]

A command that was stopped goes on: simulations are kept below outputs/cases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.runs import configure
from kvlab.lab.figures import style
from kvlab.lab.figures.workload import workload_figure
from kvlab.lab.run.requests import requests_of
from kvlab.workloads.describe import unknown_prompts
from kvlab.workloads.prefixes import prefix_tree

PAGES = Path(__file__).parents[2] / "docs" / "cases"
OUTPUT = Path("outputs/cases")
WIDTH = "112"  # columns of what is printed


class Case(NamedTuple):
    """What is asked of a public file: the deployment, and what advice is asked for beside it."""

    file: str
    deployment: str
    lengths: str  # of sequences, as the traffic has them
    asked: str


CASES = {
    "mooncake": Case(
        "conversation_trace.jsonl",
        "workload=mooncake workload.path={file} model=llama3_1_8b hardware=h100_sxm",
        "lengths=7000,28000,86000",
        "devices=8 slo.ttft_ms=2000 slo.tpot_ms=50 price_per_hour=2.5",
    ),
    "azure": Case(
        "AzureLLMInferenceTrace_conv.csv",
        "workload=azure workload.path={file} model=llama3_1_8b hardware=l40s",
        "lengths=1400,3200,4600",
        "devices=4 fleet.replicas=2 slo.ttft_ms=1000 slo.tpot_ms=50 price_per_hour=1",
    ),
}


def printed(command: str, *words: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    arguments = [sys.executable, "-m", "kvlab.cli", command, *words]
    environment = {**os.environ, "COLUMNS": WIDTH}
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=True)
    return "\n".join(line.rstrip() for line in ended.stdout.strip().splitlines())


def put(page: str, name: str, text: str) -> str:
    """The page with another text between <!-- name --> and <!-- end -->."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}```text\n{text}\n```\n{found[2]}", page, flags=re.DOTALL)


def draw_traffic(words: list[str], path: Path) -> None:
    """Lengths, arrivals, and what prompts have in common."""
    config = configure(words)
    requests = requests_of(config)
    workload_figure(
        requests, prefix_tree(requests, config.kv.block_size), unknown_prompts(config.workload)
    ).savefig(path)


def draw_advice(advice: Mapping[str, Any], path: Path) -> None:
    """What is to be gained, what so many devices give, and what changes gain."""
    figure = style.new_figure(4.6)
    panels: dict[str, Any] = figure.subplot_mosaic([["room", "devices"], ["gains", "gains"]])
    room = advice["headroom"]
    if room["ceiling"]:
        found = {"today": room["now"], **room["rates"], "without a limit": room["ceiling"]}
        shares = [(name, 100 * share, f"{100 * share:.1f} %") for name, share in found.items()]
        _bars(panels["room"], "Prompt tokens found", shares)
    else:
        times = {"today": room["mean_s"], "alone on the devices": room["alone_s"]}
        _bars(panels["room"], "Mean time of a request", [(name, s, f"{s:.1f} s") for name, s in times.items()])
    rows = []
    for row in advice["frontier"]:
        text = f"{100 * row['within']:.1f} %, {row['per_million']:.2f} a million tokens"
        rows.append((f"{row['devices']}", 100 * row["within"], text))
    _bars(panels["devices"], "In time, by devices", rows)
    changes = [(each["settings"], each) for each in advice["proposals"]]
    plan, axes = advice["plan"], panels["gains"]
    if len(plan["settings"]) > 1:
        changes.append(("the plan", plan))
    for at, (_, each) in enumerate(changes):
        axes.plot((each["low"], each["high"]), (at, at), color=style.SKY, linewidth=6, solid_capstyle="butt")
        axes.plot(each["again"]["value"], at, "o", color=style.BLUE)
    axes.axvline(0, color=style.FAINT, linewidth=0.8)
    axes.set_yticks(range(len(changes)), [text for text, _ in changes])
    axes.set_ylim(len(changes) - 0.4, -0.6)
    style.tidy(axes, grid="x")
    style.title(axes, "Gains in points of requests in time, with their intervals")
    figure.savefig(path)


def _bars(axes: Any, name: str, rows: Sequence[tuple[str, float, str]]) -> None:
    """Labels, values, and what is written at a bar: within it where there is no room behind."""
    most = max(value for _, value, _ in rows)
    axes.barh(range(len(rows)), [value for _, value, _ in rows], color=style.SKY)
    for at, (_, value, text) in enumerate(rows):
        start = 0 if len(text) > 8 and value > most / 2 else value
        axes.annotate(text, (start, at), (4, -3), textcoords="offset points", fontsize=9, color=style.INK)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * most)
    style.tidy(axes, grid="x")
    style.title(axes, name)


def main() -> None:
    """Both commands of a case, its pictures, and its page."""
    name = sys.argv[1]
    case = CASES[name]
    words = case.deployment.format(file=sys.argv[2] if len(sys.argv) > 2 else case.file).split()
    page = PAGES / f"{name}.md"
    text = put(page.read_text(encoding="utf-8"), "capacity", printed("capacity", *words, case.lengths))
    draw_traffic(["executor=simulated", *words], PAGES / f"{name}_traffic.png")
    advice = printed("advise", *words, *case.asked.split(), "tracking=off", f"output={OUTPUT}")
    folder = Path(advice.rpartition("page: ")[2]).parent
    text = put(text, "advice", advice.rpartition("\npage: ")[0].replace(" tracking=off", ""))
    draw_advice(json.loads((folder / "advice.json").read_text(encoding="utf-8")), PAGES / f"{name}_advice.png")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
