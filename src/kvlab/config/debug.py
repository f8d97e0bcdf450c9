"""Costly checks and injected faults."""

from dataclasses import dataclass, field

from kvlab.config.values import MOST_SEED, at_least, one_of
from kvlab.errors import ConfigError

FAULTS = ("forward", "sampler", "sequence", "any")


@dataclass
class FaultsConfig:
    """Faults injected into the executor. `sequence` poisons a share of the requests: each fails every pass
    that it is in once it has produced some tokens. `any`: all three kinds.
    """

    kind: str = "any"  # what fails: forward (before a pass), sampler (behind it), sequence (poisoned requests), any
    rate: float = 0.0  # probability that a pass fails, or share of poisoned requests; 0 to 1
    seed: int = 0  # the same seed gives the same faults

    def __post_init__(self) -> None:
        one_of("debug.faults.kind", self.kind, FAULTS)
        at_least("debug.faults.seed", self.seed, 0, MOST_SEED)
        if not 0 <= self.rate <= 1:
            raise ConfigError("debug.faults.rate", self.rate, "must be in [0, 1]")


@dataclass
class DebugConfig:
    """Checks that cost time, and faults that show how the engine handles them."""

    audit: bool = False  # check every invariant of the pool after each step
    profile: bool = False  # time the parts of each step; a run takes longer
    faults: FaultsConfig = field(default_factory=FaultsConfig)  # faults to inject
