"""kvlab roofline: what this machine's memory and arithmetic sustain, and how much of it a run reached.

kvlab roofline                         the rates, measured once for each machine and kept
kvlab roofline run=outputs/2026-01-01/12-00-00.000000
kvlab roofline run=<the run's id>      of a run whose files are in outputs/ or multirun/
kvlab roofline --measure-again                 for instance after others used the machine
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvlab.cli.compose import run_config
from kvlab.cli.settings import read_settings, run_command, setting, unknown_setting
from kvlab.config import RunConfig
from kvlab.config.executor import DTYPES
from kvlab.core import StepRecord
from kvlab.engine.threads import resolve_threads
from kvlab.errors import ConfigError
from kvlab.lab import records
from kvlab.lab.machine import CpuWatch, describe, oversubscription
from kvlab.lab.rates import known_rates, measure, measure_and_keep
from kvlab.lab.roofline import MachineRates, Roofline, RunCosts, roofline
from kvlab.models.families import decoder_config


def find_run(name: str, root: Path = Path()) -> Path:
    """The output directory that `name` is, or that of the run with this id. Raises ConfigError."""
    if (Path(name) / "summary.json").is_file():
        return Path(name)
    for file in (file for folder in ("outputs", "multirun") for file in (root / folder).rglob("summary.json")):
        if json.loads(file.read_text()).get("run_id") == name:
            return file.parent
    raise ConfigError(
        "run", name, "is no output directory with a summary.json, nor the id of a run in outputs/ or multirun/"
    )


def read_run(directory: Path) -> tuple[dict[str, Any], RunConfig, list[StepRecord]]:
    """A run's summary, settings and steps. Raises ConfigError for one that has no roofline."""
    summary = json.loads((directory / "summary.json").read_text())
    if "bytes_per_weight" not in summary:
        raise ConfigError("run", directory, "did not log what a roofline is computed from; run it again")
    if summary["device"] != "cpu":
        raise ConfigError("run", directory, "was on a GPU, whose rates are not measured; run it with executor=cpu")
    steps = records.read_run(directory).steps()
    if not steps:
        raise ConfigError("run", directory, "ended before its first step; name one that produced tokens")
    settings = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(directory / "config.yaml"))
    return summary, run_config(cast(DictConfig, settings)), steps


def logged_costs(summary: dict[str, Any], config: RunConfig) -> RunCosts:
    """What the steps of a finished run consist of."""
    return RunCosts(decoder_config(config.model), summary["bytes_per_weight"], summary["kv_bytes_per_token"])


def _show_run(console: Console, directory: Path, *, again: bool) -> None:
    summary, config, steps = read_run(directory)
    torch.set_num_threads(summary["threads"])
    rates = _rates(console, config.executor.dtype, again=again)
    if summary["machine"] != describe("cpu"):
        console.print(
            f"[yellow]warning:[/] the run was on {summary['machine']}, the rates are those of {describe('cpu')}",
            highlight=False,
        )
    _show(console, summary["name"], roofline(logged_costs(summary, config), steps, rates))


def _show(console: Console, name: str, found: Roofline) -> None:
    console.print(
        f"{name}: its steps took {found.steps_s:.2f} s and could take {found.bound_s:.2f} s, "
        f"{found.memory_s:.2f} s of it in steps that memory limits: [bold]{found.share:.1f} %[/] of the roofline",
        highlight=False,
        soft_wrap=True,
    )


def _rates(console: Console, dtype: str, *, again: bool) -> MachineRates:
    """The rates for as many threads as PyTorch is set to. Measured beside others they are shown, and not kept."""
    rates = None if again else known_rates(dtype)
    if rates is None:
        crowded = oversubscription(torch.get_num_threads(), CpuWatch().busy_cores())
        if crowded:
            console.print(f"[yellow]warning:[/] not kept: {crowded}", highlight=False, soft_wrap=True)
        rates = measure(dtype) if crowded else measure_and_keep(dtype)
    console.print(
        f"{describe('cpu')}, {torch.get_num_threads()} threads: reads {rates.read_bytes_per_s / 1e9:.1f} GB/s in "
        f"order, multiplies {rates.flops_per_s / 1e9:,.0f} GFLOP/s in {dtype}",
        highlight=False,
        soft_wrap=True,
    )
    return rates


@dataclass
class RooflineSettings:
    """What the command takes."""

    run: list[str] = setting([], "finished runs: their directories or ids", "RUN")
    measure_again: bool = setting(False, "measure although the rates are known; or --measure-again", "true")


def _answer(arguments: list[str]) -> int:
    settings, others = read_settings(RooflineSettings, arguments)
    if others:
        raise unknown_setting(RooflineSettings, others[0])
    console = Console()
    torch.set_num_threads(resolve_threads(None))
    if not settings.run:
        for dtype in DTYPES[:2]:
            _rates(console, dtype, again=settings.measure_again)
    for run in settings.run:
        _show_run(console, find_run(run), again=settings.measure_again)
    return 0


def main() -> None:
    """Run the command line."""
    run_command(__doc__, RooflineSettings, _answer)


if __name__ == "__main__":
    main()
