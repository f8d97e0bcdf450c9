"""Who goes first: the contract of an order of continuous batching."""

from __future__ import annotations

from enum import Enum, auto

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence


class Stage(Enum):
    """What a step's tokens and memory are given to, one after the other."""

    DECODE = auto()  # running sequences with one token left to compute
    PREFILL = auto()  # running sequences with more
    ADMIT = auto()  # waiting sequences


class Order:
    """First come, first served, and decode before prefill, unless a subclass says otherwise.

    Knows sequences alone. Asked once per step for each stage; `rank` never changes while a sequence waits.
    """

    stages: tuple[Stage, ...] = (Stage.DECODE, Stage.PREFILL, Stage.ADMIT)

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def rank(self, sequence: Sequence) -> int:
        """Its place in the line: the lowest enters and prefills first; of equals the preempted one, then the one
        that came earlier.
        """
        return 0

    def decoding(self, sequences: list[Sequence], budget: int) -> list[Sequence]:
        """Of those that could decode, in the order of their admission, the ones that do: at most `budget`."""
        return sequences if len(sequences) <= budget else sequences[:budget]
