"""Slots and pages in the same bytes, simulated: three models on a card of 16 GB, and where ten times comes from.

python -m experiments.reference_comparison.run     prints the tables, draws claim.png here; a minute
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from experiments.runs import configure, measure
from kvlab.errors import KvlabError
from kvlab.lab.figures import style

HERE = Path(__file__).parent
OUTPUT, PEAK = "throughput/output_tokens_per_s", "capacity/peak_running"
REPORTED = {"qwen3_4b": 1.32, "llama3_2_3b": 1.17, "gemma3_1b": 1.12}
#: The host's cost, an assumption: there is no measured deployment on such a card to fit it to.
HOST = ("framework.step_us=200", "framework.sequence_us=3", "framework.token_us=0")
SETTING: tuple[str, ...] = (
    "executor=simulated",
    *HOST,
    "hardware=rtx_4060ti_16g",
    "workload=burst48",
    "model.max_seq_len=4096",
)
SETTING += ("kv.num_blocks=2048", "scheduler.max_batch_size=48")

USED = 448  # tokens of each request of the claim: 256 and 192
RESERVED = (1, 2, 4, 8, 16, 32, 64)  # times that
CLAIM: tuple[str, ...] = (
    "executor=simulated",
    *HOST,
    "workload=burst48",
    "workload.num_requests=128",
    "scheduler.max_batch_size=128",
)
CLAIM += ("workload.prompt_len={min: 256, max: 256}", "workload.output_len={min: 192, max: 192}")
CLAIM += ("scheduler.max_batched_tokens=2048",)


class Line(NamedTuple):
    """A model on a card, with as much memory for its cache as is left; or a share of it."""

    label: str
    settings: tuple[str, ...]
    baseline: tuple[str, ...] = ()  # settings of the slots alone


LINES = (
    Line("Qwen3 8B on an H100", ("model=qwen3_8b", "hardware=h100_sxm")),
    Line("Qwen3 8B on an H100, 4 GiB of cache", ("model=qwen3_8b", "hardware=h100_sxm", "kv.memory=4GiB")),
    Line("Qwen3 32B on an H100", ("model=qwen3_32b", "hardware=h100_sxm")),
    Line("Qwen3 0.6B on an RTX 4060 Ti", ("model=qwen3_0_6b", "hardware=rtx_4060ti_16g")),
    Line(
        "Qwen3 8B on an H100, slots in static batches, outputs vary",
        ("model=qwen3_8b", "hardware=h100_sxm", "workload.output_len={min: 16, max: 368}"),
        ("scheduler=static", "scheduler.max_batched_tokens=32768"),  # a static batch is formed in one step
    ),
)


def simulated(*settings: str) -> dict[str, float]:
    """The metrics of a simulated run."""
    _, _, metrics = measure(configure(list(settings)))
    return metrics


def factor(model: str, sequence_us: float) -> float:
    """What pages gain in the reference's setting, where each sequence of a step costs the host so long."""
    cost = f"framework.sequence_us={sequence_us}"
    slots, pages = (simulated(*SETTING, f"model={model}", f"kv={kv}", cost) for kv in ("contiguous", "paged"))
    return pages[OUTPUT] / slots[OUTPUT]


def cost_that_explains(model: str, reported: float) -> float:
    """Microseconds of each sequence in a step with which pages would gain what was reported."""
    low, high = 0.0, 100_000.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if factor(model, middle) > reported else (low, middle)
    return (low + high) / 2


def reference() -> None:
    """The three models in the reference's setting."""
    print(
        "| model | peak, slots and pages | output tok/s | factor | reported | ms per sequence that would give it |"
    )
    print("|---|---|---|---|---|---|")
    for model, reported in REPORTED.items():
        slots, pages = (simulated(*SETTING, f"model={model}", f"kv={kv}") for kv in ("contiguous", "paged"))
        cost = cost_that_explains(model, reported) / 1000
        print(
            f"| {model} | {slots[PEAK]:.0f}, {pages[PEAK]:.0f} | {slots[OUTPUT]:,.0f}, {pages[OUTPUT]:,.0f} "
            f"| {pages[OUTPUT] / slots[OUTPUT]:.2f} | {reported:.2f} | {cost:.1f} |",
            flush=True,
        )


def claim(line: Line) -> Iterator[tuple[int, float, float]]:
    """For each reservation that holds a request: times that is used, slots that run at once, and what pages of the
    same bytes gain in tokens per second.
    """
    longest = min(RESERVED[-1] * USED, 40_960)
    run = partial(simulated, *CLAIM, *line.settings)
    pages = run("kv=paged_unshared", f"model.max_seq_len={longest}")[OUTPUT]
    for times in RESERVED:
        with suppress(KvlabError):  # a slot that is too short for a request, or too large for the card
            slots = run("kv=contiguous", f"model.max_seq_len={times * USED}", *line.baseline)
            yield times, slots[PEAK], pages / slots[OUTPUT]


def draw(found: dict[str, list[tuple[int, float, float]]]) -> None:
    """Gain over reservation, a line for each model and card."""
    figure, axes = style.new_axes(4.6, "tokens reserved for a sequence / tokens used", "tokens per second, times")
    for (label, rows), colour in zip(found.items(), style.LINES, strict=False):
        reserved, gains = [row[0] for row in rows], [row[2] for row in rows]
        axes.plot(reserved, gains, "o-", color=colour, label=label, linewidth=1.6)
    axes.axhline(10, color=style.FAINT, linestyle=(0, (4, 2)), linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    style.plain(axes.xaxis)
    style.logarithmic(axes.yaxis, 1, 100)
    note = "pages against slots in the same bytes; 128 requests of 448 tokens; simulated"
    style.title(axes, "Ten times by paging: where it holds", note)
    style.legend(axes, below=-0.15, columns=2)
    figure.savefig(HERE / "claim.png")


def main() -> None:
    """Both parts."""
    reference()
    print("\n| reserved / used | " + " | ".join(line.label for line in LINES) + " |")
    print("|---|" + "---|" * len(LINES))
    found: dict[str, list[tuple[int, float, float]]] = {}
    for line in LINES:
        found[line.label] = list(claim(line))
    for times in RESERVED:
        cells = [next((row for row in rows if row[0] == times), None) for rows in found.values()]
        texts = [f"{cell[2]:.1f} ({cell[1]:.0f})" if cell else "-" for cell in cells]
        print(f"| {times} | " + " | ".join(texts) + " |")
    draw(found)


if __name__ == "__main__":
    main()
