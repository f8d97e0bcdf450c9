"""The contract of an order of continuous batching: which sequences go first."""

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence
from kvlab.engine.scheduler.waiting_queue import WaitingQueue


class Stage(Enum):
    """What gets a step's tokens and memory, one after the other."""

    DECODE = auto()  # running sequences with one token left to compute
    PREFILL = auto()  # running sequences with more
    ADMIT = auto()  # waiting sequences


class StepState(NamedTuple):
    """What an order may know of a step beyond its sequences."""

    now: float  # seconds on the engine's clock
    cached_tokens: Callable[[Sequence], int]  # tokens that a waiting sequence would find in the prefix cache now


class Order:
    """First come, first served, and decode before prefill, unless a subclass says otherwise.

    `rank` sorts the waiting queue, once for each sequence; an order that depends on what changes while sequences
    wait (time, the prefix cache, what was served) overrides `choose`.
    """

    stages: tuple[Stage, ...] = (Stage.DECODE, Stage.PREFILL, Stage.ADMIT)
    decodes_beside_prefill = True  # in one step

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def rank(self, sequence: Sequence) -> float:
        """A sequence's position in the queue and among those in prefill: the lowest goes first; of equals the
        preempted one, then the one that came earlier. Never changes while a sequence waits.
        """
        return 0

    def choose(self, waiting: WaitingQueue, state: StepState) -> Sequence | None:
        """The waiting sequence to admit next, which stays in the queue; None: none waits. Called again after each
        admission.
        """
        return waiting.head

    def decoding(self, sequences: list[Sequence], budget: int) -> list[Sequence]:
        """Of those that could decode, in the order in which they began to, the ones that do: at most `budget`."""
        return sequences if len(sequences) <= budget else sequences[:budget]

    def aged(self, rank: float, sequence: Sequence) -> float:
        """A rank that improves by 1 for each `scheduler.aging_s` seconds that the sequence waits, so that it cannot
        starve: one whose rank is worse by d is overtaken by those alone that arrive less than d * aging_s seconds
        later.

        All ranks improve at the same rate, so that sequences keep their relative order: instead of the ranks of
        those that wait, the arrival of those that come counts. Without `aging_s` the rank is returned as it is.
        """
        aging_s = self.config.aging_s
        return rank if aging_s is None else rank + sequence.request.arrival_s / aging_s
