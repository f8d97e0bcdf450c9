"""The values of a config.json by key, each of the type that it has to have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """How a family reads its configuration: what it has where a key is left out (a key that is not there is null or
    false), and the options of DecoderConfig that it fixes.
    """

    defaults: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    is_scaled: bool = False  # embeddings by the root of their size, attention by `query_pre_attn_scalar`
    window_pattern: int | None = None  # of so many layers one sees all tokens; None: windows where asked for
    full_theta: float | None = None  # rotary angles are given for each kind of layer; of those that see all tokens


class Values:
    """Values by key, with the family's defaults behind them. Raises ConfigError for a value of another type."""

    def __init__(self, family: Family, values: Mapping[str, Any]) -> None:
        self.family = family
        self._values = {**family.defaults, **values}

    def __call__(self, key: str) -> Any:
        """As it is; None: left out."""
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """A number of something; `default`, where there is one, for null."""
        value = default if self(key) is None else self(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(key, value, f"has to be a whole number of at least {least}, and at most {most}")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value: float = self(key)
        if not is_positive(value):
            raise ConfigError(key, value, f"has to be {POSITIVE}")
        return value

    def optional_number(self, key: str) -> float | None:
        """A positive number, or null."""
        return None if self(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false; null and what is left out is false."""
        value = self(key)
        if not isinstance(value, bool | None):
            raise ConfigError(key, value, "has to be true or false")
        return bool(value)


POSITIVE = "a number above 0, from 1e-12 to 1e12"  # with which float32 computes neither infinity nor NaN


def is_positive(value: Any) -> bool:
    """Whether it is `POSITIVE`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 <= value <= 1e12
