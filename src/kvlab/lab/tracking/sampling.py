"""How a long series becomes one that a page can draw."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.lab.tracking.base import Point

SERIES_POINTS = 320  # what MLflow's page shows of a metric with steps


def sample(points: Sequence[Point]) -> Sequence[Point]:
    """At most SERIES_POINTS of the points, evenly spread, the first and the last among them."""
    if len(points) <= SERIES_POINTS:
        return points
    last = len(points) - 1
    return [points[round(index * last / (SERIES_POINTS - 1))] for index in range(SERIES_POINTS)]
