"""kvlab roofline: what this machine's memory and arithmetic sustain, and how much of it a run reached.

kvlab roofline                         the rates, measured once for each machine and kept
kvlab roofline outputs/2026-01-01/12-00-00.000000
kvlab roofline <the run's id>          of a run whose files are in outputs/ or multirun/
kvlab roofline --measure-again                 for instance after others used the machine
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import bare_words, command, setting
from kvlab.config import RunConfig
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.results.records import RunRecord
    from kvlab.lab.results.roofline import MachineRates

# The functions import what they need, so that --help answers at once.


@dataclass
class RooflineSettings:
    """What the command takes."""

    run: list[str] = setting([], "finished runs: their directories or ids", "RUN")
    measure_again: bool = setting(False, "measure although the rates are known; or --measure-again", "true")


def read_run(directory: Path) -> tuple[RunRecord, RunConfig]:
    """A run and its settings. Raises ConfigError for one that has no roofline, RecordError for none."""
    from kvlab.cli.recorded import recorded_config
    from kvlab.lab.results import records

    run = records.read_run(directory)
    if "bytes_per_weight" not in run.facts:
        raise ConfigError("run", directory, "did not log what a roofline is computed from; run it again")
    if run.simulated:
        raise ConfigError("run", directory, "was simulated; name a run that computed its steps on a CPU")
    if run.facts["device"] != "cpu":
        raise ConfigError("run", directory, "was on a GPU, whose rates are not measured; run it with executor=cpu")
    if not run.steps():
        raise ConfigError("run", directory, "ended before its first step; name one that produced tokens")
    return run, recorded_config(directory)


def _show_run(directory: Path, *, again: bool) -> None:
    import torch

    from kvlab.lab.machine import describe
    from kvlab.lab.results.roofline import RunCosts, roofline
    from kvlab.models.families import decoder_config

    run, config = read_run(directory)
    facts = run.facts
    torch.set_num_threads(facts["threads"])
    rates = _rates(config.executor.products, again=again)
    if facts["machine"] != describe("cpu"):
        print(f"warning: the run was on {facts['machine']}, the rates are those of {describe('cpu')}")
    costs = RunCosts(decoder_config(config.model), facts["bytes_per_weight"], facts["kv_bytes_per_token"])
    steps = run.steps()
    bound = roofline(costs, steps, rates)
    kinds = {
        "steps with prompts": [step for step in steps if step.prefill_tokens],
        "decode steps": [step for step in steps if not step.prefill_tokens],
    }
    shares = {kind: roofline(costs, part, rates).share for kind, part in kinds.items()}
    print(
        f"{run.name}: its steps took {bound.steps_s:.2f} s and could take {bound.bound_s:.2f} s, "
        f"{bound.memory_s:.2f} s of it in steps that memory limits: {bound.share:.1f} % of the roofline; "
        + ", ".join(f"{kind} {share:.1f} %" for kind, share in shares.items() if share)
    )


def _rates(dtype: str, *, again: bool) -> MachineRates:
    """The rates for as many threads as PyTorch is set to. Those measured beside other work are not kept."""
    import torch

    from kvlab.lab.machine import CpuWatch, describe, oversubscription
    from kvlab.lab.machine_rates import known_rates, measure, measure_and_keep

    threads = torch.get_num_threads()
    rates = None if again else known_rates(dtype)
    if rates is None:
        crowded = oversubscription(threads, CpuWatch().busy_cores())
        if crowded:
            print(f"warning: not kept: {crowded}")
        rates = measure(dtype) if crowded else measure_and_keep(dtype)
    print(
        f"{describe('cpu')}, {threads} threads: reads {rates.read_bytes_per_s / 1e9:.1f} GB/s in order, multiplies "
        f"{rates.flops_per_s / 1e9:,.0f} GFLOP/s in {dtype} in registers, "
        f"{rates.product_flops_per_s / 1e9:,.0f} in products of matrices"
    )
    return rates


@command(__doc__, RooflineSettings, alone=True, written_out=bare_words("run"))
def main(settings: RooflineSettings) -> int:
    import torch

    from kvlab.cli.recorded import find_run
    from kvlab.engine.threads import resolve_threads
    from kvlab.lab.machine_rates import measurable

    torch.set_num_threads(resolve_threads(None))
    for dtype in () if settings.run else measurable():
        _rates(dtype, again=settings.measure_again)
    for run in settings.run:
        _show_run(find_run(run), again=settings.measure_again)
    return 0
