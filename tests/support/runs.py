"""Real runs small enough to make many of: composed by Hydra, executed in this process, tracked nowhere."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

from omegaconf import OmegaConf

from kvlab.cli.compose import compose_run
from kvlab.config import RunConfig
from kvlab.lab.run.execute import RunContext, RunResult, execute
from kvlab.lab.settings import Composition
from kvlab.lab.terminal import Terminal

#: What makes any workload a few steps long. It comes last, and leaves alone what a sweep varies.
FEW_STEPS = (
    "model=qwen3_tiny",
    "model.max_seq_len=512",
    "executor=cpu",
    "executor.threads=1",
    "workload.num_requests=2",
    "workload.rate=1000",
    "workload.think_s=0",
    "workload.prompt_len={min: 4, max: 8}",
    "workload.output_len={min: 2, max: 4}",
    "tracking=off",
    "figures=false",
)


def alone() -> AbstractContextManager[object]:
    """As on a machine without other processes, which a run looks at for a fifth of a second."""
    return patch("kvlab.lab.run.execute.CpuWatch.busy_cores", lambda watch, least_s=0.0: 0.0)


def context_of(config: RunConfig, directory: Path, console: Terminal) -> RunContext:
    """That of a run of which nothing is said but its configuration."""
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    return RunContext(Composition(config, {}, lambda: written, dict), directory, console, "a run")


def run_small(directory: Path, *overrides: str) -> RunResult:
    """Execute the run that these overrides describe, but for those of FEW_STEPS whose keys they do not set."""
    mine = {text.partition("=")[0].lstrip("+") for text in overrides}
    few = [text for text in FEW_STEPS if text.partition("=")[0] not in mine]
    composed = compose_run([*few, *overrides])
    with alone():
        return execute(RunContext(composed, directory, Terminal(file=io.StringIO()), "small"))
