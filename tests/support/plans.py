"""Runs composed from overrides as the commands do, and planned with nothing built."""

from __future__ import annotations

from functools import cache

from hydra import compose, initialize_config_dir

from kvlab.cli.compose import run_config
from kvlab.cli.mistakes import explained
from kvlab.cli.overrides import written_out
from kvlab.config import RunConfig
from kvlab.lab.capacity import CapacityPlan, plan_capacity
from kvlab.paths import CONF

GIB = 2**30
_FILES = {file.stem: file.read_text() for file in sorted(CONF.glob("model/*.yaml"))}
#: Mixtures of experts.
SPARSE_MODELS = [name for name, text in _FILES.items() if "experts" in text]
#: Others whose shapes are in their file.
MODELS = [name for name, text in _FILES.items() if "architecture:" in text and name not in SPARSE_MODELS]


def compose_run(*overrides: str) -> RunConfig:
    """What `kvlab.cli.compose.compose_run` gives, without what a run writes down of it: half of the time."""
    with explained(overrides), initialize_config_dir(str(CONF), version_base="1.3"):
        return run_config(compose("run", written_out(overrides), return_hydra_config=True))


@cache
def composed(*overrides: str) -> RunConfig:
    """For tests that change nothing in it: composing takes a twentieth of a second."""
    return compose_run(*overrides)


def planned(*overrides: str, memory: int | None = 16 * GIB, device: str = "cpu") -> CapacityPlan:
    return plan_capacity(composed(*overrides), device=device, memory=memory)
