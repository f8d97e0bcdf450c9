"""Runs composed from overrides as the commands do, and planned with nothing built."""

from __future__ import annotations

from functools import cache

from kvlab.cli import compose
from kvlab.config import RunConfig
from kvlab.lab.capacity import CapacityPlan, plan_capacity
from kvlab.paths import CONF

GIB = 2**30
#: Those whose shapes are in their file.
MODELS = sorted(file.stem for file in CONF.glob("model/*.yaml") if "architecture:" in file.read_text())


def compose_run(*overrides: str) -> RunConfig:
    return compose.compose_run(overrides).config


@cache
def composed(*overrides: str) -> RunConfig:
    """For tests that change nothing in it: composing takes a tenth of a second."""
    return compose_run(*overrides)


def planned(*overrides: str, memory: int | None = 16 * GIB, device: str = "cpu") -> CapacityPlan:
    return plan_capacity(composed(*overrides), device=device, memory=memory)
