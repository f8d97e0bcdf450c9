"""Tiers of a replica's own before what others lend it."""

from __future__ import annotations

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.remote import Offered, RemoteTier
from kvlab.kv.tiers.tier import Tier
from tests.support.tiers import FixedLink

A, B = b"a" * 32, b"b" * 32


def tier(name: str, pages: int) -> Tier:
    return Tier(name, pages, 8, EVICTION_POLICIES.get("lru")())


def test_what_is_held_is_loaded_from_there_although_it_is_evicted_to_another_tier_meanwhile() -> None:
    host, disk = tier("host", 1), tier("disk", 1)
    offload = Offload([host, disk])
    disk.add(A)
    offload.hold([A])
    offload.store(A, 0)
    offload.load(0, 0, [A], [1], [0])
    assert [load.tier for load in offload.loads] == [disk]
    offload.arrived()
    assert (host.held(), disk.held()) == ({}, {})


def test_what_others_lend_is_no_place_to_swap_to() -> None:
    host, lent = tier("host", 1), RemoteTier(8, FixedLink(), lambda name: None)
    offload = Offload([host, lent])
    lent.offer("r0", {B: Offered(8, 8)})
    assert offload.store(A, 0) is host
    host.hold(A)
    assert offload.store(B, 1) is None
    assert B in lent
