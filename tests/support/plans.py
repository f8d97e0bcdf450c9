"""Runs composed from overrides as the commands do, and planned with nothing built."""

from __future__ import annotations

from functools import cache

from kvlab.cli import compose
from kvlab.config import RunConfig
from kvlab.lab.capacity import CapacityPlan, plan_capacity
from kvlab.paths import CONF

GIB = 2**30
_FILES = {file.stem: file.read_text() for file in sorted(CONF.glob("model/*.yaml"))}
#: Models with linear attention in some layers.
LINEAR_MODELS = [name for name, text in _FILES.items() if "linear_num_key_heads" in text]
#: Models with Mamba-2 in some layers.
MAMBA_MODELS = [name for name, text in _FILES.items() if "mamba_num_heads" in text]
_STATES = LINEAR_MODELS + MAMBA_MODELS
#: Mixtures of experts without either.
SPARSE_MODELS = [name for name, text in _FILES.items() if "experts" in text and name not in _STATES]
#: Others whose shapes are in their file.
MODELS = [name for name, text in _FILES.items() if "architecture:" in text and name not in SPARSE_MODELS + _STATES]


def compose_run(*overrides: str) -> RunConfig:
    return compose.compose_run(overrides).config


@cache
def composed(*overrides: str) -> RunConfig:
    """For tests that change nothing in it: composing takes a twentieth of a second."""
    return compose_run(*overrides)


def planned(*overrides: str, memory: int | None = 16 * GIB, device: str = "cpu") -> CapacityPlan:
    return plan_capacity(composed(*overrides), device=device, memory=memory)
