"""Sequences with known tokens, whose K and V depend on all of them up to each, as a model's do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import torch

from features.steps.support import Memory
from kvlab.core import Salt
from kvlab.kv.view import CacheView


@dataclass
class Texts(Memory):
    """A pool that knows its sequences' tokens.

    K and V of a token are a function of it and of every token before it: who is given blocks of another text
    reads something else than what is `written`, which is computed apart from the pool.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each text, also once it has ended
    found: dict[str, int] = field(default_factory=dict)  # tokens that a text found in the cache
    computed: dict[str, int] = field(default_factory=dict)  # tokens of its prompt that it had to compute
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # contents to compare with later
    state: dict[str, Any] = field(default_factory=dict)  # the pool ahead of a call that was refused
    gone: dict[str, int] = field(default_factory=dict)  # slots of texts whose tables were dropped
    _fresh: count[int] = field(default_factory=lambda: count(1000))
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    def new_tokens_of(self, amount: int) -> list[int]:
        """Tokens that no text has yet."""
        return [next(self._fresh) for _ in range(amount)]

    def open(self, name: str, tokens: int = 0) -> None:
        """Begin a text of new tokens."""
        self.open_text(name, self.new_tokens_of(tokens))

    def open_text(self, name: str, tokens: Sequence[int], salt: Salt = None) -> None:
        """Begin a text of these tokens; what is cached of it is there at once."""
        self._remember()
        known = list(tokens)  # the pool reads it as the text grows
        slot = self.pool.allocate_slot(token_ids=known, salt=salt)
        self.slots[name], self.tokens[name] = slot, known
        self.found[name] = self.pool.get_seq_len(slot)
        self.computed[name] = len(tokens) - self.found[name]
        self.written[name] = self.content(tokens)[: self.length(name)]
        self.audit()

    def arrive(self, name: str, tokens: Sequence[int], salt: Salt = None) -> None:
        """Begin a text, and compute what is not cached of it in one step."""
        self.open_text(name, tokens, salt)
        before = self.blocks_before, self.free_before
        if self.computed[name]:
            self.step({name: self.computed[name]})
        self.blocks_before, self.free_before = before

    def fork(self, name: str, source: str) -> None:
        """Begin a text with all that another has."""
        self._remember()
        self.tokens[name] = list(self.tokens[source])
        self.slots[name] = self.pool.fork_slot(self.slots[source], self.tokens[name])
        self.written[name] = self.written[source].clone()
        self.audit()

    def step(
        self,
        growth: Mapping[str, int],
        during: Callable[[CacheView], None] | None = None,
        content: torch.Tensor | None = None,
    ) -> None:
        """One step; a text that has no more tokens goes on with new ones."""
        assert content is None
        for name, amount in growth.items():
            self.know(name, self.length(name) + amount)
        parts = [self.content(self.tokens[name])[self.length(name) :][:amount] for name, amount in growth.items()]
        super().step(growth, during, torch.cat(parts))

    def know(self, name: str, length: int, like: str | None = None) -> None:
        """Append a text's tokens up to `length`, new ones or those of another, to the list that the pool reads."""
        known = self.tokens[name]
        source = self.tokens[like][len(known) : length] if like else self.new_tokens_of(max(length - len(known), 0))
        known += source

    def content(self, tokens: Sequence[int]) -> torch.Tensor:
        """K and V of a text, `[tokens, layers, 2, kv_heads, head_dim]`."""
        spec, state, parts = self.spec, 0, [self.make_content(0)]
        for token in tokens:
            state = hash((state, token))
            if state not in self._made:
                generator = torch.Generator().manual_seed(state % 2**63)
                shape = (1, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
                self._made[state] = torch.randn(*shape, generator=generator)
            parts.append(self._made[state])
        return torch.cat(parts)

    def shared_entries(self, first: str, second: str) -> int:
        """With how many blocks two tables begin the same; no other block may be in both."""
        mine, yours = self.blocks(first), self.blocks(second)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, yours, strict=False))))
        assert not set(mine[same:]) & set(yours[same:])
        return same

    def cached_blocks(self, name: str) -> int:
        """With how many blocks the cache could serve a text now; asking is no use of them."""
        assert self.pool.shares_prefixes
        return len(self.pool.index.match(self.tokens[name]))


def pool_state(memory: Memory) -> dict[str, Any]:
    """All that a refused call must leave as it was: tables, counters, the order of the free blocks, K and V."""
    pool = memory.pool
    allocator = copy.deepcopy(pool.allocator)
    return {
        "tables": {slot: pool.tables.blocks(slot) for slot in pool.tables.live},
        "lengths": {slot: pool.get_seq_len(slot) for slot in pool.tables.live},
        "references": [pool.allocator.ref_count(block) for block in range(pool.allocator.num_blocks)],
        "owners": {slot: pool.allocator.owners.blocks_of(slot) for slot in range(len(pool.tables.counts))},
        "content": {block: id(pool.allocator.content(block)) for block in range(pool.allocator.num_blocks)},
        "stats": pool.stats(),
        "keys": memory.storage.keys.tolist(),
        "values": memory.storage.values.tolist(),
        "queue": allocator.allocate(allocator.num_free()),
    }
