"""Which sequence gives up its memory when memory runs out (recomputation as in vLLM, SOSP 2023, section 4.5)."""

from collections.abc import Callable

from kvlab.core import Sequence
from kvlab.registry import Registry

#: Picks one of the running sequences, of which there is at least one, in the order of their admission. In each
#: policy some sequence is never picked before it ends, so that work goes on.
Victim = Callable[[list[Sequence]], Sequence]

VICTIMS: Registry[Victim] = Registry("scheduler.preemption.victim")
#: What an order preempts by unless a victim is named; others: last_admitted.
VICTIM_OF = {"priority": "priority", "prefill_alone": "fewest_generated"}


@VICTIMS.register("last_admitted")
def last_admitted(running: list[Sequence]) -> Sequence:
    """The one admitted last, which others have waited for least."""
    return running[-1]


@VICTIMS.register("fewest_generated")
def fewest_generated(running: list[Sequence]) -> Sequence:
    """The one with the fewest output tokens, of equals that with the longest prompt, then the last admitted: as in
    SGLang.
    """
    return min(reversed(running), key=lambda sequence: (sequence.num_output_tokens, -sequence.num_prompt_tokens))


@VICTIMS.register("priority")
def lowest_priority(running: list[Sequence]) -> Sequence:
    """The one with the largest priority number, of equals the one that came last, as in vLLM."""
    return max(reversed(running), key=lambda sequence: (sequence.request.priority, sequence.request.arrival_s))
