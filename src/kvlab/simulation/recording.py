"""A recorded run, to be played back: its steps, and every token with the time at which it was there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Outputs(NamedTuple):
    """What one sample of a request produced."""

    token_ids: Sequence[int]
    times_s: Sequence[float]


@dataclass(frozen=True)
class Recording:
    """`steps`: rows of steps.parquet in order; `outputs` by a request's id and the number of its sample."""

    source: str  # where it is recorded
    steps: Sequence[Mapping[str, Any]]
    outputs: Mapping[tuple[str, int], Outputs]

    @property
    def num_blocks(self) -> int:
        """Blocks of its pool."""
        return int(self.steps[0]["blocks_total"] or 0)

    @cached_property
    def ends_s(self) -> dict[float, float]:
        """When each step ended, by the time of its start."""
        return {row["start_s"]: row["end_s"] for row in self.steps}
