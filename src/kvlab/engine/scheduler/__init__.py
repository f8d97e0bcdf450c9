"""Which sequences run in a step."""

from kvlab.config import SchedulerConfig
from kvlab.engine.scheduler.answers import check_answers
from kvlab.engine.scheduler.base import POLICIES, Scheduler
from kvlab.engine.scheduler.new_token_ratio import RatioScheduler
from kvlab.engine.scheduler.state_chunks import StateKeeping, StateScheduler
from kvlab.engine.scheduler.static import StaticScheduler
from kvlab.engine.scheduler.whole_blocks import WholeBlockScheduler

__all__ = ["POLICIES", "Scheduler", "StateKeeping", "StaticScheduler", "build_scheduler"]


def build_scheduler(
    config: SchedulerConfig, *, shares_prefixes: bool = True, keeping: StateKeeping | None = None
) -> Scheduler:
    """The scheduler of the configured policy. `shares_prefixes`: whether sequences find blocks of others;
    `keeping`: and states, where layers have those.
    """
    if config.conservativeness is not None:
        return RatioScheduler(config, shares_prefixes=shares_prefixes)
    if config.chunk_unit is not None:
        return WholeBlockScheduler(config, shares_prefixes=shares_prefixes)
    if keeping is not None and shares_prefixes and POLICIES.get(config.policy) is Scheduler:
        return StateScheduler(config, keeping)
    scheduler = POLICIES.get(config.policy)(config)
    if config.policy not in POLICIES.own_names():
        check_answers(scheduler, Scheduler, config)
    return scheduler
