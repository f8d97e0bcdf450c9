"""Two sweeps of `kv` side by side, one computed and one simulated: tokens per second, and sequences at once.

python -m experiments.contiguous_vs_paged.picture COMPUTED SIMULATED [PICTURE]

The first two are folders of sweeps, as `make run` leaves them; the picture is docs/img/contiguous_vs_paged.png,
unless it is named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvlab.config import format_bytes
from kvlab.lab.figures import style
from kvlab.lab.results.records import SIMULATED, RunRecord, read_run

PICTURE = Path(__file__).parents[2] / "docs/img/contiguous_vs_paged.png"
KINDS = {"contiguous": "slots", "paged_unshared": "pages", "paged": "shared pages"}
COLOURS = {"contiguous": style.ORANGE, "paged_unshared": style.SKY, "paged": style.BLUE}


def main() -> None:
    """Draw what the folders hold."""
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    figure = style.new_figure(2.9)
    panels: Any = figure.subfigures(1, 2)
    for panel, folder in zip(panels, sys.argv[1:3], strict=True):
        draw(panel, [read_run(each) for each in sorted(Path(folder).iterdir()) if each.name.isdigit()])
    file = Path(sys.argv[3]) if len(sys.argv) == 4 else PICTURE
    figure.savefig(file)
    print(f"figure: {file}")


def draw(panel: Any, runs: list[RunRecord]) -> None:
    """A bar for each run, with its factor to the first."""
    axes = panel.subplots()
    kinds = [run.choices["kv"] for run in runs]
    rates = [run.metrics["throughput/output_tokens_per_s"] for run in runs]
    peaks = [run.metrics["capacity/peak_running"] for run in runs]
    axes.barh(range(len(runs)), rates, color=[COLOURS[kind] for kind in kinds], height=0.66)
    for row, rate in enumerate(rates):
        factor = f", {rate / rates[0]:.1f} times" if row else ""
        text = axes.text(rate, row, f"  {rate:,.0f}{factor}", va="center", fontsize=9, color=style.INK)
        text.set_in_layout(False)
    labels = [f"{KINDS[kind]}\n{peak:.0f} at once" for kind, peak in zip(kinds, peaks, strict=True)]
    axes.set_yticks(range(len(runs)), labels)
    axes.set(ylim=(len(runs) - 0.5, -0.5), xlim=(0, 1.62 * max(rates)), xlabel="output tokens per second")
    style.tidy(axes, grid="x")
    style.plain(axes.xaxis)
    first = runs[0]
    how, size = "Simulated" if first.simulated else "Computed", format_bytes(first.metrics["capacity/kv_bytes"])
    machine = first.facts["machine"].removeprefix(SIMULATED)
    heading = f"{how}: {first.config['model.name']}, {size} of KV cache"
    panel.suptitle(heading, x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=style.INK)
    axes.set_title(style.shorten(machine, 56), x=-0.3, ha="left", fontsize=9, color="#555555")


if __name__ == "__main__":
    main()
