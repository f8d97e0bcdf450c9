"""Decode first: a replica that decodes reserves blocks, then another computes the prompt and pushes its K and V."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from operator import itemgetter

from kvlab.core import FinishReason, RequestRecord, StepRecord
from kvlab.errors import RequestRefusedError
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica
from kvlab.fleet.split import Split
from kvlab.fleet.transfer import LinkRate
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.loads import Load
from kvlab.kv.tiers.remote import Offered, RemoteTier


@dataclass(slots=True, eq=False)
class _Request:
    """A request that a replica, its `target`, decodes while another computes its prompt."""

    asked: Asked
    routed: RoutedPrompt
    target: int
    computed: int = 0  # tokens of its prompt, where that is computed
    is_asked: bool = False  # whether its prompt was sent to another
    first: RequestRecord | None = None  # the record of its prompt, once that is computed
    reserved: list["_Reserved"] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The request's own."""
        return self.asked.request.request_id


@dataclass(slots=True, eq=False)
class _Reserved:
    """Blocks that wait at a request's target for K and V of its prompt."""

    request: _Request
    keys: set[Key]  # the contents that have not come
    contents: list[Offered]  # all of them, in the order in which they are computed
    ready_s: float  # when the blocks were reserved
    sent: int = 0  # contents that are sent
    start_s: float = math.inf  # when the first message begins
    last_s: float = 0.0  # when the last message ends of those that are planned
    end_s: float = math.inf  # when the last ends, once all are sent


class _PushTier(RemoteTier):
    """Contents that are sent as they are computed. An offer stands until it is withdrawn. `reserved` is called when
    blocks wait for contents, with the request, the contents and the time, and returns when they will be there;
    `released` when one of them does not wait any more. The tier is its own link.
    """

    def __init__(
        self,
        rate: LinkRate,
        reserved: Callable[[str, list[Key], float], float],
        released: Callable[[str, Key], None],
    ) -> None:
        super().__init__(rate.block_bytes, self, lambda name: None)
        self._rate, self._reserved, self._released = rate, reserved, released
        self._held: list[Key] = []  # what is loaded next

    def _offer_of(self, key: Key) -> str:
        """See RemoteTier. A prompt's last content is held first: its offer is that of all."""
        is_first = not self._held
        self._held.append(key)
        if not is_first:
            return self.source
        names = self._names[key]
        return next((name for name in names if self._offers[name][-1] == key), names[-1])

    def _let_go(self, name: str, key: Key) -> None:
        self._released(name, key)

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        """See Link. What was held last waits from `ready_s` on."""
        keys, self._held = self._held, []
        return self._reserved(self.source, keys, ready_s)

    def seconds(self, num_bytes: int) -> float:
        """See Link."""
        return self._rate.seconds(num_bytes)


