"""Who runs in a step: one file per policy."""

from __future__ import annotations

from kvlab.config import SchedulerConfig
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.scheduler.continuous import ContinuousScheduler
from kvlab.engine.scheduler.static import StaticScheduler

POLICIES: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": ContinuousScheduler}


def build_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler of the configured policy."""
    return POLICIES[config.policy](config)
