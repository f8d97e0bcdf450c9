"""Who runs in a step: one file per policy."""

from __future__ import annotations

from kvlab.config import SchedulerConfig
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.continuous import ContinuousScheduler
from kvlab.engine.scheduler.static import StaticScheduler

POLICIES: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": ContinuousScheduler}


def build_scheduler(config: SchedulerConfig, block_size: int) -> Scheduler:
    """The scheduler of the configured policy. `block_size` is what prompts are rounded up to."""
    return POLICIES[config.policy](config, block_size)
