"""How long blocks live, how soon they are used again, and how long they lie idle before they are evicted."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily

from kvlab.engine.clock import Clock
from kvlab.kv.journal import BlockEvent, BlockJournal, Owner

# Upper ends of the buckets.
_SECONDS = np.array(
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800]
)


class Durations:
    """A histogram that takes many seconds at once. Its buckets have the upper `ends`."""

    def __init__(self, ends: NDArray[np.float64] = _SECONDS) -> None:
        self._ends = ends
        self._counts = np.zeros(len(ends) + 1, dtype=np.int64)  # up to each end, and above the last
        self._sum = 0.0

    def observe(self, seconds: NDArray[np.float64]) -> None:
        """Count each."""
        self._counts += np.bincount(self._ends.searchsorted(seconds), minlength=len(self._counts))
        self._sum += float(seconds.sum())

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """As Prometheus has it: how many were at most as long as each bucket's end."""
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        ends = [*map(str, self._ends.tolist()), "+Inf"]
        buckets = zip(ends, accumulate(self._counts.tolist()), strict=True)
        family.add_metric([model, "0"], buckets=list(buckets), sum_value=self._sum)
        return family


class BlockTimes(BlockJournal):
    """Takes a pool's events as they come and keeps three histograms of them, in seconds of the engine's clock.

    They count what vLLM's do. A block is used when it is allocated, and each time a sequence finds its content. It
    lives from its allocation to its eviction; a block whose content nobody could find again is not evicted.
    """

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._born, self._used = np.zeros(num_blocks), np.zeros(num_blocks)
        self._lifetime, self._idle, self._gap = Durations(), Durations(), Durations()

    def add(self, event: BlockEvent, blocks: Sequence[int], owner: Hashable = None) -> None:
        if event in (BlockEvent.FREED, BlockEvent.CACHED, BlockEvent.PINNED):
            return
        now, rows = self._clock.now(), np.asarray(blocks, dtype=np.int64)
        if event is BlockEvent.DROPPED:
            self._lifetime.observe(now - self._born[rows])
            self._idle.observe(now - self._used[rows])
            return
        if event is BlockEvent.SHARED:
            self._gap.observe(now - self._used[rows])
        else:
            self._born[rows] = now
        self._used[rows] = now

    def assign(self, slot: int, owner: Owner) -> None:
        """Whose a block is counts nowhere."""

    def end_step(self) -> None:
        """Nothing is kept."""

    def families(self, model: str) -> Iterator[HistogramMetricFamily]:
        """The histograms."""
        yield self._lifetime.family(
            "kv_block_lifetime_seconds", "From a block's allocation to its eviction.", model
        )
        yield self._idle.family(
            "kv_block_idle_before_evict_seconds", "From a block's last use to its eviction.", model
        )
        yield self._gap.family("kv_block_reuse_gap_seconds", "Between one use of a block and the next.", model)
