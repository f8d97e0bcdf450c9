"""The workload: the requests of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.config.values import at_least, one_of
from kvlab.errors import ConfigError
from kvlab.registry import registry

ARRIVALS = ("burst", "uniform", "poisson")
DISTRIBUTIONS = ("uniform", "lognormal")


@dataclass
class LengthConfig:
    """A length in tokens between two bounds, both included."""

    min: int = 1  # shortest, in tokens
    max: int = 1  # longest, in tokens
    distribution: str = "uniform"  # uniform, or lognormal cut off at min and max
    median: float | None = None  # lognormal: median in tokens
    sigma: float = 1.0  # lognormal: deviation of the logarithm


@dataclass
class WorkloadConfig:
    """The requests: how many, when, how long; or a file of them."""

    name: str = "???"  # what the workload is called in tables and runs
    source: str = "synthetic"  # synthetic: drawn from the settings below; jsonl: the file at path
    num_requests: int = 16  # requests, or conversations where turns > 1
    arrival: str = "burst"  # burst: all at once; uniform: one every 1 / rate seconds; poisson: as many on average
    rate: float | None = None  # requests per second; for uniform and poisson arrivals
    prompt_len: LengthConfig = field(default_factory=LengthConfig)  # tokens of each request's own
    output_len: LengthConfig = field(default_factory=LengthConfig)  # tokens of each output
    system_len: int = 0  # tokens that begin every prompt
    num_groups: int = 1  # groups of requests that share group_len more tokens
    group_len: int = 0  # tokens that a group shares, behind the system prompt
    zipf: float = 1.0  # group k is drawn in proportion to 1 / k ** zipf
    turns: int = 1  # requests of a conversation, each behind the tokens of those before
    think_s: float = 0.0  # seconds between an answer and the conversation's next request
    samples: int = 1  # outputs of each prompt
    priorities: int = 1  # priority levels; each request or conversation gets one of 0 to priorities - 1
    path: str | None = None  # source=jsonl: the file
    ignore_eos: bool = True  # go on to output_len tokens past an end-of-sequence token
    temperature: float = 0.0  # of sampling; 0: greedy

    def __post_init__(self) -> None:
        registry("workload.source").check(self.source)
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
                text = f"is less than workload.{name}.min={length.min}"
                raise ConfigError(f"workload.{name}.max", length.max, text)
            one_of(f"workload.{name}.distribution", length.distribution, DISTRIBUTIONS)
            at_least(f"workload.{name}.sigma", length.sigma, 0)
            if length.distribution == "lognormal" and not (length.median and length.median > 0):
                raise ConfigError(f"workload.{name}.median", length.median, "lognormal needs a median, in tokens")
        for name in ("system_len", "group_len", "zipf", "think_s"):
            at_least(f"workload.{name}", getattr(self, name), 0)
        for name in ("num_groups", "turns", "samples", "priorities"):
            at_least(f"workload.{name}", getattr(self, name), 1)
        if self.arrival != "burst" and not (self.rate and self.rate > 0):
            text = f"workload.arrival={self.arrival} needs requests per second"
            raise ConfigError("workload.rate", self.rate, text)
