"""What is asked of a search."""

import dataclasses
from dataclasses import dataclass

from kvlab.config import parse_bytes
from kvlab.config.values import one_of
from kvlab.errors import ConfigError
from kvlab.lab.settings import setting

FOUND = ("rate", "replicas", "split")


@dataclass
class TuneSettings:
    """The settings of a search beside those of its runs."""

    optimize: str = setting(
        "",
        "any metric of docs/metrics.md that is better when it is more, or less; with slo.* goodput unless given",
        "METRIC",
    )
    memory: str | None = setting(
        None, "for weights, cache and working memory; else what this machine has free", "SIZE"
    )
    trials: int = setting(20, "configurations to measure, those of earlier searches included; 20 unless given", "N")
    storage: str | None = setting(
        None, "Optuna's database; an SQLite file in the output folder unless given", "URL"
    )
    output: str = setting("outputs/tune", "where results go; outputs/tune unless given", "DIR")
    find: str | None = setting(
        None,
        "rate, replicas: the most, the least that keeps attainment=; split: the fleet.prefill of most goodput",
        "WHAT",
    )
    attainment: float = setting(99.0, "percent of requests within slo.ttft_ms, slo.tpot_ms; 99 unless given", "99")
    rates: str | None = setting(
        None, "lowest and highest rate to try; a 32nd and 32 times the workload's unless given", "LOW-HIGH"
    )
    precision: float = setting(5.0, "percent between the rate found and one that fails; 5 unless given", "5")

    def __post_init__(self) -> None:
        from kvlab.lab.results.catalogue import direction

        if self.memory is not None:
            parse_bytes(self.memory, key="memory")
        if self.trials < 1:
            raise ConfigError("trials", self.trials, "must be a whole number, at least 1")
        if self.find is None:
            self._refuse(("attainment",), "is for find=rate, replicas and split; none is given")
        else:
            one_of("find", self.find, FOUND)
            text = f"has no place beside find={self.find}; leave it out"
            self._refuse(("optimize", "memory", "trials", "storage"), text)
        if self.find != "rate":
            self._refuse(("rates", "precision"), "is for find=rate, which is not given")
        if not 0 < self.attainment <= 100:
            raise ConfigError("attainment", f"{self.attainment:g}", "must be more than 0, and at most 100 percent")
        if not 0.5 <= self.precision <= 100:
            raise ConfigError("precision", f"{self.precision:g}", "must be from 0.5 to 100 percent")
        if self.optimize and direction(self.optimize).more_is_better is None:
            examples = "throughput/output_tokens_per_s, latency/ttft_ms_p99, latency/e2el_ms_p50"
            text = "no such metric, or neither more nor less of it is better; there are"
            raise ConfigError("optimize", self.optimize, f"{text} {examples} and others in docs/metrics.md")

    def _refuse(self, names: tuple[str, ...], text: str) -> None:
        """Raise ConfigError for a setting that does not have its default."""
        for field in dataclasses.fields(self):
            if field.name in names and (value := getattr(self, field.name)) != field.default:
                raise ConfigError(field.name, value, text)
