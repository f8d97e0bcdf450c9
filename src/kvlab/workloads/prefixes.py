"""What the prompts of a workload have in common: the tree of their blocks, as an endless cache would see it."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlab.core import Request
from kvlab.hashed_prompt import HashedPrompt, TokenIds
from kvlab.workloads.prompts import grown_lengths


@dataclass(slots=True)
class PrefixTree:
    """The prompts of requests, one after another, in whole blocks of `block_size` tokens.

    For each prompt: its tokens, its blocks, and how many of these, from the first on, an earlier prompt has too.
    That many tokens are the most that a cache of any size can serve; of a prompt that occurs before as a whole the
    last token is computed in any case.
    """

    block_size: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)

    @property
    def hit_tokens(self) -> list[int]:
        """The most tokens of each prompt that can be found in a cache."""
        return [
            min(hits * self.block_size, tokens - 1) for hits, tokens in zip(self.repeated, self.tokens, strict=True)
        ]

    @property
    def repeated_share(self) -> float:
        """Blocks that occur before over all whole blocks."""
        return sum(self.repeated) / max(sum(self.blocks), 1)

    @property
    def most_hit_rate(self) -> float:
        """What kv/prefix_hit_rate cannot exceed."""
        return sum(self.hit_tokens) / max(sum(self.tokens), 1)


def prefix_tree(requests: Sequence[Request], block_size: int) -> PrefixTree:
    """The tree of these requests' prompts in their order. A later turn of a conversation begins with all that was
    said, of outputs as long as they may be.
    """
    tree, lengths = PrefixTree(block_size), grown_lengths(list(requests))
    known: dict[tuple[int, Hashable], int] = {}  # node and what comes behind it: the node there
    extents = [0]  # of each node: its blocks that some prompt has
    for request in requests:
        prompt, earlier = request.prompt_token_ids, lengths[request.follows] if request.follows else 0
        hits, node = max(earlier - 1, 0) // block_size, 0  # the last token of an output is not computed
        tree.tokens.append(earlier + len(prompt))
        tree.blocks.append(tree.tokens[-1] // block_size)
        for content, blocks in _parts(prompt, block_size) if not earlier else ():
            key = (node, (request.salt, content) if not node else content)
            node = known.setdefault(key, len(extents))
            if node == len(extents):
                extents.append(0)
            hits += min(extents[node], blocks)
            extents[node] = max(extents[node], blocks)
        tree.repeated.append(hits)
    return tree


def _parts(prompt: TokenIds, block_size: int) -> Iterable[tuple[Hashable, int]]:
    """Contents of a prompt in order, each with the whole blocks in it: ids where blocks fit into what an id stands
    for, else blocks of tokens.
    """
    if not isinstance(prompt, HashedPrompt) or prompt.block_tokens % block_size:
        return _token_parts(prompt, block_size)
    whole, rest = divmod(prompt.length, prompt.block_tokens)
    sizes = [prompt.block_tokens // block_size] * whole + [rest // block_size]
    return (((prompt.key, part), size) for part, size in zip(prompt.ids, sizes, strict=False) if size)


def _token_parts(prompt: TokenIds, block_size: int) -> Iterator[tuple[bytes, int]]:
    tokens = np.asarray(prompt, dtype=np.int64)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        yield tokens[start : start + block_size].tobytes(), 1
