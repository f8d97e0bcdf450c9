"""Finds blocks by the tokens they hold and all tokens before those."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from struct import Struct, iter_unpack, pack

from kvlab.kv.alike import Alike

_LONGEST_SALT = 256  # bytes of a salt that are kept as they are
DIGEST = b"blake2b:"  # what the digest of a longer one begins with


class Prefix:
    """A full block's tokens behind a given prefix: a node of the tree of all known prefixes.

    `block` is where their K and V are; None: they are not cached. The allocator sets and clears it. `tokens` are
    packed, 8 bytes each; those of a root are its salt. `uses` counts the slots that compute the node while another
    block has it. Most nodes have one child or none: a dict is made for the second alone. `key`, which a tier gives
    it, names the content outside of this tree; unset before.
    """

    __slots__ = ("block", "children", "key", "parent", "tokens", "uses")
    key: bytes

    def __init__(self, parent: Prefix | None, tokens: bytes, block: int | None = None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.uses = 0
        self.children: dict[bytes, Prefix] | Prefix | None = None

    def child(self, tokens: bytes) -> Prefix | None:
        """The node of these tokens behind this one."""
        children = self.children
        if isinstance(children, Prefix):
            return children if children.tokens == tokens else None
        return None if children is None else children.get(tokens)

    def child_tokens(self) -> list[bytes]:
        """Those of each node behind this one."""
        children = self.children
        return [children.tokens] if isinstance(children, Prefix) else list(children or ())

    def add(self, tokens: bytes, block: int | None) -> Prefix:
        """A new child in this block, whose tokens no other child has."""
        return self.attach(Prefix(self, tokens, block))

    def attach(self, child: Prefix) -> Prefix:
        """A node whose parent this is, and whose tokens no other child has, is its child from now on."""
        children, tokens = self.children, child.tokens
        if children is None:
            self.children = child
        elif isinstance(children, Prefix):
            self.children = {children.tokens: children, tokens: child}
        else:
            children[tokens] = child
        return child

    def remove(self, child: Prefix) -> bool:
        """A child goes. False if it has gone already."""
        children = self.children
        if children is child:
            self.children = None
        elif not isinstance(children, dict) or children.get(child.tokens) is not child:
            return False
        else:
            del children[child.tokens]
            self.children = children or None
        return True


class PrefixPart(Prefix):
    """The tokens of a block that is not full. Nothing continues them, and nobody shares the block: who finds them
    has them in a block of its own.
    """

    __slots__ = ()


class PrefixIndex:
    """Full blocks by content. A content is a block's tokens, all tokens before them, and a salt.

    The contents are a tree. A child is found by comparing its tokens, not their hash alone: prompts whose hashes
    collide never share.

    A node outlives its block while others need it, so what is cached behind an evicted block is found again once
    that block is computed anew.

    Each group of layers has blocks, and nodes, of its own: those of all but the first are behind a child of the
    salt's root that stands for the group.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[bytes, Prefix] = {}  # by salt; a root goes with its last node
        self._pack_block = Struct(f"{block_size}q").pack
        self._block = f"{8 * block_size}s"  # a struct cannot be copied
        self._alike: dict[Prefix | None, Alike[Prefix]] = {}  # nodes with blocks by parent, where parts are found
        # The prompt that was looked up last, its salt and the nodes found: one that waits for memory is looked up
        # step after step, and its known tokens stay what they are.
        self._found: tuple[Sequence[int] | None, Hashable, list[Prefix]] = (None, None, [])

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, in order; whole blocks only."""
        node, size = self._roots.get(salt_bytes(salt)), self.block_size
        blocks: list[int] = []
        asked, under, path = self._found
        if asked is not token_ids or under != salt:
            path = []
        for known in path:
            if known.block is None:
                del path[len(blocks) :]
                break
            node = known
            blocks.append(known.block)
        for start in range(len(blocks) * size, len(token_ids) - size + 1, size):
            node = node.child(self._packed(token_ids[start : start + size])) if node is not None else None
            if node is None or node.block is None:
                break
            path.append(node)
            blocks.append(node.block)
        self._found = token_ids, salt, path
        return blocks

    def longest_part(
        self, node: Prefix | None, token_ids: Sequence[int], salt: Hashable, without: Collection[int]
    ) -> tuple[Prefix | None, int]:
        """The cached content behind `node` (None: behind nothing) that begins with most of these tokens, at most a
        block of them, and with how many; one that has just these goes first. Not in the blocks `without`.
        """
        node = node or self._roots.get(salt_bytes(salt))
        if node is None:
            return None, 0
        tokens, known = self._packed(token_ids), self._alike.get(node)
        exact = node.child(tokens)
        if exact is not None and exact.block is not None and exact.block not in without:
            return exact, len(token_ids)
        found, size = known.longest(tokens, without) if known is not None else (None, 0)
        return found, size // 8

    def stored(self, nodes: Iterable[Prefix]) -> None:
        """These have blocks from now on: `longest_part` finds them."""
        for node in nodes:
            if node.parent is not None:
                self._alike.setdefault(node.parent, Alike()).add(node)

    def add_part(self, node: Prefix, token_ids: Sequence[int], block: int) -> PrefixPart | None:
        """The content of a block that is not full, behind `node`; None: there is one with these tokens."""
        tokens = self._packed(token_ids)
        if node.child(tokens) is not None:
            return None
        part = PrefixPart(node, tokens, block)
        node.attach(part)
        return part

    def parts(self, token_ids: Sequence[int], first: int, *, partial: bool = False) -> Iterator[bytes]:
        """The tokens of each whole block, packed, from the block number `first` on; with `partial` those behind the
        last whole one, too.
        """
        size = self.block_size
        for start in range(first * size, len(token_ids) - (0 if partial else size - 1), size):
            yield self._packed(token_ids[start : start + size])

    def find(self, token_ids: Sequence[int], salt: Hashable, group: int) -> list[int | None]:
        """As `match`, in a group's blocks; None where a block is not cached, and others behind it may be."""
        node = self._roots.get(salt_bytes(salt))
        if node is not None and group:
            node = node.child(_group_bytes(group))
        blocks: list[int | None] = []
        for tokens in self._pack(token_ids[: len(token_ids) // self.block_size * self.block_size]):
            node = node.child(tokens) if node is not None else None
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def root(self, salt: Hashable = None, group: int = 0) -> Prefix:
        """The empty prefix of a salt in a group's blocks, for `extend`."""
        text = salt_bytes(salt)
        root = self._roots.get(text)
        if root is None:
            root = self._roots[text] = Prefix(None, text)
        if not group:
            return root
        return root.child(_group_bytes(group)) or root.add(_group_bytes(group), None)

    @staticmethod
    def root_tokens(salt: Hashable = None, group: int = 0) -> list[bytes]:
        """What the nodes have for tokens down to the empty prefix of a salt in a group's blocks."""
        return [salt_bytes(salt), *([_group_bytes(group)] if group else [])]

    def place(
        self, node: Prefix, token_ids: Sequence[int], blocks: Mapping[int, int], new: dict[int, Prefix]
    ) -> list[Prefix]:
        """The nodes of whole blocks of tokens behind `node`, made where they are not there. Those that have no
        block are in `blocks`, by number, from now on, and in `new` by block.
        """
        path = []
        for number, tokens in enumerate(self._pack(token_ids)):
            node = node.child(tokens) or node.add(tokens, None)
            block = blocks.get(number)
            if block is not None and node.block is None:
                node.block, new[block] = block, node
            path.append(node)
        return path

    def extend(
        self, node: Prefix, token_ids: Sequence[int], blocks: Sequence[int], new: dict[int, Prefix]
    ) -> list[Prefix]:
        """The nodes of these whole blocks of tokens behind `node`, in order, made where they are not there.

        Nodes that have no block are in `blocks` from now on, and in `new` by block; those in another get a use.
        """
        if len(blocks) == 1 and node.children is None:  # as in decoding
            new[blocks[0]] = only = node.children = Prefix(node, self._packed(token_ids), blocks[0])
            return [only]
        parts, path = self._pack(token_ids), []
        for tokens, block in zip(parts, blocks, strict=True):
            child = node.child(tokens)
            if child is None:
                break
            if child.block is None:
                child.block, new[block] = block, child
            elif child.block != block:
                child.uses += 1
            path.append(child)
            node = child
        if len(path) < len(parts):
            made = self._branch(node, parts[len(path) :], blocks[len(path) :])
            new.update(zip(blocks[len(path) :], made, strict=True))
            path += made
        return path

    @staticmethod
    def _branch(node: Prefix, parts: list[bytes], blocks: Sequence[int]) -> list[Prefix]:
        """A new node for each part, the first behind `node`, each other behind the one before."""
        node = node.add(parts[0], blocks[0])
        branch = [node]
        for tokens, block in zip(parts[1:], blocks[1:], strict=True):
            child = Prefix(node, tokens, block)
            node.children = child  # what `add` does, at a third of its time
            branch.append(child)
            node = child
        return branch

    def prune(self, nodes: Sequence[Prefix]) -> None:
        """Drop each of the nodes that has no block and no use, then its parents likewise."""
        if self._alike:
            self._forget(nodes)
        for node in reversed(nodes):  # children come first, so that the last of a path takes all of it with it
            while node.block is None and node.children is None and not node.uses:
                parent = node.parent
                if parent is None:
                    del self._roots[node.tokens]
                    break
                if parent.children is node:
                    parent.children = None
                elif not parent.remove(node):
                    break  # it went with its last child, which is one of `nodes` too
                node = parent

    def _forget(self, nodes: Sequence[Prefix]) -> None:
        """Parts of those that have no block are not found any more."""
        for node in nodes:
            known = self._alike.get(node.parent) if node.block is None else None
            if known is not None and known.remove(node):
                del self._alike[node.parent]

    def nodes(self) -> Iterator[Prefix]:
        """Every node except the roots."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            children = node.children or {}
            below = [children] if isinstance(children, Prefix) else list(children.values())
            yield from below
            waiting += below

    def _packed(self, token_ids: Sequence[int]) -> bytes:
        if type(token_ids) is array:
            return token_ids.tobytes()
        same = len(token_ids) == self.block_size
        return self._pack_block(*token_ids) if same else pack(f"{len(token_ids)}q", *token_ids)

    def _pack(self, token_ids: Sequence[int]) -> list[bytes]:
        """The tokens of each of these whole blocks, 8 bytes a token."""
        return [tokens for (tokens,) in iter_unpack(self._block, self._packed(token_ids))]


def salt_bytes(salt: Hashable) -> bytes:
    """What a salt's root has for tokens: a digest of a long one, since roots stay as long as their blocks."""
    text = repr(salt).encode()
    return text if len(text) <= _LONGEST_SALT else DIGEST + blake2b(text, digest_size=32).digest()


def _group_bytes(group: int) -> bytes:
    """What a group's child of a root has for tokens: fewer bytes than a token has."""
    return group.to_bytes(4)
