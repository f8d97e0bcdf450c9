"""The workload: the requests of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.config.checks import at_least, one_of, registered
from kvlab.errors import ConfigError

ARRIVALS = ("burst", "uniform", "poisson")
DISTRIBUTIONS = ("uniform", "lognormal")


@dataclass
class LengthConfig:
    """A length in tokens between two bounds, both included: uniform, or log-normal with its `median` and the
    `sigma` of its logarithm, cut off at the bounds.
    """

    min: int = 1
    max: int = 1
    distribution: str = "uniform"
    median: float | None = None
    sigma: float = 1.0


@dataclass
class WorkloadConfig:
    """The requests: how many, when, how long; or a file of them."""

    name: str = "???"
    source: str = "synthetic"
    num_requests: int = 16
    arrival: str = "burst"  # burst: all at once; uniform: evenly, `rate` per second; poisson: so on average
    rate: float | None = None
    prompt_len: LengthConfig = field(default_factory=LengthConfig)  # each request's own tokens
    output_len: LengthConfig = field(default_factory=LengthConfig)
    system_len: int = 0  # tokens that begin every prompt
    num_groups: int = 1  # groups of requests that share `group_len` more tokens; popularity is Zipf's
    group_len: int = 0
    zipf: float = 1.0  # group k of num_groups is drawn in proportion to 1 / k ** zipf
    turns: int = 1  # requests of a conversation, each behind what was said before; num_requests conversations
    think_s: float = 0.0  # between an answer and the conversation's next turn
    samples: int = 1  # outputs of each prompt
    priorities: int = 1  # each request's or conversation's priority is one of 0 to priorities - 1
    path: str | None = None  # source=jsonl
    ignore_eos: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        registered("workload.source", self.source)
        one_of("workload.arrival", self.arrival, ARRIVALS)
        at_least("workload.temperature", self.temperature, 0)
        if self.source == "jsonl":
            if self.path is None:
                raise ConfigError("workload.path", self.path, "workload=jsonl needs workload.path=<file>")
            return
        at_least("workload.num_requests", self.num_requests, 1)
        for name, length in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            at_least(f"workload.{name}.min", length.min, 1)
            if length.max < length.min:
                raise ConfigError(
                    f"workload.{name}.max", length.max, f"is less than workload.{name}.min={length.min}"
                )
            one_of(f"workload.{name}.distribution", length.distribution, DISTRIBUTIONS)
            at_least(f"workload.{name}.sigma", length.sigma, 0)
            if length.distribution == "lognormal" and not (length.median and length.median > 0):
                raise ConfigError(f"workload.{name}.median", length.median, "lognormal needs a median, in tokens")
        for name in ("system_len", "group_len", "zipf", "think_s"):
            at_least(f"workload.{name}", getattr(self, name), 0)
        for name in ("num_groups", "turns", "samples", "priorities"):
            at_least(f"workload.{name}", getattr(self, name), 1)
        if self.arrival != "burst" and not (self.rate and self.rate > 0):
            raise ConfigError(
                "workload.rate", self.rate, f"workload.arrival={self.arrival} needs requests per second"
            )
