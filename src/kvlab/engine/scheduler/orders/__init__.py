"""Orders of continuous batching: one file each."""

from __future__ import annotations

from kvlab.engine.scheduler.orders.base import Order, Stage
from kvlab.engine.scheduler.orders.decode_round_robin import DecodeRoundRobin
from kvlab.engine.scheduler.orders.fcfs import FirstComeFirstServed
from kvlab.engine.scheduler.orders.prefill_first import PrefillFirst
from kvlab.engine.scheduler.orders.priority import PriorityOrder
from kvlab.engine.scheduler.orders.shortest_first import ShortestFirst

ORDERS: dict[str, type[Order]] = {
    "fcfs": FirstComeFirstServed,
    "prefill_first": PrefillFirst,
    "decode_round_robin": DecodeRoundRobin,
    "shortest_first": ShortestFirst,
    "priority": PriorityOrder,
}

__all__ = ["ORDERS", "Order", "Stage"]
