"""What TensorRT-LLM's C++ block manager answers its scheduler, as read from its source; not TensorRT-LLM itself.

`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` and `evictionPolicy.cpp` of a pre-release of 1.3, for a model
whose layers all see the whole sequence, without beams, offload and priorities. Names are those of the source.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

Key = tuple[int, ...]


class Block:
    """A block: who refers to it, and where it is in the tree of reusable blocks."""

    def __init__(self, number: int) -> None:
        self.number, self.refs, self.scheduling_refs = number, 0, 0
        self.parent: Block | None = None
        self.key: Key = ()
        self.children: dict[Key, Block] = {}
        self.is_full = False

    def leave_tree(self) -> None:
        """It and all that are behind it are not found any more."""
        for child in list(self.children.values()):
            child.leave_tree()
        if self.parent is not None:
            del self.parent.children[self.key]
            self.parent = None


class PrefixReuseSummary(NamedTuple):
    """What is found of a prompt: the first full block that is not, and full blocks that are."""

    first_new_block: Key | None = None
    reusable_blocks_all: int = 0
    reusable_blocks_allocated: int = 0  # others refer to them


class Match(NamedTuple):
    """A block that has the first `tokens` of a key."""

    block: Block
    tokens: int
    is_partial: bool


class Claim(NamedTuple):
    """What a prompt finds: blocks, None for one of which a part is copied, and the tokens in them."""

    blocks: list[Block | None]
    tokens: int


class KVCacheManager:
    """Blocks by sequence, the tree of those that can be reused, and free ones in the order in which they go."""

    is_variable_window = False

    def __init__(self, blocks: int, block_size: int, window: int, *, reuse: bool, partial: bool) -> None:
        self.size, self.enable_block_reuse, self.partial = block_size, reuse, partial
        self.max_attention_window_vec = [window]
        self.blocks = [Block(number) for number in range(blocks)]
        self.free: OrderedDict[int, Block] = OrderedDict((block.number, block) for block in self.blocks)
        self.root = Block(-1)
        self.sequences: dict[int, list[Block]] = {}
        self.tokens: dict[int, int] = {}
        self.evicted = self.scheduling_free = 0

    # What the scheduler asks.

    def get_kv_cache_stats(self) -> Any:
        """Free blocks, among them those that are cached."""
        window = self.max_attention_window_vec[0]
        return SimpleNamespace(num_free_blocks_per_window_size={window: len(self.free)})

    def analyze_prefix_reuse(self, tokens: list[int], req: Any) -> PrefixReuseSummary:
        """findNewContextBlock and countReusableBlocks: full blocks, the one that the last token ends among them."""
        node, found, held = self.root, 0, 0
        for key in self._keys(tokens, len(tokens), partial=False):
            child = node.children.get(key)
            if child is None:
                return PrefixReuseSummary(tuple(tokens[: (found + 1) * self.size]), found, held)
            node, found, held = child, found + 1, held + (child.refs > 0)
        return PrefixReuseSummary(None, found, held)

    def get_remaining_blocks_to_completion(self, req: Any, window: int, cached_summary: Any = None) -> int:
        """Blocks that a request still takes if it produces all it asks for: without those that others hold, too."""
        req.estimated_reusable_tokens = 0
        context = min(req.prompt_len, window) // self.size
        total = -(-min(req.prompt_len + req.max_new_tokens, window) // self.size)
        held = len(self.sequences.get(req.py_request_id, ()))
        reusable = 0
        if self.enable_block_reuse and req.is_context_init_state and req.is_first_context_chunk and not held:
            found = cached_summary or self.analyze_prefix_reuse(req.get_unique_tokens(0), req)
            reusable = min(found.reusable_blocks_allocated, context)
            req.estimated_reusable_tokens = min(found.reusable_blocks_all, context) * self.size
        return total - reusable - held

    def get_needed_blocks_one_step(self, req: Any, two_steps: bool, window: int, cached_summary: Any = None) -> int:
        """Blocks that a request takes in this step: a prompt all of its own."""
        req.estimated_reusable_tokens = 0
        if req.is_context_init_state and req.is_first_context_chunk:
            length = min(req.prompt_len, window + req.max_new_tokens)
            needed = -(-length // self.size)
            if self.enable_block_reuse:
                found = cached_summary or self.analyze_prefix_reuse(req.get_unique_tokens(0), req)
                reusable = min(found.reusable_blocks_allocated, length // self.size)
                req.estimated_reusable_tokens = reusable * self.size
                needed -= reusable
            return needed
        if req.is_generation_in_progress_state:
            now = self.tokens[req.py_request_id]
            more = min(2 if two_steps else 1, req.max_new_tokens - (now - req.prompt_len))
            if now + more > window:
                return 0
            return -(-(now + more) // self.size) + (-now // self.size)
        return 0

    def start_scheduling(self) -> None:
        """Count from what is free now."""
        self.scheduling_free = len(self.free)
        for blocks in self.sequences.values():
            for block in blocks:
                block.scheduling_refs = block.refs

    def scheduling_has_free_blocks(self, blocks: int, window: int) -> bool:
        """Whether there are so many, with those of the sequences that are to be paused."""
        return self.scheduling_free >= blocks

    def scheduling_remove_sequence(self, name: int) -> None:
        """A sequence is to be paused."""
        for block in self.sequences[name]:
            block.scheduling_refs -= 1
            self.scheduling_free += not block.scheduling_refs

    # What the executor does.

    def add_sequence_batch(self, requests: list[Any]) -> None:
        """Prompts get all their blocks: first what each finds is claimed, then the rest is allocated."""
        claims = [self._claim(req) if self.enable_block_reuse else Claim([], 0) for req in requests]
        for req, claim in zip(requests, claims, strict=True):
            behind = [None] * (-(-req.prompt_len // self.size) - len(claim.blocks))
            found = [*claim.blocks, *behind]
            self.sequences[req.py_request_id] = [self._take() if block is None else block for block in found]
            self.tokens[req.py_request_id] = req.prompt_len
            req.set_prepopulated_prompt_len(claim.tokens, self.size)
            req.estimated_reusable_tokens = 0

    def add_token(self, name: int) -> None:
        """A sequence gets one more token, and a block for it where the last is full."""
        self.tokens[name] += 1
        if (self.tokens[name] - 1) % self.size == 0:
            self.sequences[name].append(self._take())

    def store_context_blocks(self, req: Any) -> None:
        """The full blocks of what is computed of a prompt can be reused."""
        if self.enable_block_reuse and req.py_request_id in self.sequences:
            usable = min(req.context_current_position, len(req.tokens) - 1)
            self._store(self._keys(req.tokens, usable, partial=False), self.sequences[req.py_request_id])

    def remove_sequence(self, req: Any) -> None:
        """A sequence's blocks are free, the last one first; all can be reused, the last one's part, too."""
        blocks = self.sequences.pop(req.py_request_id)
        del self.tokens[req.py_request_id]
        if self.enable_block_reuse:
            self._store(self._keys(req.tokens, len(req.tokens) - 1, partial=True), blocks)
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                self.free[block.number] = block

    # The tree.

    def _keys(self, tokens: list[int], usable: int, *, partial: bool) -> list[Key]:
        ends = range(self.size, usable + 1, self.size)
        keys = [tuple(tokens[end - self.size : end]) for end in ends]
        if partial and usable % self.size:
            keys.append(tuple(tokens[usable - usable % self.size : usable]))
        return keys

    def _claim(self, req: Any) -> Claim:
        """What is found of a prompt but its last token. Nobody else takes it then."""
        node, found, tokens = self.root, list[Block | None](), 0
        for key in self._keys(req.tokens, req.prompt_len - 1, partial=True):
            match = self._find(node, key)
            if match is None:
                break
            node, tokens = match.block, tokens + match.tokens
            if match.is_partial and (node.refs or node.children):  # it is another's, who needs it as it is
                found.append(None)
                break
            if match.is_partial:
                node.leave_tree()
            node.refs += 1
            self.free.pop(node.number, None)
            found.append(node)
            if match.is_partial:
                break
        return Claim(found, tokens)

    def _find(self, node: Block, key: Key) -> Match | None:
        block = node.children.get(key)
        if block is not None:
            return Match(block, len(key), not block.is_full)
        best = None
        for other, child in node.children.items() if self.partial else ():
            common = next((n for n, (a, b) in enumerate(zip(other, key, strict=False)) if a != b), None)
            tokens = min(len(other), len(key)) if common is None else common
            if tokens and (best is None or tokens > best.tokens):
                best = Match(child, tokens, True)
        return best

    def _store(self, keys: list[Key], blocks: list[Block]) -> None:
        node, is_behind = self.root, False
        for key, block in zip(keys, blocks, strict=False):
            found = None if is_behind else node.children.get(key)
            if found is None:
                is_behind = True
                if block.parent is not None:
                    raise RuntimeError(f"block {block.number} is in the tree already")
                block.key, block.is_full, block.parent = key, len(key) == self.size, node
                node.children[key] = found = block
            node = found

    def _take(self) -> Block:
        _, block = self.free.popitem(last=False)
        self.evicted += block.parent is not None and (block.is_full or self.partial)
        block.leave_tree()
        block.refs = 1
        return block
