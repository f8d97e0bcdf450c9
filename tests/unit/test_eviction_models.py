"""Each eviction policy against the same algorithm written plainly, over random traffic on a small pool."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from kvlab.kv.eviction import EVICTION_POLICIES, EvictionPolicy
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix


class Plain(EvictionPolicy):
    """Every content there is, and what each algorithm looks at, in lists."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple[bytes, ...]] = {}  # by block: its tokens, behind all before them
        self.free: list[int] = []
        self.order: list[int] = []  # blocks in the order in which their content was first let go
        self.hits: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.free)

    def blocks(self) -> Iterable[int]:
        return self.free

    def add(self, block: int, parent: int | None = None) -> None:
        self.free.append(block)
        if block not in self.order:
            self.order.append(block)

    def remove(self, block: int) -> None:
        self.free.remove(block)

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        for block, node in contents.items():
            self.contents[block] = path(node)

    def used(self, blocks: Sequence[int]) -> None:
        self.hits.update(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.contents[block], self.hits[block]
            if block in self.order:
                self.order.remove(block)

    def can_go(self, block: int) -> bool:
        """Whether it is free, and no free block continues its content."""
        content = self.contents[block]
        return block in self.free and not any(self.contents[other][:-1] == content for other in self.free)

    def victim(self) -> int:
        block = next(self.choose())
        self.free.remove(block)
        return block

    def choose(self) -> Iterator[int]:
        raise NotImplementedError


def path(node: Prefix) -> tuple[bytes, ...]:
    return () if node.parent is None else (*path(node.parent), node.tokens)


class PlainLru(Plain):
    def choose(self) -> Iterator[int]:
        yield self.free[0]


class PlainFifo(Plain):
    def choose(self) -> Iterator[int]:
        yield from filter(self.can_go, self.contents)


class PlainLfu(Plain):
    def choose(self) -> Iterator[int]:
        yield min(filter(self.can_go, self.order), key=lambda block: self.hits[block])


class PlainCost(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0
        self.ranks: dict[int, float] = {}

    def add(self, block: int, parent: int | None = None) -> None:
        super().add(block, parent)
        tokens = len(self.contents[block])  # a block is one token
        self.ranks[block] = self.age + (1 + self.hits[block]) * (1 + tokens / 32768)

    def choose(self) -> Iterator[int]:
        block = min(filter(self.can_go, self.order), key=lambda block: self.ranks[block])
        self.age = max(self.age, self.ranks[block])
        yield block


class PlainSieve(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.passed: set[int] = set()  # the blocks behind the hand

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        self.passed.difference_update(blocks)

    def choose(self) -> Iterator[int]:
        while True:
            for block in [block for block in self.order if block not in self.passed]:
                self.passed.add(block)
                if self.can_go(block) and not self.hits[block]:
                    yield block
                if block in self.free:
                    self.hits[block] = 0
            self.passed.clear()


class PlainS3Fifo(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.small: set[int] = set()
        self.ghosts: list[tuple[bytes, ...]] = []

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        super().filled(contents)
        for block in contents:
            if self.contents[block] in self.ghosts:
                self.ghosts.remove(self.contents[block])
            else:
                self.small.add(block)

    def forget(self, blocks: Sequence[int]) -> None:
        super().forget(blocks)
        self.small.difference_update(blocks)

    def stays(self, block: int) -> bool:
        return self.hits[block] > (1 if block in self.small else 0)

    def choose(self) -> Iterator[int]:
        while True:
            turns = [
                block for block in self.order if block in self.free and (self.can_go(block) or self.stays(block))
            ]
            small = [block for block in turns if block in self.small]
            main = [block for block in turns if block not in self.small]
            block = (small or main)[0] if len(self.small) >= len(self.contents) / 10 else (main or small)[0]
            if not self.stays(block):
                if block in self.small:
                    most = max(len(self.contents) - len(self.small), 1)
                    self.ghosts = [*self.ghosts, self.contents[block]][-most:]
                yield block
            else:  # to the end of the main queue
                self.hits[block] = 0 if block in self.small else min(self.hits[block], 3) - 1
                self.small.discard(block)
                self.order.remove(block)
                self.order.append(block)


MODELS = {
    "cost": PlainCost,
    "fifo": PlainFifo,
    "lfu": PlainLfu,
    "lru": PlainLru,
    "s3_fifo": PlainS3Fifo,
    "sieve": PlainSieve,
}


class Compared(EvictionPolicy):
    """A policy whose victims are compared with its model's."""

    def __init__(self, policy: EvictionPolicy, model: Plain) -> None:
        self.policy, self.model = policy, model
        self.evicted = 0

    def __len__(self) -> int:
        assert len(self.policy) == len(self.model)
        return len(self.policy)

    def blocks(self) -> Iterable[int]:
        assert sorted(self.policy.blocks()) == sorted(self.model.blocks())
        return self.policy.blocks()

    def add(self, block: int, parent: int | None = None) -> None:
        self.policy.add(block, parent)
        self.model.add(block, parent)

    def remove(self, block: int) -> None:
        self.policy.remove(block)
        self.model.remove(block)

    def victim(self) -> int:
        block = self.policy.victim()
        assert self.model.can_go(block), "it goes before its child"
        assert block == self.model.victim(), f"victim {self.evicted}"
        self.evicted += 1
        return block

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        self.policy.filled(contents)
        self.model.filled(contents)

    def used(self, blocks: Sequence[int]) -> None:
        self.policy.used(blocks)
        self.model.used(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        self.policy.forget(blocks)
        self.model.forget(blocks)


def test_every_policy_has_a_model() -> None:
    assert set(MODELS) == set(EVICTION_POLICIES.names())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_evicts_what_its_model_evicts(name: str, seed: int) -> None:
    chance = random.Random(seed)
    compared = Compared(EVICTION_POLICIES.get(name)(), MODELS[name]())
    pool = PagedKVCachePool(32, 1, 16, prefix_sharing=True, eviction=compared)
    slots: list[int] = []
    for _ in range(400):
        if len(slots) > chance.randint(0, 1):
            pool.free_slot(slots.pop(chance.randrange(len(slots))))
        group = min(int(chance.paretovariate(1)), 12)  # of prompts that begin alike, a few much more often
        tokens = [group, *(chance.choices((0, 1, 2), (6, 2, 1))[0] for _ in range(chance.randint(0, 7)))]
        slot = pool.allocate_slot(token_ids=tokens)
        pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
        slots.append(slot)
        assert not pool.audit()
    assert compared.evicted > 300
    for slot in slots:
        pool.free_slot(slot)
    pool.allocate_slot(16)
    pool.allocate_slot(16)
    policy = compared.policy
    held = {key: value for key, value in vars(policy).items() if isinstance(value, dict | set) and value}
    assert not held.keys() - {"_ghost"}, held
