"""Decode first: a replica that decodes reserves blocks, then another computes the prompt and pushes its K and V."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from kvlab.core import FinishReason, RequestRecord, StepRecord
from kvlab.errors import RequestRefusedError
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica
from kvlab.fleet.split import Split
from kvlab.fleet.transfer import LinkEnd, LinkRate, Transfer
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import Key, Link
from kvlab.kv.tiers.remote import Offered, RemoteTier


@dataclass(slots=True, eq=False)
class _Reserved:
    """Blocks of a prompt that wait at their target for K and V."""

    keys: set[Key]  # of those that still wait
    contents: list[Offered]  # of all, in the order in which they are computed
    ready_s: float  # they are there from then on
    sent: int = 0  # of them
    ends_s: list[float] = field(default_factory=list)  # of the messages that are planned
    start_s: float = math.inf  # of the first message
    end_s: float = math.inf  # of the last, once all are sent


@dataclass(slots=True, eq=False)
class _Request:
    """A request whose prompt is computed apart."""

    asked: Asked
    routed: RoutedPrompt
    target: int
    computed: int = 0  # tokens of its prompt
    is_asked: bool = False  # whether its prompt was asked for
    first: RequestRecord | None = None  # of its prompt, once that is computed
    reserved: list[_Reserved] = field(default_factory=list)


class _PushTier(RemoteTier):
    """Contents that come as they are computed. An offer stands until it is withdrawn. `reserved` is told whose
    contents wait for them, which, and from when on, and says when they will be there; `released` when one waits no
    more.
    """

    def __init__(
        self,
        rate: LinkRate,
        reserved: Callable[[str, list[Key], float], float],
        released: Callable[[str, Key], None],
    ) -> None:
        super().__init__(rate.block_bytes, _PushLink(self, rate), lambda name: None)
        self._reserved, self._released = reserved, released
        self._held: list[Key] = []  # what is loaded next

    def _offer_of(self, key: Key) -> str:
        """See RemoteTier. The last content of a prompt, which comes first, says whose they are."""
        is_first = not self._held
        self._held.append(key)
        if not is_first:
            return self.source
        names = self._names[key]
        return next((name for name in names if self._offers[name][-1] == key), names[-1])

    def _let_go(self, name: str, key: Key) -> None:
        self._released(name, key)

    def begin(self, ready_s: float) -> float:
        """What was held last waits from now on."""
        keys, self._held = self._held, []
        return self._reserved(self.source, keys, ready_s)


class _PushLink(Link):
    """Says when what was reserved will come: nobody knows, unless it is computed already."""

    def __init__(self, tier: _PushTier, rate: LinkRate) -> None:
        self._tier, self._rate = tier, rate

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        """See Link."""
        return self._tier.begin(ready_s)

    def seconds(self, num_bytes: int) -> float:
        """See Link."""
        return self._rate.seconds(num_bytes)


class DecodeFirst(Split):
    """As SGLang and Dynamo's decode-first hand-shake: a request goes to a replica that decodes, and its prompt to
    another when the first has blocks for it. K and V are sent when the prompt is computed, or each chunk of it, or
    each layer of each chunk, as `fleet.link.send` says; every message has a set-up. A prompt that the first finds
    whole in its cache is not sent away. A request that is preempted before all has come waits for it again.
    """

    def __init__(self, rates: Sequence[LinkRate], prefill: int, least_tokens: int = 0) -> None:
        self._requests = dict[str, _Request]()
        self._receiving = [LinkEnd() for _ in rates]
        super().__init__(rates, prefill, least_tokens)

    def begin(self, asked: Asked, routed: RoutedPrompt, now: float) -> None:
        """A request arrives: it goes to a replica that decodes it. Raises RequestRefusedError."""
        fleet, name = self._fleet, asked.request.request_id
        target = fleet.choose(fleet.router, routed, self.decoding, now, "decode")
        request = self._requests[name] = _Request(asked, routed, target)
        self.tiers[target].offer(name, self._contents(routed, target))

        def decoded(record: RequestRecord) -> None:
            self._end(name, record.finished_s)
            if (first := request.first) is not None:
                computed = 0 if record.sample else first.computed_prompt_tokens
                record = replace(record, computed_prompt_tokens=computed, cached_tokens=first.cached_tokens)
            asked.on_finish(record)

        def again(when_s: float) -> None:
            self._end(name, when_s)
            self.begin(asked, routed, when_s)

        try:
            fleet.replicas[target].submit(asked._replace(on_finish=decoded, again=again), now)
        except RequestRefusedError:
            self._end(name, now)
            raise

    def stepped(self, replica: Replica, record: StepRecord) -> None:
        """See Split: what was computed is sent."""
        messages = list[tuple[float, str, _Reserved, int]]()
        for sequence in (*replica.core.scheduler.running, *replica.core.scheduler.ended):
            name = sequence.request.request_id
            request = self._requests.get(name) if self._sources.get(name) == replica.index else None
            if request is None or sequence.num_computed <= request.computed:
                continue
            cached = 0 if request.computed else sequence.cached_tokens  # by the source: there as the step begins
            request.computed = sequence.num_computed
            for reserved in request.reserved:
                for tokens, start_s, end_s in (
                    (cached, record.start_s, record.start_s),
                    (request.computed, record.start_s, record.end_s),
                ):
                    num_bytes = self._unsent(request, reserved, tokens)
                    moments = self._moments(start_s, end_s) if num_bytes else []
                    messages += [(when_s, name, reserved, num_bytes // len(moments)) for when_s in moments]
        for ready_s, name, reserved, num_bytes in sorted(messages, key=lambda message: message[0]):
            self._send(name, reserved, ready_s, num_bytes)
        for name, reserved in {id(message[2]): message[1:3] for message in messages}.values():
            self._sent(name, reserved, record.end_s)

    def lose(self, replica: int, now: float) -> None:
        """See Split."""
        for name, request in self._requests.items():
            source = self._sources.get(name)
            if source is not None and replica in (source, request.target):
                for reserved in request.reserved:
                    for end_s in reserved.ends_s:
                        self._ends[source].cut(end_s)
                        self._receiving[request.target].cut(end_s)
                    reserved.ends_s.clear()
        super().lose(replica, now)

    def _tier(self, rate: LinkRate, target: int) -> RemoteTier:
        return _PushTier(rate, self._reserve, self._released)

    def _reserve(self, name: str, keys: list[Key], ready_s: float) -> float:
        """A replica has blocks for so much of a request's prompt: when it will be there, where that is known."""
        request = self._requests[name]
        offered = self.tiers[request.target].offered
        reserved = _Reserved(set(keys), sorted(offered[key] for key in keys), ready_s)
        request.reserved.append(reserved)
        if request.first is not None:
            self._send(name, reserved, ready_s, self._unsent(request, reserved, request.computed))
            self._sent(name, reserved, ready_s)
            return reserved.end_s
        if not request.is_asked:
            request.is_asked = True

            self._fleet.at(ready_s, self._prompt(name, request), partial(self._prefill, name, request))
        return math.inf

    def _prompt(self, name: str, request: _Request) -> Asked:
        """A request's prompt, to be computed."""

        def prefilled(record: RequestRecord) -> None:
            if self._requests.get(name) is not request:
                return
            if record.completed:
                request.first = record
            elif record.finish_reason is FinishReason.ABORTED:
                self._fleet.replicas[request.target].engine.abort(name)
            else:
                self._lose(name, request, record.finished_s)

        return Asked(request.asked.request, None, prefilled, partial(self._prefill, name, request))

    def _prefill(self, name: str, request: _Request, now: float) -> None:
        """The prompt goes to a replica that computes it, unless the request has ended."""
        if self._requests.get(name) is request:
            try:
                self._ask(self._prompt(name, request), request.routed, now)
            except RequestRefusedError:
                self._lose(name, request, now)

    def _lose_source(self, name: str, now: float) -> None:
        """See Split. A prompt that is not computed yet is computed by another, and sent from its begin."""
        request = self._requests[name]
        if request.first is not None:
            super()._lose_source(name, now)
            return
        request.computed = 0
        for reserved in request.reserved:
            reserved.sent, reserved.start_s = 0, math.inf
        self._let_go(name, now)

    def _unsent(self, request: _Request, reserved: _Reserved, tokens: int) -> int:
        """So many bytes of what is reserved are computed with these tokens, and are on their way from now on."""
        if self._rates[request.target].config.send == "prompt" and tokens < request.routed.prompt_tokens:
            return 0
        coming = list(takewhile(lambda offered: offered.tokens <= tokens, reserved.contents[reserved.sent :]))
        reserved.sent += len(coming)
        return sum(offered.num_bytes for offered in coming)

    def _moments(self, start_s: float, end_s: float) -> list[float]:
        """When what a step computes can leave."""
        rate = self._rates[0]
        layers = rate.layers if rate.config.send == "layer" and end_s > start_s else 1
        return [start_s + (end_s - start_s) * (layer + 1) / layers for layer in range(layers)]

    def _send(self, name: str, reserved: _Reserved, ready_s: float, num_bytes: int) -> None:
        """A message, when both ends are free."""
        target = self._requests[name].target
        sending, receiving = self._ends[self._sources[name]], self._receiving[target]
        start_s = max(ready_s, reserved.ready_s, sending.free_s, receiving.free_s)
        reserved.start_s = min(reserved.start_s, start_s)
        reserved.ends_s.append(start_s + self._rates[target].seconds(num_bytes))
        for end in (sending, receiving):
            end.take(reserved.ready_s, reserved.ends_s[-1])

    def _sent(self, name: str, reserved: _Reserved, computed_s: float) -> None:
        """If that was all, it is known when it comes."""
        if reserved.sent < len(reserved.contents):
            return
        target = self._requests[name].target
        reserved.end_s = end_s = self._receiving[target].free_s
        num_bytes = sum(content.num_bytes for content in reserved.contents)
        ready_s = max(reserved.ready_s, computed_s)
        sent = Transfer(name, self._sources[name], target, ready_s, reserved.start_s, end_s, num_bytes)
        self.transfers.append(sent)
        self._come(target, reserved, end_s, is_lost=False)

    def _come(self, target: int, reserved: _Reserved, when_s: float, *, is_lost: bool) -> None:
        """What waits goes on then."""
        pool = self._fleet.replicas[target].core.pool
        loading = pool.offload.loading if isinstance(pool, BlockPool) else {}
        load = next((loading[key] for key in reserved.keys if key in loading), None)
        if load is not None and load.done_s == math.inf:
            load.done_s, load.is_lost = when_s, is_lost
            self._fleet.replicas[target].wake(when_s)

    def _released(self, name: str, key: Key) -> None:
        """A content waits no more: it has come, or nobody wants it now."""
        request = self._requests.get(name)
        for reserved in [] if request is None else [waited for waited in request.reserved if key in waited.keys]:
            reserved.keys.discard(key)
            if request is not None and not reserved.keys:
                request.reserved.remove(reserved)
                now = self._fleet.replicas[request.target].core.clock.now()
                if reserved.end_s <= now and not request.reserved:
                    self.tiers[request.target].withdraw(name)
                    self._let_go(name, now)

    def _lose(self, name: str, request: _Request, now: float) -> None:
        """Its prompt is not computed for it any more: what waits for that computes."""
        self.tiers[request.target].withdraw(name)
        for reserved in request.reserved:
            self._come(request.target, reserved, now, is_lost=True)
        self._let_go(name, now)

    def _end(self, name: str, now: float) -> None:
        if (request := self._requests.pop(name, None)) is not None:
            source = self._sources.get(name)
            if source is not None and request.first is None:
                self._fleet.replicas[source].engine.abort(name)
            self._lose(name, request, now)
