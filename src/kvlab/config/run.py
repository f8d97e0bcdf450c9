"""A run of the laboratory: an engine, a workload, tracking."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.config.checks import at_least
from kvlab.config.debug import DebugConfig
from kvlab.config.engine import EngineConfig
from kvlab.config.tracking import TrackingConfig
from kvlab.config.workload import WorkloadConfig


@dataclass
class RunConfig(EngineConfig):
    """One run: an engine, the requests it serves, and where results go. `tags` are copied to the tracking store;
    `optimize` names the metric that a sweep optimizes.
    """

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    plugins: list[str] = field(default_factory=list)  # modules that register implementations
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    optimize: str | None = None
    repeats: int = 1  # runs of each configuration, to see how much its figures vary
    repeat: int = 0  # which of them this is; a sweep sets it
    resume: bool = False  # leave out what the tracking store has finished already
    figures: bool = True  # keep what happens to each block, and draw the run's figures when it is over

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("repeats", self.repeats, 1)
        at_least("repeat", self.repeat, 0)
