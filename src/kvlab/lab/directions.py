"""Which way a metric is better, and what a difference in it is called: the one table of both."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Direction:
    """Whether more of a metric is better (None: neither), and the words for more and for less of it."""

    more_is_better: bool | None
    more: str
    less: str


_FAST_IF_MORE = Direction(True, "faster", "slower")
_FAST_IF_LESS = Direction(False, "slower", "faster")
_GOOD_IF_MORE = Direction(True, "better", "worse")
_GOOD_IF_LESS = Direction(False, "worse", "better")
_NEUTRAL = Direction(None, "higher", "lower")

_DIRECTIONS: tuple[tuple[str, Direction], ...] = (
    ("throughput/*", _FAST_IF_MORE),
    ("efficiency/*", _FAST_IF_MORE),
    ("duration_s", _FAST_IF_LESS),
    ("latency/*", _FAST_IF_LESS),
    ("engine/*_ms_*", _FAST_IF_LESS),
    ("profile/*_ms_mean", _FAST_IF_LESS),
    ("capacity/peak_running", _GOOD_IF_MORE),
    ("capacity/mean_running", _GOOD_IF_MORE),
    ("kv/token_utilization_mean", _GOOD_IF_MORE),
    ("kv/internal_fragmentation_mean", _GOOD_IF_LESS),
    ("kv/prefix_hit_*", _GOOD_IF_MORE),
    ("kv/shared_blocks_peak", _GOOD_IF_MORE),
    ("kv/leaked_blocks", _GOOD_IF_LESS),
    ("requests/failed", _GOOD_IF_LESS),
    ("requests/refused", _GOOD_IF_LESS),
    ("requests/preemptions", _GOOD_IF_LESS),
    ("tokens/prefill", _GOOD_IF_LESS),
    ("tokens/recomputed*", _GOOD_IF_LESS),
    ("engine/failed_passes", _GOOD_IF_LESS),
    ("quality/logit_error_*", _GOOD_IF_LESS),
    ("quality/top1_agreement", _GOOD_IF_MORE),
)


def direction(metric: str) -> Direction:
    """What a difference in this metric means; `higher` and `lower` where neither is better."""
    return next((found for pattern, found in _DIRECTIONS if fnmatchcase(metric, pattern)), _NEUTRAL)
