"""How many blocks a pool gets from a count, a byte budget, or neither."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvlab.config import KVConfig, format_bytes, parse_bytes
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.groups import LayerGroup, layers_per_block
from kvlab.kv.pools import POOLS
from kvlab.kv.spec import KVSpec


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of a pool, and what they hold and cost."""

    num_blocks: int
    block_size: int
    bytes_per_token: int  # of all layers
    groups: tuple[LayerGroup, ...] = ()  # of layers, whose blocks are apart; (): all layers' K and V are in a block
    step_tokens: int = 1  # of a sequence that a step computes, at most
    ahead: bool = False  # a step is decided while the one before runs
    parts: int = 1  # groups of devices among which sequences are divided, each with as many of the blocks

    @property
    def token_slots(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def whole_tokens(self) -> int:
        """Tokens whose K and V of all layers the pool's bytes hold."""
        return self.num_bytes // self.bytes_per_token

    @property
    def blocks_of_a_part(self) -> int:
        """Blocks that a sequence may have: those of the group of devices that it is on."""
        return self.num_blocks // self.parts

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token slot."""
        if not self.groups:
            return self.bytes_per_token
        layers = sum(len(group.layers) for group in self.groups if not group.has_state)
        return self.bytes_per_token // layers * layers_per_block(self.groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.token_slots * self.bytes_per_slot

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a sequence of so many computed tokens holds as it decodes, each group's together."""
        return sum(group.num_blocks(tokens, self.block_size, 1 + self.ahead) for group in self._groups)

    def most_blocks(self, tokens: int) -> int:
        """Blocks that it may need on its way there."""
        at_once = (1 + self.ahead) * self.step_tokens
        return sum(group.most_blocks(tokens, self.block_size, at_once) for group in self._groups)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of a pool that can hold a sequence of so many computed tokens, on its way there too."""
        return self.parts * self.most_blocks(tokens) * self.block_size * self.bytes_per_slot

    @property
    def _groups(self) -> tuple[LayerGroup, ...]:
        return self.groups or (LayerGroup(()),)


def size_pool(
    kv: KVConfig,
    spec: KVSpec,
    *,
    max_batch_size: int,
    max_seq_len: int,
    step_tokens: int = 1,
    ahead: bool = False,
    parts: int = 1,
) -> PoolSize:
    """The whole blocks that the configured bytes hold; the same bytes for either backend.

    `num_blocks` are blocks of all layers. With neither `num_blocks` nor `memory`, the bytes that `max_batch_size`
    contiguous slots of `max_seq_len` tokens take. A step computes at most `step_tokens` of a sequence, and is
    decided while the one before runs if it is decided `ahead`. Of `parts` each has its share of the blocks.

    Raises CapacityError, saying what would fit, where not one block fits.
    """
    if kv.num_blocks is not None:
        setting, tokens = f"kv.num_blocks={kv.num_blocks}", kv.num_blocks * kv.block_size
    elif kv.memory is not None:
        setting = f"kv.memory={kv.memory}"
        tokens = parse_bytes(kv.memory, key="kv.memory") // spec.bytes_per_token
    else:
        setting = f"scheduler.max_batch_size={max_batch_size}"
        tokens = max_batch_size * max_seq_len
    pool = POOLS.get(kv.backend)
    block_size = pool.block_size_for(kv, max_seq_len)
    if type(block_size) is not int or block_size < 1:
        text = f"block_size_for returned {block_size!r}; must be a whole number of tokens, at least 1"
        raise ConfigError("kv.backend", kv.backend, text)
    groups = spec.groups if pool.frees_windows else ()
    size = PoolSize(tokens // block_size, block_size, spec.bytes_per_token, groups, parts=parts)
    if groups:
        size = replace(size, step_tokens=step_tokens, ahead=ahead)
    if tokens < block_size:
        needed = size.bytes_for(max_seq_len)
        advice = f"kv.memory={-(-needed // 1024)}KiB"
        if kv.num_blocks is not None:
            advice = f"kv.num_blocks={-(-needed // (kv.block_size * spec.bytes_per_token))}"
        raise CapacityError(
            f"{setting} holds {tokens} tokens at {format_bytes(spec.bytes_per_token)} each, less than "
            f"one {pool.unit} of {block_size}; "
            f"{advice} would hold a sequence of model.max_seq_len={max_seq_len} tokens"
        )
    if not groups:
        return size
    num_bytes = tokens * spec.bytes_per_token
    if kv.memory is not None:
        num_bytes = parse_bytes(kv.memory, key="kv.memory")
    return replace(size, num_blocks=num_bytes // (block_size * size.bytes_per_slot))


def check_longest_sequence(size: PoolSize, longest: int, room: int | None = None) -> None:
    """Raise CapacityError unless the pool can hold a sequence of `longest` tokens, saying what would: a larger
    pool, where the memory has `room` for so many bytes of one (None: not known).
    """
    blocks = size.most_blocks(longest)
    if blocks <= size.blocks_of_a_part:
        return
    needed = size.bytes_for(longest)
    whole = -(-needed // (size.block_size * size.bytes_per_token))
    advice = f"kv.num_blocks={whole}, or instead kv.memory={-(-needed // 1024)}KiB, would fit it"
    if room is not None and needed > room:
        advice = (
            f"a pool that fits it takes {format_bytes(needed)}, and weights and steps leave "
            f"{format_bytes(max(room, 0))}; take shorter requests, fewer bits of K and V (kv.dtype) or of weights, "
            "or more devices (executor.tensor_parallel)"
        )
    shared = f", which {size.parts} groups of devices divide," if size.parts > 1 else ""
    raise CapacityError(
        f"the KV pool of {size.num_blocks} blocks of {size.block_size} tokens ({size.token_slots} tokens, "
        f"{format_bytes(size.num_bytes)}){shared} is too small for one sequence of {longest} tokens, which needs "
        f"{blocks} blocks; {advice}"
    )


def longest_sequence(size: PoolSize, most: int) -> int:
    """Tokens of the longest sequence that the pool can hold, of `most` at most; 0: of none."""
    lengths = range(1, most + 1)
    return bisect_right(lengths, size.blocks_of_a_part, key=size.most_blocks)
