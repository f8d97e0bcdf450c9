"""Groups of layers: those that see equally far back share block tables, over one pool of equal blocks.

A block holds `block_size` tokens of `layers_per_block` layers. A layer with full attention needs all tokens of its
sequence; one with a sliding window of w needs the last w, so that its group gives back the blocks before them (the
hybrid KV cache manager of vLLM; Jenga, SOSP 2025).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

STATE = 0  # in place of a window: a state of the whole sequence, which is in its last block
_STATE_WINDOW = 2  # tokens: the last, whose state the next one's is computed from
_SIMILAR = 1.25  # kinds whose counts differ by less than this share the larger count, as in vLLM


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that have block tables in common, and the sliding window of all of them; None: full attention.

    Layers with a state in place of K and V have the blocks of the last token and of the next one in their window,
    of which a block holds the state. Of those that a step passes none is taken: a sequence has `states` blocks at
    most.
    """

    layers: tuple[int, ...]
    window: int | None = None
    states: int = 0

    @property
    def has_state(self) -> bool:
        """Whether its layers have a state in place of K and V."""
        return self.states > 0

    def first_block(self, tokens: int, block_size: int) -> int:
        """The first block that the last of so many tokens sees."""
        return 0 if self.window is None else max(tokens - self.window, 0) // block_size

    def num_blocks(self, tokens: int, block_size: int, in_flight: int = 1) -> int:
        """Blocks that a sequence of so many tokens holds while the last `in_flight` are computed. Of states it is
        one, but for the step that begins a block.
        """
        if self.states:
            return min(tokens, 1)
        return -(-tokens // block_size) - self.first_block(tokens - in_flight + 1, block_size)

    def most_blocks(self, tokens: int, block_size: int, step_tokens: int, shared: int = 0) -> int:
        """Blocks of its own that it may need on its way there, where no step computes more than `step_tokens` of it
        and its first `shared` blocks are others' too.
        """
        whole = -(-tokens // block_size) - shared
        if self.window is None:
            return whole
        if self.states:
            return min(whole, self.states)
        # The last full block stays: what follows it is found behind it.
        before = max(self.window - 1, block_size)
        return min(whole, -(-(before + step_tokens) // block_size) + 1)


def layer_groups(windows: Sequence[int | None], max_seq_len: int, states: int = 0) -> tuple[LayerGroup, ...]:
    """Groups of equally many layers for layers of these sliding windows, those with full attention first, then
    those with a `STATE`, of which a sequence has at most so many.

    As many layers make a group as there are of the rarest kind, so that blocks are of one size and none is larger
    than it has to be; the last group of a kind may have fewer layers, and leaves the rest of its blocks unused. A
    window of `max_seq_len` tokens or more is full attention.
    """
    kinds: defaultdict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows):
        kinds[window if window is not None and window < max_seq_len else None].append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < _SIMILAR * min(counts) else min(counts)
    order = sorted(kinds, key=lambda window: -1 if window is None else window)
    return tuple(
        LayerGroup(
            tuple(kinds[window][first : first + size]),
            *((_STATE_WINDOW, states) if window == STATE else (window, 0)),
        )
        for window in order
        for first in range(0, len(kinds[window]), size)
    )


def layers_per_block(groups: Sequence[LayerGroup]) -> int:
    """Layers whose K and V a block holds."""
    return max(len(group.layers) for group in groups)


def longest_sequence(
    groups: Sequence[LayerGroup], num_blocks: int, block_size: int, *, step_tokens: int, most: int
) -> int:
    """Tokens of the longest sequence, of at most `most`, that so many blocks are enough for."""
    least, beyond = 0, most + 1
    while beyond - least > 1:
        tokens = (least + beyond) // 2
        fits = sum(group.most_blocks(tokens, block_size, step_tokens) for group in groups) <= num_blocks
        least, beyond = (tokens, beyond) if fits else (least, tokens)
    return least
