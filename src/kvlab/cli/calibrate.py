"""kvlab calibrate: fit the time of a step to recorded runs, for executor.timing=fitted.

kvlab calibrate outputs/2026-01-01/12-00-00.000000
kvlab calibrate multirun/2026-01-01/12-00-00.000000 output=here.yaml

A run is its directory, a sweep's directory, or a run's id. All have to be of one model on one machine. Prints what
each part of a step takes, with 95 % intervals, and how far predicted steps are off, also in runs that were left out
of the fit; writes it all to a file. Then simulate with it:

kvlab run executor=simulated hardware=here executor.timing=fitted executor.timing_path=calibration.yaml
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import command, refuse_settings, setting
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.calibrate import RealRun
    from kvlab.lab.terminal import Terminal

# The functions import what they need, so that --help answers at once.


@dataclass
class CalibrateSettings:
    """What the command takes beside the runs."""

    output: str = setting("calibration.yaml", "the file that executor.timing_path takes", "FILE")


def _repeated_share(runs: list[RealRun], console: Terminal) -> float:
    """That of `kvlab.lab.machine_rates`, where no run has sequences that share blocks and this is their machine."""
    import torch

    from kvlab.lab.machine import CpuWatch, describe, oversubscription
    from kvlab.lab.machine_rates import repeated_share
    from kvlab.lab.terminal import print_note
    from kvlab.simulation.work import Work

    first = runs[0]
    if any(Work.of(step).repeated for run in runs for step in run.steps if step.batch_seqs):
        return 1.0
    said = "no run has sequences that share blocks: a token that another sequence has read takes"
    model = first.model
    if first.machine != describe("cpu") or not first.kernels.startswith("cpu, native"):
        console.print(f"{said} as long as any other")
        return 1.0
    torch.set_num_threads(first.threads)
    if crowded := oversubscription(first.threads, CpuWatch().busy_cores()):
        print_note(console, crowded)
    share = repeated_share(model.num_heads, model.num_kv_heads, model.head_dim, first.subject.dtype)
    console.print(f"{said} {100 * share:.0f} % of the time of others, as measured just now")
    return share


@command(__doc__, CalibrateSettings, bare=False)
def main(settings: CalibrateSettings, names: list[str]) -> int:
    refuse_settings(CalibrateSettings, names)
    if not names:
        raise ConfigError("runs", None, "name directories of recorded runs: kvlab calibrate outputs/a outputs/b")
    from kvlab.cli.recorded import find_runs, read_real_run
    from kvlab.lab.calibrate import calibrate, check, show_fit
    from kvlab.lab.files import write_text
    from kvlab.lab.terminal import Terminal

    console, runs = Terminal(), [read_real_run(directory) for directory in find_runs(names)]
    check(runs)
    fit = calibrate(runs, repeated_share=_repeated_share(runs, console))
    show_fit(fit, console)
    write_text(Path(settings.output), fit.calibration.text())
    chosen = f"executor.timing=fitted executor.timing_path={settings.output}"
    console.print(f"written to {settings.output}: {chosen}", soft_wrap=True)
    return 0
