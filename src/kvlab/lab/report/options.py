"""What a report is to show: the settings of `kvlab report`, with their help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlab.config import TrackingConfig
from kvlab.errors import ConfigError
from kvlab.lab.settings import setting

if TYPE_CHECKING:
    from kvlab.lab.compare.gate import Condition


@dataclass
class ReportOptions:
    """Settings of a report. Raises ConfigError for a value outside its range."""

    filter: list[str] = setting([], "runs that the tracking store finds", "\"params.`kv.backend` = 'paged'\"")
    by: list[str] = setting(
        [],
        "what is compared: a key, a group such as kv, tags.x, or set, the argument that runs came with",
        "KEY,KEY",
    )
    baseline: str | None = setting(None, "the group that the others are compared with; else the first", "NAME")
    metrics: list[str] = setting([], 'names, patterns such as "latency/*", or all; four get a picture', "A,B")
    fail_if: list[str] = setting(
        [],
        'exit code 3 if "METRIC < -5%" of the baseline\'s, or "METRIC > 500" (joined by commas, or repeated)',
        "IF",
    )
    confidence: float = setting(95.0, "of the intervals, in percent", "95")
    min_effect: float = setting(1.0, "in percent; any verdict but `same` needs the whole interval beyond it", "1")
    force: bool = setting(False, "compare although the work was not the same", "true")
    figures: bool = setting(True, "without pictures, which take seconds", "false")
    output: str | None = setting(None, "where report.html and report.md go", "DIR")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if not 50 <= self.confidence < 100:
            raise ConfigError("confidence", f"{self.confidence:g}", "must be at least 50, and less than 100")
        if not self.min_effect >= 0:
            raise ConfigError("min_effect", f"{self.min_effect:g}", "must be at least 0")
        _ = self.conditions  # so that a mistake in one is found before runs are read

    @property
    def conditions(self) -> list[Condition]:
        """The conditions of `fail_if`. Raises ConfigError for what is none."""
        from kvlab.lab.compare.gate import parse_conditions  # here: it takes a moment to import

        return [condition for text in self.fail_if for condition in parse_conditions(text)]
