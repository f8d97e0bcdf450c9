"""The running sequences that decode, as one batch that is kept from step to step."""

from collections.abc import Callable, Iterable

from kvlab.core import Sequence, SequenceStatus
from kvlab.engine.step_plan import DecodeBatch, slots_of


class Decoders:
    """Those that decode: `batch` has them as of the last `update`. It `is_stale` once a part of them decoded alone,
    whose tokens it has not seen.
    """

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self.batch = DecodeBatch(sequences)
        self.is_stale = False
        self._joined: list[Sequence] = []
        self._left: list[int] = []  # slots
        self._stopped: list[Sequence] = []  # decode once more

    def join(self, sequence: Sequence) -> None:
        """A running sequence decodes from the next step on."""
        self._joined.append(sequence)

    def leave(self, sequence: Sequence, *, once_more: bool = False) -> None:
        """A sequence, which has its slot still, decodes no more, or in the coming step for nobody."""
        if once_more:
            self._stopped.append(sequence)
        else:
            self._left += slots_of([sequence])

    def update(self) -> None:
        """Before a step: those that left decode no more, those that joined do."""
        self._remove_left()
        joins = [each for each in self._joined if each.status is SequenceStatus.RUNNING or each in self._stopped]
        self.batch.add(joins)
        self._joined = []

    def plan(self, choose: Callable[[list[Sequence]], list[Sequence]]) -> DecodeBatch:
        """Those that `choose` lets decode in the step."""
        self._remove_left()
        chosen = choose(self.batch.sequences)
        batch = self.batch
        if len(chosen) < len(batch):
            batch, self.is_stale = DecodeBatch(chosen), True
        elif self.is_stale:
            batch, self.is_stale = DecodeBatch(chosen), False
            self.batch = batch
        stopped, self._stopped = slots_of(self._stopped), []
        batch.decode_in_vain(stopped)
        self._left += stopped  # behind this step
        return batch

    def _remove_left(self) -> None:
        self.batch.remove(self._left)
        self._left = []
