"""The least time that a run's steps could take on a machine: its roofline (Williams, Waterman, Patterson, 2009).

A step that moves Q bytes and computes W floating-point operations takes at least max(Q / bandwidth, W / rate),
however well the one is hidden behind the other. Counted is what no engine gets around:

    Q  every weight read once, in the output layer only where logits are computed; of each sequence the K and V of
       its context read once in each layer; K and V of the step's tokens written
    W  2 for each weight and token, in the output layer for each row of logits; in attention 4 x heads x head_dim
       for each pair of a query and a token it attends to (queries times keys, then their weights times values)

Activations, looked-up embeddings, softmax and what else is small are left out, so that the bound is a bound. K and
V that sequences share are counted for each of them. A model that fits in the processor's caches may exceed its
roofline, since they are faster than memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.core import StepRecord
from kvlab.engine.plan import EnginePlan
from kvlab.models.config import DecoderConfig
from kvlab.planning.memory import COMPACT_BYTES
from kvlab.simulation.work import within_windows


class MachineRates(NamedTuple):
    """What a machine sustains at most."""

    read_bytes_per_s: float
    flops_per_s: float  # of products in a dtype, of numbers that are in registers
    product_flops_per_s: float = 0.0  # of large matrix products, where it was measured


class StepCost(NamedTuple):
    """What has to be moved and computed."""

    num_bytes: float
    flops: float

    def seconds(self, rates: MachineRates) -> float:
        """The least time it takes."""
        return max(self.num_bytes / rates.read_bytes_per_s, self.flops / rates.flops_per_s)


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a run's steps work on: a model, and how many bytes its weights and its cache take."""

    model: DecoderConfig
    bytes_per_weight: float  # scales of quantised weights included, spread over the weights
    kv_bytes_per_token: int  # of all layers

    def step(self, step: StepRecord) -> StepCost:
        """What a step has to move and compute. Windows count as in `within_windows`."""
        model, tokens = self.model, step.prefill_tokens + step.decode_tokens
        if not step.batch_seqs:
            return StepCost(0.0, 0.0)
        head = model.vocab_size * model.hidden_size
        body = model.body_parameters
        sums = (step.batch_seqs, tokens, step.context_tokens, step.attended_tokens)
        shares = list(within_windows(model, *map(float, sums)))
        read = sum(share * seen for share, seen, _ in shares)
        attended = model.num_layers * sum(share * met for share, _, met in shares)
        kv_bytes = self.kv_bytes_per_token * (tokens + read)
        weights = body + (head if step.sampled_tokens else 0)
        flops: float = 2 * body * tokens + 2 * head * step.sampled_tokens
        flops += 4 * model.num_heads * model.head_dim * attended
        return StepCost(weights * self.bytes_per_weight + kv_bytes, flops)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A run beside its bound. Seconds."""

    bound_s: float  # sum over steps of the least time each could take
    memory_s: float  # part of the bound in steps that memory limits; arithmetic limits the others
    steps_s: float  # that the steps took

    @property
    def share(self) -> float:
        """How much of the roofline was reached, in percent; 0 for a run that computed nothing."""
        return 100 * self.bound_s / self.steps_s if self.steps_s > 0 else 0.0


def run_costs(plan: EnginePlan) -> RunCosts:
    """The costs of a planned engine. Its weights' bytes are spread evenly, whatever each is stored in."""
    weight_bytes = plan.weights.parameters / plan.weights.stored
    if plan.weights_format == "compact":
        weight_bytes = min(weight_bytes, COMPACT_BYTES)
    return RunCosts(plan.model, weight_bytes, plan.pool.bytes_per_token)


def roofline(costs: RunCosts, steps: Iterable[StepRecord], rates: MachineRates) -> Roofline:
    """Compare the steps of a run with what the machine could do at most."""
    bound = memory = taken = 0.0
    for step in steps:
        work = costs.step(step)
        least = work.seconds(rates)
        bound += least
        if work.flops / rates.flops_per_s < least:
            memory += least
        taken += step.end_s - step.start_s
    return Roofline(bound, memory, taken)
