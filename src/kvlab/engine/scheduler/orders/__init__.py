"""Orders of continuous batching by name: one file each."""

from kvlab.engine.scheduler.orders.base import Order, Stage, StepState
from kvlab.registry import Registry

ORDERS: Registry[type[Order]] = Registry("scheduler.order", __name__)

__all__ = ["ORDERS", "Order", "Stage", "StepState"]
