"""Which sequences run in a step."""

from kvlab.config import SchedulerConfig
from kvlab.engine.scheduler.base import POLICIES, Scheduler, StaticScheduler

__all__ = ["POLICIES", "Scheduler", "StaticScheduler", "build_scheduler"]


def build_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler of the configured policy."""
    return POLICIES.get(config.policy)(config)
