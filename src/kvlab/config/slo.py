"""Service levels: how fast a request has to be."""

from dataclasses import dataclass

from kvlab.config.values import MOST_SECONDS, at_least
from kvlab.errors import ConfigError


@dataclass
class SloConfig:
    """The limits on a request's latencies. A limit that is null does not count; without any, a run has no service
    levels among its metrics.
    """

    ttft_ms: float | None = None  # most milliseconds from a request's arrival to its first token; null: no limit
    tpot_ms: float | None = None  # most milliseconds per output token after the first; null: no limit

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            at_least(f"slo.{name}_ms", limit, 0.001, 1000 * MOST_SECONDS)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, in milliseconds, by the name of the latency: ttft, tpot."""
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def check_optimize(self, metric: str | None) -> None:
        """Raise ConfigError where `metric` is a service level whose limit is not set."""
        if metric is None or not metric.startswith("slo/"):
            return
        own = metric.removeprefix("slo/").removesuffix("_attainment")
        if own in ("ttft", "tpot") and own not in self.limits:
            raise ConfigError("optimize", metric, f"needs a limit; set slo.{own}_ms, in milliseconds")
        if not self.limits:
            text = "needs a limit; set slo.ttft_ms, slo.tpot_ms or both, in milliseconds"
            raise ConfigError("optimize", metric, text)
