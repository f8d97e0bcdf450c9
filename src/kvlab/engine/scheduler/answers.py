"""Whether what orders, policies and victims' policies answer can be used: those of a plugin may answer anything."""

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any, cast

from kvlab.config import SchedulerConfig
from kvlab.core import Sequence
from kvlab.engine.scheduler.orders import Order, Stage
from kvlab.engine.scheduler.waiting_queue import WaitingQueue
from kvlab.errors import ConfigError, shown


def check_stages(order: Order, config: SchedulerConfig) -> None:
    """Raise ConfigError for an order whose steps have not all stages, each once."""
    stages: object = order.stages
    is_listed = isinstance(stages, tuple | list) and len(stages) == len(Stage)
    if not is_listed or not all(stage in order.stages for stage in Stage):
        text = f"has stages {shown(stages)}; must have each of {', '.join(map(str, Stage))} once"
        raise ConfigError("scheduler.order", config.order, text)


def decoding_of(order: Order, config: SchedulerConfig, sequences: list[Sequence], budget: int) -> list[Sequence]:
    """Those of the sequences that the order lets decode. Raises ConfigError for any others."""
    chosen: object = order.decoding(sequences, budget)
    if type(order).decoding is Order.decoding:
        return cast("list[Sequence]", chosen)
    given = set(map(id, sequences))  # what was not given may have no hash
    if isinstance(chosen, list | tuple) and len(chosen) <= budget:
        distinct = set(map(id, chosen))
        if len(distinct) == len(chosen) and distinct <= given:
            return list(chosen)
    text = f"decoding returned {_named(chosen)}; must be a list of those given, {budget} at most"
    raise ConfigError("scheduler.order", config.order, text)


def check_chosen(sequence: object, waiting: WaitingQueue, count: int, config: SchedulerConfig) -> None:
    """Raise ConfigError for what an order chose to admit, unless it waits or is None, and where not as many wait as
    it was given.
    """
    if len(waiting) != count:
        text = f"choose left {len(waiting)} of {count} waiting; it may only read the queue that it is given"
        raise ConfigError("scheduler.order", config.order, text)
    if sequence is not None and not (isinstance(sequence, Sequence) and sequence in waiting):
        raise ConfigError("scheduler.order", config.order, f"chose {_named(sequence)}, which does not wait")


def check_victim(victim: object, config: SchedulerConfig) -> None:
    """Raise ConfigError for what is to give up its blocks and does not run."""
    if not isinstance(victim, Sequence) or victim.slot is None:
        text = f"returned {_named(victim)}; must be one that runs"
        raise ConfigError("scheduler.preemption.victim", config.preemption.victim, text)


def check_answers(policy: object, contract: type, config: SchedulerConfig) -> None:
    """From now on a method of a plugin's policy that returns None, where that of the contract does not, raises
    ConfigError.
    """
    for name, asked in vars(contract).items():
        if name.startswith("_") or not isfunction(asked) or getattr(type(policy), name) is asked:
            continue
        returns = str(asked.__annotations__["return"])
        if "None" not in returns:
            text = f"{type(policy).__name__}.{name} returned None; must be {returns}"
            error = ConfigError("scheduler.policy", config.policy, text)
            setattr(policy, name, _answering(getattr(policy, name), error))


def _answering(method: Callable[..., Any], error: ConfigError) -> Callable[..., Any]:
    """The same method; an answer that is None is an error."""

    @wraps(method)
    def asked(*arguments: Any, **others: Any) -> Any:
        if (answer := method(*arguments, **others)) is None:
            raise error
        return answer

    return asked


def _named(answer: object) -> str:
    """An answer in a message."""
    answer = [_named(each) for each in answer] if isinstance(answer, list) else answer
    return f"request {shown(answer.request.request_id)}" if isinstance(answer, Sequence) else shown(answer)
