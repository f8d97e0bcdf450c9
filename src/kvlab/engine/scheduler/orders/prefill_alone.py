"""Prompts alone, then answers: the scheduler of SGLang (`get_next_batch_to_run`)."""

from kvlab.engine.scheduler.orders import ORDERS
from kvlab.engine.scheduler.orders.prefill_first import PrefillFirst


@ORDERS.register("prefill_alone")
class PrefillAlone(PrefillFirst):
    """As `prefill_first`; and a step that computes prompts decodes nothing."""

    decodes_beside_prefill = False
