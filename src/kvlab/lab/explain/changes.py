"""What would have helped: a run that is simulated once more, with one thing changed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvlab.config.groups import with_settings
from kvlab.core import Request, RequestRecord
from kvlab.errors import ConfigError
from kvlab.kv.pools import POOLS
from kvlab.lab.explain.lives import Cause
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.plan import RunPlan
from kvlab.lab.run.prompt_tokens import Reason
from kvlab.lab.run.serve import simulated

_QUEUED = (Cause.TOKENS, Cause.SEQUENCES, Cause.BLOCKS)
_SHARED = {Reason.FOUND, Reason.EVICTED}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is changed, in words and as the settings that do it, and what came of it: milliseconds from
    arrival to end of the requests that are asked about, their mean and that of all, and of all the p99.
    """

    what: str
    settings: str
    asked_ms: float
    mean_ms: float
    p99_ms: float


def counterfactuals(
    explained: Explanation, keys: Sequence[SampleKey], on_change: Callable[[str], None] = lambda what: None
) -> list[Change]:
    """A simulated run as it was, and with each of the changes that may help these requests, simulated again."""
    changes = [_measured("as it was", "", list(explained.records.values()), keys)]
    for what, settings, plan in _changed(explained, keys):
        on_change(what)
        changes.append(_measured(what, settings, simulated(plan).records, keys))
    return changes


def _measured(what: str, settings: str, records: Collection[RequestRecord], keys: Collection[SampleKey]) -> Change:
    ended = [record.e2el_ms for record in records if record.completed and record.e2el_ms is not None]
    asked = [record.e2el_ms for record in records if record.key in keys and record.e2el_ms is not None]
    mean, p99 = (float(np.mean(ended)), float(np.percentile(ended, 99))) if ended else (np.nan, np.nan)
    return Change(what, settings, float(np.mean(asked)) if asked else np.nan, mean, p99)


def _changed(explained: Explanation, keys: Collection[SampleKey]) -> Iterator[tuple[str, str, RunPlan]]:
    """The changes, each with its settings and its plan. What has no effect on what these requests waited for, or
    on what their prompts lacked, is left out.
    """
    plan, config = explained.plan, explained.plan.config
    terms = explained.terms_ms(keys)
    reasons = Counter[Reason]()
    for key in keys:
        reasons.update(explained.prompts[key].tokens if key in explained.prompts else {})
    scheduler, shares = config.scheduler, POOLS.get(config.kv.backend).is_paged() and config.kv.prefix_sharing
    if terms.keys() & {Cause.BLOCKS, Cause.RETURN, Cause.AGAIN} or Reason.EVICTED in reasons:
        blocks = f"kv.num_blocks={2 * plan.pool.num_blocks}"
        yield "twice the blocks", "" if plan.groups else blocks, _of_each(plan, _twice_the_blocks)
    settings = list[tuple[str, dict[str, Any]]]()
    if Reason.NOT_SHARED in reasons and POOLS.get(config.kv.backend).is_paged() and not shares:
        settings.append(("prefixes shared", {"kv.prefix_sharing": True}))
    if terms.keys() & {Cause.TOKENS, Cause.STEP, Cause.OTHER_PROMPTS, Cause.PROMPT}:
        budget = scheduler.max_batched_tokens
        for times, tokens in (("twice", 2 * budget), ("half", budget // 2)):
            if tokens >= scheduler.max_batch_size:
                settings.append((f"{times} the tokens of a step", {"scheduler.max_batched_tokens": tokens}))
    if Cause.SEQUENCES in terms and 2 * scheduler.max_batch_size <= scheduler.max_batched_tokens:
        settings.append(("twice the sequences", {"scheduler.max_batch_size": 2 * scheduler.max_batch_size}))
    if terms.keys() & set(_QUEUED):
        for order in ("shortest_first", *(["longest_prefix"] if reasons.keys() & _SHARED else [])):
            settings += [(f"order {order}", {"scheduler.order": order})] * (order != scheduler.order)
    if (fleet := config.fleet).replicas > 1:
        for router in ("least_requests", *(["precise"] if shares else [])):
            settings += [(f"router {router}", {"fleet.router": router})] * (router != fleet.router)
        if shares and not plan.pool.groups and not fleet.neighbours and not fleet.prefill:
            settings.append(("prefixes pulled from neighbours", {"fleet.neighbours": True}))
        settings += [("one replica more", {"fleet.replicas": fleet.replicas + 1})] * (not fleet.groups)
    for what, changed in settings:
        text = ", ".join(f"{key}={str(value).lower()}" for key, value in changed.items())
        with suppress(ConfigError):  # one that a group of replicas cannot have
            yield what, text, _of_each(plan, partial(_with_settings, settings=changed))
    yield "half as many requests", "", replace(plan, requests=_half(plan, keys))


def _of_each(plan: RunPlan, change: Callable[[RunPlan], RunPlan]) -> RunPlan:
    """The plan with a change of all its replicas."""
    return replace(change(plan), groups=tuple(group._replace(plan=change(group.plan)) for group in plan.groups))


def _twice_the_blocks(plan: RunPlan) -> RunPlan:
    return replace(plan, pool=replace(plan.pool, num_blocks=2 * plan.pool.num_blocks))


def _with_settings(plan: RunPlan, settings: dict[str, Any]) -> RunPlan:
    return replace(plan, config=with_settings(plan.config, settings))


def _half(plan: RunPlan, keys: Collection[SampleKey]) -> list[Request]:
    """Every second conversation, and those that are asked about: what twice the replicas would leave."""
    asked, roots = {key[0] for key in keys}, dict[str, int]()
    for request in plan.requests:
        parent = request.follows
        roots[request.request_id] = len(roots) if parent is None else roots[parent]
    kept = {roots[name] for name in asked if name in roots}
    return [own for own in plan.requests if roots[own.request_id] % 2 == 0 or roots[own.request_id] in kept]
