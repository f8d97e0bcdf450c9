"""First come, first served; decode before prefill, so that no next token waits for a prompt (Sarathi-Serve,
OSDI 2024).
"""

from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("fcfs")
class FirstComeFirstServed(Order):
    """What an order does unless it says otherwise."""
