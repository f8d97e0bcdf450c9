"""A pool driven by random calls beside a naive model of what it holds (`reference`).

A rule is a call of the pool. It either succeeds, and the model does the same to plain Python objects, or is
expected to be refused, and then must have changed nothing. After each rule `pool_invariants` compares all that can
be seen of the pool with the model. To add a call: one more rule.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvlab.core import Salt
from kvlab.errors import OutOfBlocksError, SlotError
from tests.property.reference import SPEC, Guess, Step, computed_dtype, state
from tests.property.sequence_rules import SequenceRules, alphabet, picks, prompts, salts

Wanted = list[tuple[int, int]]
steps: st.SearchStrategy[Wanted] = st.lists(st.tuples(picks, st.integers(1, 7)), min_size=1, max_size=4)
tails = st.lists(alphabet, min_size=7, max_size=7)
guesses = st.one_of(st.just(0), st.integers(0, 7))  # tokens of a step that are proposed, at most


class PoolMachine(SequenceRules):
    """What holds for every pool; subclasses say which pool, and what a new slot costs."""

    def chosen(self, wanted: Wanted) -> tuple[list[int], list[int]]:
        """Each picked slot that is in no step once, with its number of new tokens."""
        tokens = {self.slot(pick): new for pick, new in reversed(wanted)}
        free = [(slot, new) for slot, new in tokens.items() if slot not in self.busy() | self.loading.keys()]
        return [slot for slot, _ in free], [new for _, new in free]

    def too_long(self, slots: list[int], new: list[int]) -> bool:
        return any(self.model[s].length + n > self.pool.max_seq_len for s, n in zip(slots, new, strict=True))

    @precondition(lambda self: self.step is None)
    @rule(tokens=prompts, chunk=st.integers(1, 20), twice=st.booleans())
    def admit(self, tokens: list[int], chunk: int, twice: bool) -> None:
        """As the engine does it: each is reserved at once, so that the next shares what it fills."""
        for _ in range(1 + twice):
            slot = self.open(tokens, None)
            if slot is not None and tokens and slot not in self.loading:
                left = len(tokens) - self.model[slot].length
                self.reserve_for([slot], [min(left, chunk)], [])

    @precondition(lambda self: self.model)
    @rule(pick=picks, first=st.booleans())
    def free_slot(self, pick: int, first: bool) -> None:
        """Also while a step is prepared or open: an abort."""
        slot = self.slot(pick)
        if self.step is None or slot not in self.step.slots:
            self.close(slot)
        elif first:
            self.rollback()
            self.close(slot)
        else:
            step, self.step = self.step, None
            self.close(slot)
            self.rewind({slot})
            step.view.rollback()
            self.drop_guesses(step)
            self.rewind(set(step.slots))
            self.closed(step)

    @precondition(lambda self: self.step is None)
    @rule(keep=st.integers(0, 2))
    def free_slots(self, keep: int) -> None:
        """The last come are the first to go."""
        while len(self.model) > keep:
            self.close(max(self.model))

    # Making room

    @precondition(lambda self: self.model and not (self.sharing and self.step))
    @rule(wanted=steps, extra=tails, guess=guesses)
    def reserve(self, wanted: Wanted, extra: list[int], guess: int) -> None:
        """For the coming step, in as many calls as hypothesis likes."""
        self.reserve_for(*self.chosen(wanted), extra, guess)

    def reserve_for(self, slots: list[int], new: list[int], extra: list[int], guess: int = 0) -> None:
        if self.made_room(slots, new, extra, guess):
            self.prepared.update(zip(slots, new, strict=True))

    def made_room(self, slots: list[int], new: list[int], extra: list[int], guess: int = 0) -> bool:
        """Reserve, the last `guess` tokens of each slot as proposals where its list has no others; True if there
        was room for all.
        """
        if self.too_long(slots, new):
            with self.refused(SlotError, match="max_seq_len"):
                self.pool.reserve(slots, new)
            return False
        proposed = [self.proposable(slot, tokens, guess) for slot, tokens in zip(slots, new, strict=True)]
        for slot, tokens, count in zip(slots, new, proposed, strict=True):
            self.know(slot, self.model[slot].length + tokens - count, extra)
        lacking = self.lacking(slots, new)
        told = proposed if guess else None
        if sum(lacking.values()) > self.free_blocks:
            with self.refused(OutOfBlocksError) as caught:
                self.pool.reserve(slots, new, told)
            error = caught.value
            assert (error.wanted, error.free) == (sum(lacking.values()), self.free_blocks)
            assert error.slots
            assert all(lacking[slot] for slot in error.slots)
            return False
        copies = self.pool.counters().cow_copies
        with self.taking(sum(lacking.values())):
            self.pool.reserve(slots, new, told)
        for slot, tokens, count in zip(slots, new, proposed, strict=True):
            content = self.model[slot]
            grown = max(0, self.blocks_for(content.length + tokens) - content.blocks)
            if count:
                needed = max(0, self.blocks_for(content.length + tokens - count) - content.blocks)
                guessed = [token if content.told else next(self.unknown) for token in extra[-count:]]
                self.guesses[slot] = Guess(guessed, grown - needed)
            content.blocks += grown
            copies += lacking[slot] - grown
        assert self.pool.counters().cow_copies == copies
        return True

    def proposable(self, slot: int, new: int, guess: int) -> int:
        """How many of a slot's new tokens can be proposals: at most `guess`, and none that its list has."""
        content = self.model[slot]
        return max(0, min(guess, new, content.length + new - len(content.tokens)))

    def know(self, slot: int, length: int, extra: list[int]) -> None:
        """Give a slot tokens of this length; the pool reads the list."""
        content = self.model[slot]
        for token in extra:
            if len(content.tokens) >= length:
                return
            content.tokens.append(token if content.told else next(self.unknown))

    def lacking(self, slots: list[int], new: list[int]) -> dict[int, int]:
        """Blocks that each slot's step takes: its table's growth, and copies of blocks that others hold too."""
        lacking = {}
        references, size = self.references(), self.pool.block_size
        for slot, tokens in zip(slots, new, strict=True):
            content = self.model[slot]
            lacking[slot] = max(0, self.blocks_for(content.length + tokens) - content.blocks)
            table = self.pool.tables.blocks(slot)
            for entry in sorted({p // size for p in range(content.stored, content.length + tokens)}):
                if entry < len(table) and references[table[entry]] > 1:
                    lacking[slot] += 1
                    references[table[entry]] -= 1
        return lacking

    # A whole step: reserve, view, write every layer, advance; where nothing is shared beside one that is open

    @precondition(lambda self: self.model and not (self.sharing and self.busy()))
    @rule(wanted=steps, extra=tails, guess=guesses, right=st.integers(0, 7))
    def run_step(self, wanted: Wanted, extra: list[int], guess: int = 0, right: int = 0) -> None:
        slots, new = self.chosen(wanted)
        if self.made_room(slots, new, extra, guess):
            self.finish(Step(self.pool.view(slots, new), slots, new), right)

    @precondition(lambda self: self.model and not (self.sharing and self.busy()))
    @rule(token=alphabet)
    def decode_all(self, token: int) -> None:
        self.run_step([(index, 1) for index in range(len(self.model))], [token])

    # A step in parts, with any other call in between

    @precondition(lambda self: self.model and self.step is None)
    @rule(wanted=steps, extra=tails)
    def launch(self, wanted: Wanted, extra: list[int]) -> None:
        """A view of all that was reserved, and of slots that were not."""
        slots, new = self.chosen(wanted)
        if self.too_long(slots, new):
            with self.refused(SlotError, match="max_seq_len"):
                self.pool.view([*self.prepared, *slots], [*self.prepared.values(), *new])
            return
        for slot, tokens in zip(slots, new, strict=True):
            self.know(slot, self.model[slot].length + tokens, extra)
        lacking = self.lacking(slots, new)
        slots, new = [*self.prepared, *slots], [*self.prepared.values(), *new]
        if sum(lacking.values()) > self.free_blocks:
            with self.refused(OutOfBlocksError):
                self.pool.view(slots, new)
            return
        before = {slot: self.model[slot].length for slot in slots}
        view = self.pool.view(slots, new)
        assert view.lengths == [before[slot] + tokens for slot, tokens in zip(slots, new, strict=True)]
        assert view.num_new == new
        for slot in lacking:
            self.model[slot].blocks = max(
                self.model[slot].blocks, self.blocks_for(before[slot] + new[slots.index(slot)])
            )
        self.step, self.prepared = Step(view, slots, new), {}

    @precondition(lambda self: self.prepared and self.step is None)
    @rule()
    def launch_what_was_reserved(self) -> None:
        slots, new = list(self.prepared), list(self.prepared.values())
        self.step, self.prepared = Step(self.pool.view(slots, new), slots, new), {}

    @precondition(lambda self: self.step is not None)
    @rule(layer=st.integers(0, SPEC.num_layers - 1))
    def write(self, layer: int) -> None:
        assert self.step is not None
        self.write_layer(self.step, layer)

    @precondition(lambda self: self.step is not None)
    @rule(right=st.integers(0, 7))
    def advance(self, right: int) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        self.finish(step, right)

    @precondition(lambda self: self.step is not None)
    @rule()
    def rollback(self) -> None:
        """A failed step: all go on from where they were, who counted on it from before that."""
        assert self.step is not None
        step, self.step = self.step, None
        step.view.rollback()
        self.closed(step)
        self.drop_guesses(step)
        self.rewind(set(step.slots))

    def drop_guesses(self, step: Step) -> None:
        """The step did not happen: the blocks that were there for guesses alone go back."""
        for slot in step.slots:
            if (guess := self.guesses.pop(slot, None)) is not None:
                self.model[slot].blocks -= guess.blocks

    def write_layer(self, step: Step, layer: int) -> None:
        """K and V of the step's tokens; not a number for those that must not be written."""
        parts = []
        for slot, tokens in zip(step.slots, step.new, strict=True):
            content = self.guessed(slot)
            kv = content.kv(content.length, content.length + tokens)[layer].clone()
            kv[:, :, : max(0, content.stored - content.length)] = torch.nan
            parts.append(kv)
        if parts:
            assert self.storage is not None
            k, v = torch.cat(parts, dim=2).transpose(1, 2).contiguous().to(computed_dtype(self.storage))
            step.view.update(layer, k, v)
        step.written.add(layer)

    def finish(self, step: Step, right: int = 0) -> None:
        """A model writes every layer before it advances; of each slot's guesses `right` are right, or all."""
        for layer in range(SPEC.num_layers):
            if layer not in step.written:
                self.write_layer(step, layer)
        guessed = {slot: len(self.guesses[slot].tokens) for slot in step.slots if slot in self.guesses}
        wrong = {slot: max(0, count - right) for slot, count in guessed.items()}
        kept = [tokens - wrong.get(slot, 0) for slot, tokens in zip(step.slots, step.new, strict=True)]
        if guessed:
            self.cannot_keep(step, kept)
        step.view.advance(np.asarray(kept) if kept != step.new else None)
        for slot, tokens in zip(step.slots, kept, strict=True):
            content = self.model[slot]
            content.length += tokens
            if (guess := self.guesses.pop(slot, None)) is not None:
                content.blocks = max(content.blocks - guess.blocks, self.blocks_for(content.length))
                content.tokens += guess.tokens[: len(guess.tokens) - wrong[slot]]
            content.stored = max(content.stored, content.length)
        for content in self.model.values():
            content.pending = {entry: s for entry, s in content.pending.items() if s not in step.slots}
        self.closed(step)

    def cannot_keep(self, step: Step, kept: list[int]) -> None:
        """More tokens than the step has, or fewer than are certain."""
        for change in (max(step.new) + 1, -max(step.new) - 1):
            with self.refused(SlotError, match="tokens; from"):
                step.view.advance(np.asarray(kept) + change)

    def closed(self, step: Step) -> None:
        for call in (step.view.advance, step.view.rollback):
            with self.refused(RuntimeError, match="already"):
                call()

    # Calls that change nothing

    @rule(tokens=prompts, salt=salts)
    def ask(self, tokens: list[int], salt: Salt) -> None:
        """What a prompt would find, and what is leaked: nothing."""
        before = state(self.pool)
        found = len(self.hits(tokens, salt)) if self.sharing else 0
        if len(tokens) <= self.pool.max_seq_len:
            found += len(self.tiered(tokens, salt, found))
            assert self.pool.prefix_tokens(tokens, salt) == found * self.pool.block_size
        assert self.pool.reclaim_leaked_blocks() == 0
        assert state(self.pool) == before

    @precondition(lambda self: self.model)
    @rule(pick=picks, dead=st.integers(-1, 40))
    def misuse(self, pick: int, dead: int) -> None:
        pool, slot = self.pool, self.slot(pick)
        if slot in self.loading:
            for call in (pool.reserve, pool.view):
                with self.refused(SlotError, match=f"slot {slot} is being loaded"):
                    call([slot], [1])
            return
        if dead not in self.model:
            for query in (pool.free_slot, pool.get_seq_len, pool.prefill_view, pool.fork_slot):
                with self.refused(SlotError, match=f"slot {dead} is not live"):
                    query(dead)
        with self.refused(SlotError, match="salt="):
            pool.allocate_slot(token_ids=[0] * 4, salt=1.5)  # type: ignore[arg-type]
        with self.refused(SlotError, match="keep_free=-1"):
            pool.allocate_slot(4, keep_free=-1)
        if slot in self.busy():
            for call in (pool.reserve, pool.view):
                with self.refused(SlotError, match="max_seq_len"):
                    call([slot], [pool.max_seq_len + 1])
            return
        for call in (pool.reserve, pool.view):
            if dead not in self.model:
                with self.refused(SlotError, match=f"slot {dead} is not live"):
                    call([slot, dead], [1, 1])
            with self.refused(SlotError, match=f"slot {slot} is given twice"):
                call([slot, slot], [1, 1])
            with self.refused(SlotError, match=f"slot {slot}: 0 new tokens"):
                call([slot], [0])
            with self.refused(SlotError, match="1 slots but 2 token counts"):
                call([slot], [1, 1])
        for proposed, message in (([2], f"slot {slot}: 2 of 1 new tokens"), ([], "0 counts of proposed tokens")):
            with self.refused(SlotError, match="max_seq_len" if self.too_long([slot], [1]) else message):
                pool.reserve([slot], [1], proposed)
