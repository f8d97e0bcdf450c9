"""Which sequences run in a step."""

from kvlab.config import SchedulerConfig
from kvlab.engine.scheduler.base import POLICIES, Scheduler
from kvlab.engine.scheduler.new_token_ratio import RatioScheduler
from kvlab.engine.scheduler.static import StaticScheduler

__all__ = ["POLICIES", "Scheduler", "StaticScheduler", "build_scheduler"]


def build_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler of the configured policy."""
    if config.conservativeness is not None:
        return RatioScheduler(config)
    return POLICIES.get(config.policy)(config)
