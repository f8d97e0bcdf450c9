"""A request's life on a fleet: what the replicas that it was sent to say of it, one behind the other."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from kvlab.core import RequestRecord
from kvlab.fleet.dispatcher import Routed
from kvlab.lab.explain.life_observer import LifeObserver
from kvlab.lab.explain.lives import Cause, Life
from kvlab.lab.run.prompt_tokens import PromptObserver, PromptTokens

Hops = Mapping[str, Sequence[Routed]]  # by request: what its router chose, in that order


def hops_of(routed: Iterable[Routed]) -> dict[str, list[Routed]]:
    """A fleet's choices by request."""
    hops: dict[str, list[Routed]] = {}
    for chosen in routed:
        hops.setdefault(chosen.request_id, []).append(chosen)
    return hops


def joined_life(record: RequestRecord, hops: Sequence[Routed], observers: Sequence[LifeObserver]) -> Life | None:
    """The whole life of a sample that has ended. Its time with a replica that died is lost: it began anew with the
    next. None: the last never had it.
    """
    if not hops:
        return None
    life, (first, *others) = Life(record.key, [], record.arrival_s), _last_attempt(hops)
    if first is not hops[0]:
        life.add(Cause.LOST, first.at_s)
    if first.stage == "decode":
        return _decoded_first(life, record, first, others, observers)
    for hop, after in zip_longest([first, *others], others):
        end_s = record.finished_s if after is None else after.at_s
        sample = 0 if hop.stage == "prefill" else record.sample  # samples have the prompt in common
        own = observers[hop.choice.replica].ended((record.request_id, sample), end_s)
        if own is None:
            return None
        life.follow(own)
    return life


def _last_attempt(hops: Sequence[Routed]) -> Sequence[Routed]:
    """The last of these choices, from where the request began anew for the last time."""
    begins = [place for place, hop in enumerate(hops) if (hop.stage == "decode") == (hops[0].stage == "decode")]
    return hops[max(begins, default=0) :]


def _decoded_first(
    life: Life, record: RequestRecord, decode: Routed, prefills: Sequence[Routed], observers: Sequence[LifeObserver]
) -> Life | None:
    """The life of a request whose blocks were reserved at once where it decodes: while it waits there for K and V,
    what becomes of its prompt elsewhere.
    """
    own = observers[decode.choice.replica].ended(record.key, record.finished_s)
    if own is None:
        return None
    life.follow(own)
    for last in prefills[-1:]:
        prompt = Life(record.key, [], prefills[0].at_s)
        if last is not prefills[0]:
            prompt.add(Cause.LOST, last.at_s)
        if (computed := observers[last.choice.replica].lives.get((record.request_id, 0))) is not None:
            prompt.follow(computed)
        life.detail(Cause.TRANSFER, prompt)
    return life


def prompt_of(
    record: RequestRecord, hops: Sequence[Routed], observers: Sequence[PromptObserver]
) -> PromptTokens | None:
    """What became of its prompt's tokens where that was computed, or pulled without being computed apart."""
    hops = _last_attempt(hops)
    computing = [hop for hop in hops if hop.stage != "decode"]
    last = [*hops[-1:], *computing][-1:]  # found whole where it decodes
    return observers[last[0].choice.replica].prompts.get(record.key) if last else None
