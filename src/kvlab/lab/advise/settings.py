"""What is asked of advice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.config import WorkloadConfig
from kvlab.config.values import MOST, at_least
from kvlab.errors import ConfigError
from kvlab.lab.settings import key_of, setting
from kvlab.secrets import redacted_setting

FEWEST = 20  # requests that say anything
REFUSED = ("sweep", "resume", "repeat", "repeats", "optimize", "hydra.mode")  # keys that have no place in advice
_MOST_DEVICES = 1024
_SIMULATED = "executor=simulated"
_OWN_TRAFFIC = ("workload=recorded", "workload.path=mine.jsonl")


@dataclass
class AdviseSettings:
    """The settings of advice beside those of the run that it is about."""

    current: str | None = setting(None, "today's settings: a YAML file of settings of kvlab run", "FILE")
    devices: int | None = setting(None, "most devices that a plan may take; those of today unless given", "N")
    keep: list[str] = setting([], "settings that stay as they are, as kv.dtype,executor.weights", "KEYS")
    price_per_hour: float | None = setting(None, "of one device, in any currency", "PRICE")
    budget_per_hour: float | None = setting(None, "most that a plan may cost; needs price_per_hour", "PRICE")
    minutes: float = setting(5.0, "how much is simulated: what two cores do in so long; 5 unless given", "5")
    output: str = setting("outputs/advise", "where results go; outputs/advise unless given", "DIR")
    json: bool = setting(False, "all of it as JSON; or --json", "true")

    def __post_init__(self) -> None:
        at_least("devices", self.devices, 1, _MOST_DEVICES)
        at_least("minutes", self.minutes, 0.1, 24 * 60)
        for name in ("price_per_hour", "budget_per_hour"):
            at_least(name, getattr(self, name), 1e-6, MOST)
        if self.budget_per_hour is None:
            return
        if self.price_per_hour is None:
            raise ConfigError(
                "budget_per_hour", self.budget_per_hour, "needs the price of a device: price_per_hour="
            )
        if self.budget_per_hour < self.price_per_hour:
            text = f"buys no device at price_per_hour={self.price_per_hour:g}"
            raise ConfigError("budget_per_hour", self.budget_per_hour, text)

    @property
    def most_devices(self) -> int | None:
        """Devices that a plan may take; None: as many as today."""
        if self.budget_per_hour is None or self.price_per_hour is None:
            return self.devices
        bought = int(self.budget_per_hour / self.price_per_hour)
        return bought if self.devices is None else min(bought, self.devices)


def advice_line(words: Sequence[str], requests: int | None) -> str | None:
    """The command that asks what to change of a deployment that `words` of a command line give; with traffic of the
    user's own where they name none. `requests` are drawn; None: a file has them.

    None where advice is not for it: nothing is simulated, or too few requests.
    """
    given = {key_of(word): word for word in words}
    if "hardware" not in given or given.get("executor", _SIMULATED) != _SIMULATED:
        return None
    traffic: Sequence[str] = ()
    if not any(key.partition(".")[0] == "workload" for key in given):
        traffic = _OWN_TRAFFIC
    elif requests is not None and requests < FEWEST:
        return None
    left_out = {*REFUSED, "executor", "figures"}
    kept = [
        word for key, word in given.items() if key not in left_out and not key.startswith(("tracking", "hydra"))
    ]
    shown = " ".join(shlex.quote(redacted_setting(word)) for word in (*traffic, *kept))
    return f"what to change: kvlab advise {shown}"


def drawn_requests(workload: WorkloadConfig) -> int | None:
    """How many requests a workload draws; None: a file has them."""
    return workload.num_requests if workload.path is None else None
