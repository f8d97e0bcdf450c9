"""Texts of tenants, pinned prefixes, and time that passes."""

from __future__ import annotations

from pytest_bdd import given, parsers, then, when

from features.steps.sizing_steps import kv_settings
from features.steps.support import SPEC
from features.steps.texts import Texts
from kvlab.config import KVConfig
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage


@given(parsers.parse("a pool of {blocks:d} blocks of 16 tokens with {settings}"), target_fixture="memory")
def a_pool_with(blocks: int, settings: str) -> Texts:
    config = KVConfig(**kv_settings(settings))
    return Texts(PagedKVCachePool.from_config(config, blocks, 4096, KVStorage(SPEC, blocks, 16)))


@given(parsers.parse('a text "{name}" of {tokens:d} tokens was stored and freed that pins its first {pinned:d}'))
@when(parsers.parse('a text "{name}" of {tokens:d} tokens is stored and freed that pins its first {pinned:d}'))
def pins(memory: Texts, name: str, tokens: int, pinned: int) -> None:
    memory.arrive(name, memory.new_tokens_of(tokens))
    memory.pool.pin_prefix(memory.slots[name], pinned)
    memory.end(name)


@given(parsers.parse('the salt "{salt}" stored and freed a text "{name}" of {tokens:d} tokens'))
@when(parsers.parse('the salt "{salt}" stores and frees a text "{name}" of {tokens:d} tokens'))
def of_a_tenant(memory: Texts, salt: str, name: str, tokens: int) -> None:
    memory.arrive(name, memory.new_tokens_of(tokens), salt)
    memory.end(name)


@when(parsers.parse("{seconds:g} seconds have passed"))
def time_passed(memory: Texts, seconds: float) -> None:
    memory.pool.expire(seconds)
    memory.audit()


@then(parsers.parse('the salt "{salt}" finds {count:d} blocks of "{name}"'))
def tenant_finds(memory: Texts, salt: str, count: int, name: str) -> None:
    assert memory.pool.prefix_tokens(memory.tokens[name], salt) == 16 * count


@then(parsers.parse("{pinned:d} blocks are pinned, and {refused:d} pins were refused"))
def counted_pins(memory: Texts, pinned: int, refused: int) -> None:
    assert (memory.pool.stats().blocks_pinned, memory.pool.counters().pins_refused) == (pinned, refused)


@then(parsers.parse("{count:d} blocks have expired"))
def have_expired(memory: Texts, count: int) -> None:
    assert memory.pool.counters().expired_blocks == count


@then(parsers.parse("{count:d} blocks were evicted for a quota"))
def for_a_quota(memory: Texts, count: int) -> None:
    assert memory.pool.counters().quota_evictions == count
