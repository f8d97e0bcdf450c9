"""What is asked of advice."""

from dataclasses import dataclass

from kvlab.config.values import MOST, at_least
from kvlab.errors import ConfigError
from kvlab.lab.settings import setting

_MOST_DEVICES = 1024


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
