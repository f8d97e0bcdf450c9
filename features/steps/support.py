"""What the steps on memory share: a real pool, what was written through it, and plain attention to compare with."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from parse import with_pattern

from kvlab.kv.pool import BlockPool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from tests.support.pools import contiguous, paged

#: 512 bytes a token, so that a block of 16 tokens takes 8 KiB.
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")


@dataclass(frozen=True)
class MemorySize:
    """`8 blocks of 16 tokens` or `4 contiguous slots of 256 tokens`."""

    count: int
    tokens: int
    paged: bool

    def build(
        self,
        spec: KVSpec,
        max_seq_len: int = 4096,
        *,
        sharing: bool = False,
        merge: bool = True,
        eviction: str = "lru",
    ) -> BlockPool:
        """The pool of this size, its tensors reserved."""
        if self.paged:
            size = self.count, self.tokens, max_seq_len
            return paged(*size, spec=spec, sharing=sharing, merge=merge, eviction=eviction)
        return contiguous(self.count, self.tokens, spec=spec)


@with_pattern(r"\d+ (?:blocks?|contiguous slots?) of \d+ tokens?")
def memory_size(text: str) -> MemorySize:
    """Read a memory size as the scenarios write it."""
    count, tokens = (int(number) for number in re.findall(r"\d+", text))
    return MemorySize(count, tokens, paged="contiguous" not in text)


#: A pattern for what `names_in` reads.
NAMES = r'(?P<names>"\w+"(?:(?:, | and )"\w+")*)'


def names_in(text: str) -> list[str]:
    """The quoted names of `"alice", "bob" and "carol"`."""
    return re.findall(r'"([^"]+)"', text)


@dataclass
class Memory:
    """A pool, its sequences by name, and every K and V written through it, kept apart from the pool.

    The pool is audited after each change. `before` is the state ahead of the latest change.
    """

    pool: BlockPool
    query_heads: int = 4
    numbered_heads: bool = False  # V of KV head j is the number j, instead of random
    slots: dict[str, int] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)  # [tokens, layers, 2, kv_heads, head_dim]
    blocks_before: dict[str, list[int]] = field(default_factory=dict)
    free_before: set[int] = field(default_factory=set)
    new_tokens: dict[str, range] = field(default_factory=dict)  # positions that the latest step wrote
    last_blocks: dict[str, list[int]] = field(default_factory=dict)  # of sequences that ended
    started_at: tuple[int, ...] = ()
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        self.started_at = self.place()

    @property
    def storage(self) -> KVStorage:
        assert self.pool.storage is not None
        return self.pool.storage

    @property
    def spec(self) -> KVSpec:
        return self.storage.spec

    def place(self) -> tuple[int, ...]:
        """Where the tensors of the pool begin, and their sizes."""
        tensors = self.storage.keys, self.storage.values
        return tuple(figure for tensor in tensors for figure in (tensor.data_ptr(), *tensor.shape))

    def free_blocks(self) -> set[int]:
        """Ids of the blocks that no sequence holds."""
        return set(range(self.pool.allocator.num_blocks)) - self.pool.allocator.allocated_block_ids()

    def blocks(self, name: str) -> list[int]:
        """The blocks that a sequence holds, in order."""
        return self.pool.tables.blocks(self.slots[name])

    def length(self, name: str) -> int:
        """Tokens the pool says a sequence has."""
        return self.pool.get_seq_len(self.slots[name])

    def open(self, name: str, tokens: int = 0) -> None:
        """Begin a sequence with room for `tokens`, writing nothing yet."""
        self._remember()
        self.slots[name] = self.pool.allocate_slot(tokens)
        self.written[name] = self.make_content(0)
        self.audit()

    def prefill(self, name: str, tokens: int) -> None:
        """Begin a sequence whose first tokens are written in one step."""
        self.open(name, tokens)
        before = self.blocks_before, self.free_before
        if tokens:
            self.step({name: tokens})
        self.blocks_before, self.free_before = before

    def end(self, name: str) -> None:
        """End a sequence."""
        self._remember()
        self.last_blocks[name] = self.blocks(name)
        self.pool.free_slot(self.slots.pop(name))
        del self.written[name]
        self.audit()

    def step(
        self,
        growth: Mapping[str, int],
        during: Callable[[CacheView], None] | None = None,
        content: torch.Tensor | None = None,
    ) -> None:
        """One step: each sequence grows by its number of tokens, whose K and V are random unless given as
        `content`. `during` is called when they are stored.
        """
        self._remember()
        self.new_tokens = {}
        slots, new = [self.slots[name] for name in growth], list(growth.values())
        self.pool.reserve(slots, new)
        view = self.pool.view(slots, new)
        content = self.make_content(sum(new)) if content is None else content
        for layer in range(self.spec.num_layers):
            view.update(layer, content[:, layer, 0], content[:, layer, 1])
        if during is not None:
            during(view)
        view.advance()
        for name, part in zip(growth, content.split(new), strict=True):
            self.new_tokens[name] = range(len(self.written[name]), len(self.written[name]) + len(part))
            self.written[name] = torch.cat([self.written[name], part])
        self.audit()

    def read(self, name: str) -> torch.Tensor:
        """What the pool's tensors hold for a sequence now, token by token through its table."""
        return torch.stack([self.read_token(name, position) for position in range(self.length(name))])

    def read_token(self, name: str, position: int) -> torch.Tensor:
        """K and V of one token, `[layers, 2, kv_heads, head_dim]`."""
        block, offset = self.pool.tables.locate(self.slots[name], position)
        return torch.stack([self.storage.keys[:, block, :, offset], self.storage.values[:, block, :, offset]], 1)

    def shuffle_free_blocks(self) -> None:
        """Take all free blocks and give them back in another order, so that the next sequence gets them
        scattered over the pool.
        """
        takers = [self.pool.allocate_slot(self.pool.block_size) for _ in self.free_blocks()]
        random.Random(0).shuffle(takers)
        for slot in takers:
            self.pool.free_slot(slot)
        self.audit()

    def fill_unused(self, value: float | None) -> None:
        """Overwrite every token slot that holds no token of a sequence; with None, each by numbers of its own."""
        keep = self.places({name: range(self.length(name)) for name in self.slots})
        for tensor in (self.storage.keys, self.storage.values):
            by_slot = tensor.transpose(2, 3)  # [layers, blocks, block_size, kv_heads, head_dim]
            by_slot[:, ~keep] = self.random(*by_slot[:, ~keep].shape) if value is None else value

    def places(self, positions: Mapping[str, range]) -> torch.Tensor:
        """`[blocks, block_size]`, True where these tokens are."""
        places = torch.zeros(self.pool.allocator.num_blocks, self.pool.block_size, dtype=torch.bool)
        for name, of_sequence in positions.items():
            for position in of_sequence:
                places[self.pool.tables.locate(self.slots[name], position)] = True
        return places

    def twin(self) -> Memory:
        """An empty pool of the same size, its blocks in order."""
        size = MemorySize(self.pool.allocator.num_blocks, self.pool.block_size, paged=self.pool.is_paged())
        return Memory(size.build(self.spec), self.query_heads)

    def make_content(self, tokens: int) -> torch.Tensor:
        """K and V for new tokens, `[tokens, layers, 2, kv_heads, head_dim]`."""
        spec = self.spec
        content = self.random(tokens, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        if self.numbered_heads:
            content[:, :, 1] = torch.arange(spec.num_kv_heads, dtype=content.dtype)[:, None]
        return content

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the pool's dtype; no two calls give the same."""
        return torch.randn(*shape, generator=self.generator).to(self.storage.keys.dtype)

    def audit(self) -> None:
        """The pool's own invariants hold, and it has every sequence as long as what was written."""
        assert self.pool.audit() == []
        for name, written in self.written.items():
            assert self.length(name) == len(written)

    def _remember(self) -> None:
        self.blocks_before = {name: self.blocks(name) for name in self.slots}
        self.free_before = self.free_blocks()


def chunks(total: int, size: int) -> Iterator[int]:
    """`total` in parts of `size`, the last one smaller."""
    while total > 0:
        yield min(size, total)
        total -= size


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_position: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """softmax(q K^T) V as the formula says, one query and one head at a time, in float64.

    `q` `[n, heads, head_dim]` at positions from `first_position` on; `k`, `v` `[tokens, heads, head_dim]`.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        end = first_position + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(q.shape[1]):
            scores = k[seen, head].double() @ q[row, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row, head] = torch.softmax(scores, dim=0) @ v[seen, head].double()
    return out.float()
