"""Every metric of a run, as catalogue.yaml has it: name, label, unit, formula, direction, digits and section."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvlab.lab.results.metric import COST, GAIN, NEUTRAL, SPEED, TIME, Direction, Metric

#: Columns of steps.parquet that the tracking store follows as `series/<name>`.
SERIES = (
    *("running", "waiting", "blocks_in_use", "blocks_cached", "shared_blocks", "tokens_in_use"),
    *("blocks_allocated", "blocks_freed", "evicted_blocks", "prefill_tokens", "decode_tokens"),
)

#: Percentages that it follows beside them, made of those columns.
SHARES = ("kv_usage_percent", "fragmentation_percent")

TENANT_HITS = "kv/prefix_hit_rate/"  # how the hit rate of one tenant is called, before its salt
_DIRECTIONS = {"speed": SPEED, "time": TIME, "gain": GAIN, "cost": COST, "neutral": NEUTRAL}


def metric(name: str) -> Metric:
    """The entry of a metric; one that has none, such as a user's own, has its name for a label and no direction."""
    if name not in CATALOGUE and name.startswith(TENANT_HITS):
        entry, salt = CATALOGUE[f"{TENANT_HITS}<salt>"], name.removeprefix(TENANT_HITS)
        return replace(entry, name=name, label=entry.label.replace("<salt>", salt))
    return CATALOGUE.get(name) or Metric(name, name)


def direction(name: str) -> Direction:
    """What a difference in this metric means."""
    return metric(name).direction


def sections() -> dict[str, list[Metric]]:
    """The whole catalogue by section."""
    by_section: dict[str, list[Metric]] = {}
    for entry in CATALOGUE.values():
        by_section.setdefault(entry.section, []).append(entry)
    return by_section


def _read_catalogue() -> dict[str, Metric]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time
    by_section = yaml.load(text, loader)
    entries = (
        entry
        for section, metrics in by_section.items()
        for name, values in metrics.items()
        for entry in _entries(name, section=section, **values)
    )
    return {entry.name: entry for entry in entries}


def _entries(name: str, *, direction: str = "neutral", parts: Any = None, **values: Any) -> Iterator[Metric]:
    """The metric of an entry of the file, or one for each of its parts."""
    entry = Metric(name, direction=_DIRECTIONS[direction], **values)
    if parts is None:
        yield entry
        return
    for part, own in parts.items() if isinstance(parts, dict) else ((part, {}) for part in parts):
        named: dict[str, Any] = {key: re.sub(r"\*|<part>", part, getattr(entry, key)) for key in ("name", "label")}
        yield replace(entry, family=name, **named, **own)


CATALOGUE = _read_catalogue()
