"""Content on its way from a tier: loads, and the slots that wait for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter

import numpy as np

from kvlab.errors import TierError
from kvlab.kv.tiers.base import Key, PageStore
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.tier import Tier


@dataclass(slots=True, eq=False)
class Load:
    """Pages of one tier on their way into blocks. Modelled ones are there at `done_s`, real ones when their `copy`
    is done, which returns the keys that could not be read and the seconds it took.
    """

    tier: Tier
    blocks: dict[Key, int]
    owner: int  # the slot that began it
    done_s: float = 0.0
    seconds: float = 0.0
    copy: Future[tuple[set[Key], float]] | None = None
    users: set[int] = field(default_factory=set)  # slots that wait for it
    is_lost: bool = False  # it comes to nothing: what waits for it computes

    def is_done(self, now: float) -> bool:
        """Whether its blocks are there."""
        return self.done_s <= now if self.copy is None else self.copy.done()


@dataclass(slots=True)
class Wait:
    """What a slot waits for: these contents, for these `entries` of its tables. They follow its first blocks, which
    are `first`; where layers have windows, `first` counts them too.
    """

    first: int
    keys: Sequence[Key]
    tiers: Sequence[Tier]  # of each
    entries: Sequence[int]  # of each
    loads: set[Load] = field(default_factory=set)  # not done yet
    failed: set[Key] = field(default_factory=set)
    tail: int = 0  # tokens of the last content, if it is of a block that is not full

    def loaded(self) -> Sequence[Tier]:
        """The tiers of the contents that came, up to the first that did not."""
        first = next((n for n, key in enumerate(self.keys) if key in self.failed), len(self.keys))
        return self.tiers[:first]


def worth_loading(keys: list[Key], before: int, tier_of: Callable[[Key], Tier | None]) -> list[Key]:
    """The first of these contents behind so many blocks, up to one that its tier does not find worth a load. None
    is the tier of what is on its way.
    """
    wanted, asked = 0, set[Tier | None]()
    for tier, run in groupby(keys, tier_of):
        of_tier = list(run)
        taken = len(of_tier) if tier is None else tier.wanted(of_tier, before + wanted, again=tier in asked)
        wanted += taken
        asked.add(tier)
        if taken < len(of_tier):
            break
    return keys[:wanted]


def read_pages(store: PageStore, wanted: list[tuple[int, Key, int]], pages: BlockPages) -> tuple[set[Key], float]:
    """Copy pages to blocks, in a tier's thread; the keys of those that could not be read, and how long it took."""
    start, failed, buffer = perf_counter(), set(), np.empty(0, np.uint8)
    for place, key, block in wanted:
        try:
            if isinstance(store, HostStore):
                pages.load(block, store.page(place))
                continue
            buffer = buffer if len(buffer) else np.empty(pages.page_bytes, np.uint8)
            store.read(place, key, buffer)
            pages.load(block, buffer)
        except (OSError, TierError):
            failed.add(key)
    return failed, perf_counter() - start
