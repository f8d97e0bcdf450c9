"""Canaries: every token slot that a step has no business in is compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import Memory


@dataclass
class Canary:
    """The tensors of the pool as they were."""

    keys: torch.Tensor
    values: torch.Tensor


@given("every token slot without a token holds a canary of its own", target_fixture="canary")
def canaries(memory: Memory) -> Canary:
    memory.fill_unused(None)
    return Canary(memory.storage.keys.clone(), memory.storage.values.clone())


@when(parsers.parse('"{name}" grows by {tokens:d} tokens in layer {layer:d} alone'))
def write_one_layer(memory: Memory, name: str, tokens: int, layer: int) -> None:
    slot, content = memory.slots[name], memory.make_content(tokens)
    memory.pool.reserve([slot], [tokens])
    view = memory.pool.view([slot], [tokens])
    view.update(layer, content[:, layer, 0], content[:, layer, 1])
    view.rollback()


@then("no other token slot of the pool has changed a bit")
def others_unchanged(memory: Memory, canary: Canary) -> None:
    written = memory.places(memory.new_tokens)
    assert written.sum() == sum(map(len, memory.new_tokens.values())) > 0
    for now, before in ((memory.storage.keys, canary.keys), (memory.storage.values, canary.values)):
        changed = (now != before).transpose(2, 3).flatten(3).any(dim=3)  # [layers, blocks, block_size]
        assert torch.equal(changed, written.expand_as(changed))


@then(parsers.parse("layer {layer:d} has not changed a bit"))
def layer_unchanged(memory: Memory, canary: Canary, layer: int) -> None:
    other = 1 - layer
    for now, before in ((memory.storage.keys, canary.keys), (memory.storage.values, canary.values)):
        assert torch.equal(now[layer], before[layer])
        assert not torch.equal(now[other], before[other])
