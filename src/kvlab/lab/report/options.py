"""What a report is to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvlab.config import TrackingConfig
from kvlab.lab.compare.gate import Condition
from kvlab.lab.compare.interval import CONFIDENCE, MIN_EFFECT


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
