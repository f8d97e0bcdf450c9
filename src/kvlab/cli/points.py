"""The points of a sweep: every combination of what is swept, composed before any of it runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from kvlab.cli.compose import run_config, run_title
from kvlab.config import RunConfig
from kvlab.errors import ConfigError, KvlabError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class Composed:
    """A point as Hydra composes it. `config` is None where it contradicts itself: its run will say why."""

    overrides: list[str]
    name: str
    group: str  # its name without the repeat
    settings: dict[str, str]  # of the keys that are swept
    repeat: int
    config: RunConfig | None
    digest: str


def bare_key(key: str) -> str:
    """An override's key without what adds it (`+`, `++`)."""
    return key.lstrip("+")


def combinations(
    loader: ConfigLoader, texts: list[str], repeats: int
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What each key is set to, the slowest to change first, and how the swept ones were written.

    Repeats are the slowest of all, so that those of two points take turns in time. Raises ConfigError for what
    cannot be swept.
    """
    given = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    values: dict[str, list[str]] = {}
    varied: dict[str, str] = {}
    if repeats > 1:
        values[_REPEAT] = [f"{_REPEAT}={index}" for index in range(repeats)]
    for override in given:
        key = override.get_key_element()
        if key == _REPEAT and repeats > 1:
            raise ConfigError("repeat", _written(override), f"repeats={repeats} counts them itself")
        values[key] = _values(override, key)
        varied.pop(key, None)
        if len(values[key]) > 1:
            varied[key] = _written(override)
    return values, varied


def compose_points(
    loader: ConfigLoader, master: DictConfig, values: dict[str, list[str]], varied: dict[str, str]
) -> list[Composed]:
    """Every combination. Raises ConfigError for a sweep inside the sweep, and Hydra's errors as they are."""
    swept = _swept(master)
    points = []
    for chosen in itertools.product(*values.values()):
        composed = loader.load_sweep_config(master, list(chosen))
        _refuse_nested(composed, swept, [text for key, text in zip(values, chosen, strict=True) if key in varied])
        points.append(_point(composed, dict(zip(values, chosen, strict=True)), varied))
    return points


def _values(override: Override, key: str) -> list[str]:
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if key in ("repeats", "resume", "optimize") or key.startswith("tracking"):
        raise ConfigError(key, _written(override), "is one for a whole sweep; give one value")
    if not override.is_discrete_sweep():
        raise ConfigError(
            key,
            _written(override),
            "has no end of values; list them (a,b,c or range(1,9)), or search with python -m src.tune",
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _written(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _point(composed: DictConfig, chosen: dict[str, str], varied: dict[str, str]) -> Composed:
    from kvlab.lab.sweep.digest import config_digest, digest_of

    config: RunConfig | None = None
    try:
        config = run_config(composed)
        digest = config_digest(config)
    except KvlabError:
        digest = digest_of(" ".join(chosen.values()))
    group = " ".join(text for key, text in chosen.items() if key in varied)
    group = group or composed.run_name or (run_title(config) if config else "run")
    repeated = f" {chosen[_REPEAT]}" if _REPEAT in chosen and _REPEAT not in varied else ""
    settings = {bare_key(key): text.partition("=")[2] for key, text in chosen.items() if key in varied}
    return Composed(list(chosen.values()), group + repeated, group, settings, int(composed.repeat), config, digest)


def _swept(config: DictConfig) -> dict[str, str]:
    """What its files sweep."""
    return {str(key): str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}


def _refuse_nested(composed: DictConfig, swept: dict[str, str], chosen: list[str]) -> None:
    """A choice that makes a run a sweep cannot be swept itself: Hydra would run it once and say nothing."""
    inner = _swept(composed)
    if inner == swept or not inner:
        return
    guilty = [text for text in chosen if text.split("=")[0] in ("sweep", "experiment")] or chosen
    keys = " and ".join(inner)
    raise ConfigError(
        *(" ".join(guilty).partition("=")[::2]), f"is a sweep (over {keys}) inside a sweep; run it alone"
    )