class DecodeFirst(Split):
    """The hand-shake of SGLang's and Dynamo's decode-first: a request goes to a replica that decodes, and its
    prompt to another as soon as the first has blocks for it. K and V are sent when the prompt is computed, or each
    chunk of it, or each layer of each chunk (`fleet.link.send`), in messages that each have a set-up. A prompt that
    is whole in the first's cache is not sent away. A request that is preempted before all has come waits for it
    again.
    """

    def __init__(self, rates: Sequence[LinkRate], prefill: int, least_tokens: int = 0) -> None:
        super().__init__(rates, prefill, least_tokens)
        self._requests: dict[str, _Request] = {}

    def begin(self, asked: Asked, routed: RoutedPrompt, now: float) -> None:
        """A request arrives: it goes to a replica that decodes it. Raises RequestRefusedError."""
        name, target = asked.request.request_id, self._fleet.choose(routed, now, "decode")
        request = self._requests[name] = _Request(asked, routed, target)
        self.tiers[target].offer(name, self._contents(routed, target))
        self._decode(asked, routed, target, lambda: request.first, now)

    def stepped(self, replica: Replica, record: StepRecord) -> None:
        """See Split: what was computed is sent."""
        messages = list[tuple[float, _Reserved, int]]()
        for sequence in (*replica.core.scheduler.running, *replica.core.scheduler.ended):
            name = sequence.request.request_id
            request = self._requests.get(name) if self._sources.get(name) == replica.index else None
            if request is not None and sequence.num_computed > request.computed:
                cached = 0 if request.computed else sequence.cached_tokens  # there as the step begins
                request.computed = sequence.num_computed
                for reserved in request.reserved:
                    messages += self._messages(reserved, cached, record.start_s, record.start_s)
                    messages += self._messages(reserved, request.computed, record.start_s, record.end_s)
        for ready_s, reserved, num_bytes in sorted(messages, key=itemgetter(0)):
            self._send(reserved, ready_s, num_bytes)
        for reserved in dict.fromkeys(reserved for _, reserved, _ in messages):
            self._sent(reserved, record.end_s)

    def lose(self, replica: int, now: float) -> None:
        """See Split. Of a prompt whose K and V have all come the rest is not computed again."""
        for request in self._requests.values():
            if replica in (request.target, self._sources.get(request.name)):
                for reserved in request.reserved:
                    self._note_part(reserved)
        super().lose(replica, now)
        for request in list(self._requests.values()):
            if replica != request.target and not self._is_offered(request):
                self._fleet.replicas[replica].abort(request.name, now)

    def _joined(self, first: RequestRecord, record: RequestRecord) -> RequestRecord:
        """See Split. Where it decodes it was scheduled before its prompt was sent away."""
        return replace(super()._joined(first, record), scheduled_s=record.scheduled_s)

    def _tier(self, rate: LinkRate, target: int) -> RemoteTier:
        return _PushTier(rate, self._reserve, self._released)

    def _reserve(self, name: str, keys: list[Key], ready_s: float) -> float:
        """A replica has blocks for these contents of a request's prompt: returns when they will be there, infinite
        while that is not known.
        """
        request = self._requests[name]
        offered = self.tiers[request.target].offered
        reserved = _Reserved(request, set(keys), sorted(offered[key] for key in keys), ready_s)
        request.reserved.append(reserved)
        if request.first is not None:
            self._send(reserved, ready_s, self._unsent(reserved, request.computed))
            self._sent(reserved, ready_s)
            return reserved.end_s
        if not request.is_asked:
            request.is_asked = True
            self._fleet.serve_at(ready_s, self._prompt(request))
        return math.inf

    def _prompt(self, request: _Request) -> Asked:
        """A request's prompt, as another replica is asked for it."""

        def prefilled(record: RequestRecord) -> None:
            if self._requests.get(request.name) is not request:
                return
            if record.completed:
                request.first = record
            elif not self._is_offered(request):  # all of it has come, and the target computes what is behind
                request.first = replace(record, computed_prompt_tokens=request.routed.prompt_tokens)
            elif record.finish_reason is FinishReason.ABORTED:
                self._fleet.replicas[request.target].abort(request.name, record.finished_s)
            else:
                self._lose(request, record.finished_s)

        return Asked(request.asked.request, None, prefilled, partial(self._prefill, request))

    def _prefill(self, request: _Request, now: float) -> None:
        """The prompt goes to a replica that computes it, unless the request has ended."""
        if self._requests.get(request.name) is request:
            try:
                self._ask(self._prompt(request), request.routed, now)
            except RequestRefusedError:
                self._lose(request, now)

    def _lose_source(self, name: str, now: float) -> None:
        """See Split. A prompt that is not computed yet is computed by another, which sends all of it."""
        request = self._requests[name]
        if request.first is not None:
            super()._lose_source(name, now)
            return
        waiting = [reserved for reserved in request.reserved if reserved.end_s > now]
        if request.reserved and not waiting:
            super()._end(name, request.target, now)
            return
        request.computed, loading = 0, self._fleet.replicas[request.target].loading
        for reserved in waiting:
            reserved.sent, reserved.start_s, reserved.end_s = 0, math.inf, math.inf
            for key in reserved.keys & loading.keys():
                loading[key].done_s = math.inf
        self._let_go(name, now)

    def _is_offered(self, request: _Request) -> bool:
        """Whether its target has not all K and V of its prompt yet, and they may come."""
        return self.tiers[request.target].offers(request.name)

    def _messages(
        self, reserved: _Reserved, tokens: int, start_s: float, end_s: float
    ) -> list[tuple[float, _Reserved, int]]:
        """What a step can send once it has computed so many tokens of the prompt, between its start and its end:
        when each message is ready, where it goes, and its bytes.
        """
        num_bytes, rate = self._unsent(reserved, tokens), self._rates[0]
        layers = rate.layers if rate.config.send == "layer" and end_s > start_s else 1
        times_s = [start_s + (end_s - start_s) * (layer + 1) / layers for layer in range(layers)]
        return [(when_s, reserved, num_bytes // layers) for when_s in times_s] if num_bytes else []

    def _unsent(self, reserved: _Reserved, tokens: int) -> int:
        """The bytes of contents that these tokens complete. From now on they count as sent."""
        if self._rates[0].config.send == "prompt" and tokens < reserved.request.routed.prompt_tokens:
            return 0
        coming = list(takewhile(lambda offered: offered.tokens <= tokens, reserved.contents[reserved.sent :]))
        reserved.sent += len(coming)
        return sum(offered.num_bytes for offered in coming)

    def _send(self, reserved: _Reserved, ready_s: float, num_bytes: int) -> None:
        """Plan a message for when both ends are free."""
        request = reserved.request
        sending, receiving = self._sending[self._sources[request.name]], self._receiving[request.target]
        start_s = max(ready_s, reserved.ready_s, sending.free_s, receiving.free_s)
        end_s = start_s + self._rates[request.target].seconds(num_bytes)
        reserved.start_s, reserved.last_s = min(reserved.start_s, start_s), end_s
        sending.take(receiving, reserved.ready_s, end_s)

    def _sent(self, reserved: _Reserved, computed_s: float) -> None:
        """Once all contents are sent it is known when they come, and the target wakes then."""
        if reserved.sent < len(reserved.contents):
            return
        request = reserved.request
        reserved.end_s = reserved.last_s
        num_bytes = sum(content.num_bytes for content in reserved.contents)
        ready_s = max(reserved.ready_s, computed_s)
        self._note(request.name, request.target, ready_s, reserved.start_s, reserved.end_s, num_bytes)
        if (load := self._load(reserved)) is not None:
            load.done_s = reserved.end_s
            self._fleet.replicas[request.target].wake(reserved.end_s)

    def _note_part(self, reserved: _Reserved) -> None:
        """Record the transfer of the contents that were sent, where the others never will be."""
        if reserved.sent < len(reserved.contents) and reserved.start_s < math.inf:
            num_bytes = sum(content.num_bytes for content in reserved.contents[: reserved.sent])
            start_s, reserved.start_s = reserved.start_s, math.inf  # so that it is kept once
            request = reserved.request
            self._note(request.name, request.target, start_s, start_s, reserved.last_s, num_bytes)

    def _load(self, reserved: _Reserved) -> Load | None:
        """The target's load of what is reserved, as long as its end is not known."""
        loading = self._fleet.replicas[reserved.request.target].loading
        load = next((loading[key] for key in reserved.keys if key in loading), None)
        return load if load is not None and load.done_s == math.inf else None

    def _released(self, name: str, key: Key) -> None:
        """A content has come, or nobody waits for it any more."""
        request = self._requests.get(name)
        if request is None:
            return
        for reserved in [waited for waited in request.reserved if key in waited.keys]:
            reserved.keys.discard(key)
            if not reserved.keys:
                self._note_part(reserved)
                request.reserved.remove(reserved)
                now = self._fleet.replicas[request.target].core.clock.now()
                if reserved.end_s <= now and not request.reserved:
                    super()._end(name, request.target, now)

    def _lose(self, request: _Request, now: float) -> None:
        """No other replica computes its prompt any more: the target computes what is missing."""
        for reserved in request.reserved:
            self._note_part(reserved)
        super()._end(request.name, request.target, now)
        for reserved in request.reserved:
            if (load := self._load(reserved)) is not None:
                self._fleet.replicas[request.target].lose_load(load, now)

    def _end(self, name: str, target: int, now: float) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            source = self._sources.get(name)
            if source is not None and request.first is None:
                self._fleet.replicas[source].abort(name, now)
            self._lose(request, now)
