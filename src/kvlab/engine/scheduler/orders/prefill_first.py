"""Prompts before answers: first tokens come soonest, at the price of stalls in between (Orca, OSDI 2022; vLLM, SOSP
2023).
"""

from kvlab.engine.scheduler.orders import ORDERS, Order, Stage


@ORDERS.register("prefill_first")
class PrefillFirst(Order):
    """First come, first served; sequences in prefill, and those admitted, get a step's tokens before those that
    decode.
    """

    stages = (Stage.PREFILL, Stage.ADMIT, Stage.DECODE)
