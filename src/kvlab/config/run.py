"""A run of the laboratory: an engine, a workload, tracking."""

from dataclasses import dataclass, field

from kvlab.config.debug import DebugConfig
from kvlab.config.engine import EngineConfig
from kvlab.config.engine_choice import EngineChoiceConfig
from kvlab.config.fleet import FleetConfig
from kvlab.config.slo import SloConfig
from kvlab.config.tracking import TrackingConfig
from kvlab.config.values import at_least
from kvlab.config.workload import WorkloadConfig
from kvlab.errors import ConfigError

MOST_REPEATS = 10_000
MOST_CHARS = 250  # of a name


@dataclass
class RunConfig(EngineConfig):
    """One run: an engine, the requests that it serves, and where its results go."""

    engine: EngineChoiceConfig = field(default_factory=EngineChoiceConfig)  # which engine serves them
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)  # the requests
    fleet: FleetConfig = field(default_factory=FleetConfig)  # how many replicas of it, behind which router
    slo: SloConfig = field(default_factory=SloConfig)  # the limits that goodput counts by
    tracking: TrackingConfig = field(default_factory=TrackingConfig)  # where the run is recorded
    debug: DebugConfig = field(default_factory=DebugConfig)  # checks and injected faults
    plugins: list[str] = field(default_factory=list)  # modules to import first, which register implementations
    run_name: str | None = None  # name of the run; null: made of model, backend and workload
    tags: dict[str, str] = field(default_factory=dict)  # copied to the tracking store
    optimize: str | None = None  # the metric that a sweep or search optimizes, as throughput/output_tokens_per_s
    repeats: int = 1  # runs of each configuration, to see how much its figures vary
    repeat: int = 0  # which of the repeats this is, from 0; a sweep sets it
    resume: bool = False  # leave out runs that the tracking store has as finished
    dry_run: bool = False  # show and draw the workload alone: nothing is served or tracked
    verbose: bool = False  # print every setting before the run, and rows of zeros in its table
    figures: bool = True  # keep the events of each block, and draw the figures of the run

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slo.check_optimize(self.optimize)
        at_least("repeats", self.repeats, 1, MOST_REPEATS)
        at_least("repeat", self.repeat, 0, MOST_REPEATS)
        names = {"run_name": self.run_name, "model.name": self.model.name, "workload.name": self.workload.name}
        for key, text in (names | {"tracking.experiment": self.tracking.experiment}).items():
            if text is not None and len(text) > MOST_CHARS:
                raise ConfigError(key, text, f"is a name of more than {MOST_CHARS} characters")
        for name, value in self.tags.items():
            if not isinstance(value, str):
                raise ConfigError(f"tags.{name}", value, "must be text")
