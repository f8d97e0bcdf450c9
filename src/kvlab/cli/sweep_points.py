"""The points of a sweep: every combination of what is swept, composed before any of it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from kvlab.cli.compose import run_config
from kvlab.config import RunConfig
from kvlab.errors import ConfigError, KvlabError
from kvlab.lab.settings import run_title
from kvlab.secrets import redact, redacted, redacted_setting

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from kvlab.lab.campaigns.sweep.plan import Point

MAX_POINTS = 10_000
_REPEAT = "repeat"


class ComposedPoint(NamedTuple):
    """A point as Hydra composes it. `config` is None where it contradicts itself: its run will say why."""

    overrides: list[str]
    point: Point
    config: RunConfig | None


def compose_points(
    loader: ConfigLoader,
    compose: Callable[[DictConfig, list[str]], DictConfig],
    master: DictConfig,
    texts: list[str],
    repeats: int,
) -> tuple[list[ComposedPoint], dict[str, str]]:
    """Every combination of the overrides in `texts`, each composed by `compose`, and how the swept keys were
    written.

    Keys that come first change slowest, and repeats slowest of all, so that those of two points take turns in time.
    Raises ConfigError for what cannot be swept or is a sweep itself, and Hydra's errors as they are.
    """
    values, varied = _values_by_key(loader, texts, repeats)
    count = math.prod(map(len, values.values()))
    if count > MAX_POINTS:
        reason = f"more than the {MAX_POINTS:,} points that a sweep may have; sweep fewer values, or use kvlab tune"
        raise ConfigError("points", f"{count:,}", reason)
    swept = swept_keys(master)
    points = []
    for chosen in itertools.product(*values.values()):
        by_key = dict(zip(values, chosen, strict=True))
        composed = compose(master, list(chosen))
        _refuse_nested(composed, swept, [text for key, text in by_key.items() if key in varied])
        points.append(_composed_point(composed, by_key, varied))
    return points, varied


def swept_keys(config: DictConfig) -> dict[str, str]:
    """What the files of a configuration sweep."""
    return {str(key): str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}


def replaced(loader: ConfigLoader, master: DictConfig, texts: list[str]) -> Iterator[str]:
    """A sentence for each setting that a file sweeps and the command line sets, whose words are last in `texts`."""
    choices = master.hydra.runtime.choices
    file = next((f"{group}={choices[group]}" for group in ("sweep", "experiment") if choices.get(group)), "a file")
    given: dict[str, list[Override]] = {}
    for override in OverridesParser.create(config_loader=loader).parse_overrides(texts):
        given.setdefault(override.get_key_element(), []).append(override)
    for key in swept_keys(master):
        first, last = given[key][0], given[key][-1]
        if first.is_sweep_override() and last is not first:
            swept, counts = (redacted(key, _written(each)) for each in (first, last))
            yield f"{file} sweeps {key}={swept}; {key}={counts} of the command line replaces that"


def _values_by_key(
    loader: ConfigLoader, texts: list[str], repeats: int
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The overrides that each key is given in turn, and how the swept ones were written."""
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
            varied[key] = redacted(key, _written(override))
    return values, varied


def _values(override: Override, key: str) -> list[str]:
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if key in ("repeats", "resume", "optimize") or key.startswith("tracking"):
        raise ConfigError(key, _written(override), "is one for a whole sweep; give one value")
    if not override.is_discrete_sweep():
        text = "has no end of values; list them (a,b,c or range(1,9)), or search with kvlab tune"
        raise ConfigError(key, _written(override), text)
    # One more than may be: a range can have any number of values, and a product above says that they are too many.
    return [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), MAX_POINTS + 1)]


def _written(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _composed_point(composed: DictConfig, chosen: dict[str, str], varied: dict[str, str]) -> ComposedPoint:
    from kvlab.lab.campaigns.sweep.plan import Point
    from kvlab.lab.results.provenance import config_digest, digest_of

    config: RunConfig | None = None
    try:
        config = run_config(composed)
        digest = config_digest(config)
    except KvlabError:
        digest = digest_of(" ".join(chosen.values()))
    group = " ".join(redacted_setting(text) for key, text in chosen.items() if key in varied)
    group = group or redact(composed.run_name or (run_title(config) if config else "run"))
    repeated = f" {chosen[_REPEAT]}" if _REPEAT in chosen and _REPEAT not in varied else ""
    settings = {key.lstrip("+"): redacted(key, chosen[key].partition("=")[2]) for key in chosen if key in varied}
    point = Point(group + repeated, group, digest, settings=settings, repeat=int(composed.repeat))
    return ComposedPoint(list(chosen.values()), point, config)


def _refuse_nested(composed: DictConfig, swept: dict[str, str], chosen: list[str]) -> None:
    """A choice that makes a run a sweep cannot be swept itself: Hydra would run it once without a word."""
    inner = swept_keys(composed)
    if inner in ({}, swept):
        return
    guilty = [text for text in chosen if text.split("=")[0] in ("sweep", "experiment")] or chosen
    key, _, value = " ".join(guilty).partition("=")
    raise ConfigError(key, value, f"is a sweep (over {' and '.join(inner)}) inside a sweep; run it alone")
