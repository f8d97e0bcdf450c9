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
    from kvlab.lab.calibrate import Fit, RealRun
    from kvlab.lab.terminal import Terminal

# The functions import what they need, so that --help answers at once.


@dataclass
class CalibrateSettings:
    """What the command takes beside the runs."""

    output: str = setting("calibration.yaml", "the file that executor.timing_path takes", "FILE")


def find_runs(names: list[str]) -> list[Path]:
    """The directories of the runs that are named; a sweep is all of its runs. Raises ConfigError."""
    from kvlab.cli.roofline import find_run

    directories: list[Path] = []
    for name in names:
        points = [file.parent for file in sorted(Path(name).glob("*/summary.json"))]
        directories += points if points and not (Path(name) / "summary.json").is_file() else [find_run(name)]
    return list(dict.fromkeys(directories))


def read_real_run(directory: Path) -> RealRun:
    """A run with what its steps consist of. Raises ConfigError or RecordError for one that cannot be fitted to."""
    from kvlab.cli.compose import recorded_config
    from kvlab.lab.calibrate import RealRun
    from kvlab.lab.results.records import STEPS, read_run
    from kvlab.models.families import decoder_config
    from kvlab.simulation.calibration import Subject

    run = read_run(directory)
    facts = run.facts
    if "timing" in facts:
        raise ConfigError("run", directory, "was simulated; calibrate on runs that computed their steps")
    if not (directory / STEPS).is_file():
        raise ConfigError("run", directory, f"has no {STEPS}; name a run that was recorded to its end")
    if "bytes_per_weight" not in facts:
        raise ConfigError("run", directory, "did not log what its model takes; run it again")
    config = recorded_config(directory)
    model = decoder_config(config.model)
    subject = Subject(
        config.model.name,
        model.num_parameters,
        config.executor.dtype,
        float(facts["bytes_per_weight"]),
        int(facts["kv_bytes_per_token"]),
    )
    kernels = f"{facts['attention']}, {facts['kernels']}"
    return RealRun(str(directory), subject, model, facts["machine"], int(facts["threads"]), kernels, run.steps())


def show(fit: Fit, console: Terminal) -> None:
    """Print the coefficients and the errors."""
    from kvlab.lab.results.tables import new_table
    from kvlab.simulation.work import TERMS

    calibration = fit.calibration
    table = new_table("one", "takes, us", "95 % interval", "of the time")
    for term in TERMS:
        scale = 1e6 * term.per
        value, (low, high) = calibration.coefficients[term.name], fit.intervals[term.name]
        table.add_row(
            f"{term.per:,} {term.what}" if term.per > 1 else term.what,
            f"{value * scale:,.1f}",
            f"{low * scale:,.1f}-{high * scale:,.1f}",
            "not seen" if term.name in fit.unseen else f"{100 * fit.shares[term.name]:.1f} %",
        )
    table.add_row("wait for the next step", f"{calibration.between_s * 1e6:,.1f}", "", "")
    console.print(
        f"{calibration.subject} on {calibration.machine}, threads: {calibration.threads}; {fit.steps:,} steps\n"
    )
    console.print(table)
    for name, errors in (("where it was fitted", fit.residuals), (f"held out, {fit.parts}", fit.held_out)):
        console.print(
            f"{name}: a step is off by {100 * errors.median:.1f} % in the median, {100 * errors.p90:.1f} % at p90; "
            f"all together by {100 * errors.total:+.1f} %"
        )


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
    from kvlab.lab.calibrate import calibrate, check
    from kvlab.lab.files import write_text
    from kvlab.lab.terminal import Terminal

    console, runs = Terminal(), [read_real_run(directory) for directory in find_runs(names)]
    check(runs)
    fit = calibrate(runs, repeated_share=_repeated_share(runs, console))
    show(fit, console)
    write_text(Path(settings.output), fit.calibration.text())
    chosen = f"executor.timing=fitted executor.timing_path={settings.output}"
    console.print(f"written to {settings.output}: {chosen}", soft_wrap=True)
    return 0
