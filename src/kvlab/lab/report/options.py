"""What `python -m src.report` was asked for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.config import TrackingConfig
from kvlab.errors import ConfigError
from kvlab.lab.compare.gate import Condition, parse_conditions
from kvlab.lab.compare.interval import CONFIDENCE, MIN_EFFECT

KEYS = ("filter", "by", "metrics", "baseline", "fail_if", "output", "force", "confidence", "min_effect", "figures")
_TRACKING = ("tracking.uri", "tracking.experiment", "tracking.timeout_s")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Settings of a report; `runs` are directories and ids, `metrics` names or patterns (none: the usual ones)."""

    runs: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    baseline: str | None = None
    conditions: tuple[Condition, ...] = ()
    output: Path | None = None
    force: bool = False
    confidence: float = CONFIDENCE  # %
    min_effect: float = MIN_EFFECT  # a fraction
    figures: bool = True
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def parse_options(arguments: Sequence[str]) -> ReportOptions:
    """Read `key=value` settings and, between them, runs. Raises ConfigError, naming the key and what would do."""
    runs: list[str] = []
    given: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.lstrip("-").partition("=")
        if not equals or "/" in key or Path(argument).exists():
            runs.append(argument)
        elif key in (*KEYS, *_TRACKING):
            given.setdefault(key, []).append(value.strip())
        else:
            near = difflib.get_close_matches(key, [*KEYS, *_TRACKING], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(key, value, f"unknown; {hint}known: {', '.join((*KEYS, *_TRACKING))}")
    last = {key: values[-1] for key, values in given.items()}
    effect = last.get("min_effect", f"{100 * MIN_EFFECT:g}").rstrip("% ")
    timeout = _number("tracking.timeout_s", last.get("tracking.timeout_s", "10"), least=0)
    return ReportOptions(
        runs=tuple(runs),
        filters=tuple(given.get("filter", [])),
        by=_names(given.get("by", [])),
        metrics=_names(given.get("metrics", [])),
        baseline=last.get("baseline"),
        conditions=tuple(c for text in given.get("fail_if", []) for c in parse_conditions(text)),
        output=Path(last["output"]) if "output" in last else None,
        force=_switch("force", last.get("force", "false")),
        confidence=_confidence(last.get("confidence", f"{CONFIDENCE:g}")),
        min_effect=_number("min_effect", effect, least=0) / 100,
        figures=_switch("figures", last.get("figures", "true")),
        tracking=TrackingConfig(
            uri=last.get("tracking.uri"),
            experiment=last.get("tracking.experiment", TrackingConfig.experiment),
            timeout_s=timeout,
        ),
    )


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in text.strip("[]").split(",") if part.strip())


def _switch(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(key, text, "must be true or false")
    return text.lower() == "true"


def _number(key: str, text: str, *, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(key, text, "is not a number") from None
    if not number >= least:
        raise ConfigError(key, text, f"must be at least {least:g}")
    return number


def _confidence(text: str) -> float:
    number = _number("confidence", text.rstrip("% "), least=50)
    if number >= 100:
        raise ConfigError("confidence", text, "must be less than 100: no interval is certain")
    return number
