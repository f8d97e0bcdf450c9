"""The workload: the requests of a run."""

import re
from dataclasses import dataclass, field

from kvlab.config.values import MOST, MOST_SECONDS, all_at_least, at_least, one_of
from kvlab.core import MAX_SAMPLES, MAX_TEMPERATURE, MAX_WHOLE
from kvlab.errors import ConfigError
from kvlab.registry import registry

ARRIVALS = ("burst", "uniform", "poisson", "gamma", "trace")
TIMED_TRACES = ("azure", "burstgpt", "mooncake", "recorded", "timed_trace")
FILES = ("jsonl", "sharegpt_lengths", *TIMED_TRACES)  # sources that read workload.path
DISTRIBUTIONS = ("uniform", "lognormal")
#: Sources whose requests say how many tokens they ask for.
_ASK_THEMSELVES = {"jsonl": "the max_tokens of their lines", "chat": "workload.output_len.max tokens"}
_MOST_SIGMA = 20.0  # e to the power of 20: lengths up to half a thousand million times the median
_LEAST_SHARE = 1e-6
_LEAST_BURSTINESS = 1e-3  # one gap in a thousand is a thousand times the mean
_MOST_ZIPF = 100.0  # all requests in the first group


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
    source: str = "synthetic"  # synthetic: drawn from the settings below; others read the file at path
    num_requests: int = 16  # requests, or conversations where turns > 1
    arrival: str = "burst"  # burst: all at once; uniform, poisson or gamma: at rate; trace: as in the file at path
    rate: float | None = None  # requests per second: exactly (uniform), or on average (poisson, gamma)
    burstiness: float = 1.0  # arrival=gamma: shape of the gaps; 1: Poisson; less: bursts and lulls
    concurrency: int | None = None  # closed loop: most requests or conversations at once; the next when one ends
    prompt_len: LengthConfig = field(default_factory=LengthConfig)  # tokens of each request's own
    output_len: LengthConfig = field(default_factory=LengthConfig)  # tokens of each output
    system_len: int = 0  # tokens that begin every prompt
    num_groups: int = 1  # groups of requests that share group_len more tokens
    group_len: int = 0  # tokens that a group shares, behind the system prompt
    zipf: float = 1.0  # group k is drawn in proportion to 1 / k ** zipf
    salt_groups: bool = False  # each group is a tenant, with its number as salt: tenants share no memory
    pin_prefix: bool = False  # requests pin system_len and group_len; kv.pinned_share is room for them
    turns: int = 1  # requests of a conversation, each behind the tokens of those before
    think_s: float = 0.0  # seconds between an answer and the conversation's next request
    samples: int = 1  # outputs of each prompt
    priorities: int = 1  # priority levels; each request or conversation gets one of 0 to priorities - 1
    path: str | None = None  # the file of a source that reads one
    window: str | None = None  # of a trace: its first seconds (600), or from one second to another (600-1200)
    rate_scale: float = 1.0  # of a trace: how many times as often its requests arrive
    sample: float = 1.0  # of a trace: share of its requests, or of its conversations where it names them
    block_tokens: int = 512  # source=mooncake or timed_trace: tokens of the prompt that one of hash_ids stands for
    max_tokens: int | None = None  # tokens that requests ask for at most; null: as recorded, else what they produce
    ignore_eos: bool = True  # go on to output_len tokens past an end-of-sequence token
    temperature: float = 0.0  # of sampling; 0: greedy

    def __post_init__(self) -> None:
        registry("workload.source").check(self.source)
        one_of("workload.arrival", self.arrival, ARRIVALS)
        at_least("workload.temperature", self.temperature, 0, MAX_TEMPERATURE)
        if self.source in FILES and not self.path:
            raise ConfigError("workload.path", self.path, f"workload={self.source} needs workload.path=<file>")
        at_least("workload.max_tokens", self.max_tokens, 1, MAX_WHOLE)
        if self.max_tokens is not None and self.source in _ASK_THEMSELVES:
            text = f"workload.source={self.source}: requests ask for {_ASK_THEMSELVES[self.source]}; leave it null"
            raise ConfigError("workload.max_tokens", self.max_tokens, text)
        if self.source == "jsonl":
            return
        self._check_trace()
        at_least("workload.block_tokens", self.block_tokens, 1, MAX_WHOLE)
        at_least("workload.burstiness", self.burstiness, _LEAST_BURSTINESS, MOST)
        all_at_least("workload", self, ("concurrency", "num_requests", "num_groups", "turns"), 1)
        all_at_least("workload", self, ("system_len", "group_len"), 0)
        if self.pin_prefix and not self.system_len + self.group_len:
            text = "pins what prompts begin with; set workload.system_len or workload.group_len"
            raise ConfigError("workload.pin_prefix", self.pin_prefix, text)
        at_least("workload.samples", self.samples, 1, MAX_SAMPLES)
        at_least("workload.priorities", self.priorities, 1, MAX_WHOLE)
        at_least("workload.zipf", self.zipf, 0, _MOST_ZIPF)
        at_least("workload.think_s", self.think_s, 0, MOST_SECONDS)
        for name, length in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            check_length(f"workload.{name}", length)
        self._check_rate()

    @property
    def window_s(self) -> tuple[float, float]:
        """The window of a trace, in seconds from its first request on; the end does not belong to it."""
        match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)-)?(\d+(?:\.\d+)?)", self.window or str(MOST))
        if not match or float(match[1] or 0) >= float(match[2]):
            text = "write the first seconds of the trace, as 600, or from one second to another, as 600-1200"
            raise ConfigError("workload.window", self.window, text)
        return float(match[1] or 0), float(match[2])

    def _check_trace(self) -> None:
        self.window_s  # noqa: B018 - raises
        at_least("workload.rate_scale", self.rate_scale, _LEAST_SHARE)
        at_least("workload.sample", self.sample, _LEAST_SHARE, 1)
        for name, value, needs in (
            ("arrival", self.arrival, self.arrival == "trace"),
            ("window", self.window, self.window is not None),
            ("rate_scale", self.rate_scale, self.rate_scale != 1),
            ("sample", self.sample, self.sample != 1 and self.source != "sharegpt_lengths"),
        ):
            if needs and self.source not in TIMED_TRACES:
                text = f"needs a trace with times: workload={', '.join(TIMED_TRACES)}"
                raise ConfigError(f"workload.{name}", value, text)
        if self.rate_scale != 1 and self.arrival != "trace":
            text = f"scales workload.arrival=trace; with {self.arrival} set workload.rate"
            raise ConfigError("workload.rate_scale", self.rate_scale, text)

    def _check_rate(self) -> None:
        if self.arrival in ("burst", "trace"):
            return
        if not self.rate:
            text = f"workload.arrival={self.arrival} needs requests per second"
            raise ConfigError("workload.rate", self.rate, text)
        at_least("workload.rate", self.rate, 0)
        if self.num_requests > self.rate * MOST_SECONDS:
            least = f"{self.num_requests / MOST_SECONDS:.1g} requests per second, or fewer requests"
            text = f"the last of {self.num_requests} requests would arrive in more than a year; take"
            raise ConfigError("workload.rate", self.rate, f"{text} {least}")


def check_length(key: str, length: LengthConfig) -> None:
    """Raise ConfigError, naming `key`, for bounds or a distribution that are none."""
    at_least(f"{key}.min", length.min, 1)
    if length.max < length.min:
        raise ConfigError(f"{key}.max", length.max, f"is less than {key}.min={length.min}")
    at_least(f"{key}.max", length.max, 1, MAX_WHOLE)
    one_of(f"{key}.distribution", length.distribution, DISTRIBUTIONS)
    at_least(f"{key}.sigma", length.sigma, 0, _MOST_SIGMA)
    if length.distribution == "lognormal":
        if not length.median:
            raise ConfigError(f"{key}.median", length.median, "lognormal needs a median, in tokens")
        at_least(f"{key}.median", length.median, 1e-3)
