"""Prefill and decode on different replicas: some compute prompts, the others pull their K and V."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from kvlab.core import Request, RequestRecord, SamplingParams, StepRecord
from kvlab.errors import RequestRefusedError
from kvlab.fleet.base import Router
from kvlab.fleet.dispatcher import Dispatcher
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica
from kvlab.fleet.transfer import LinkEnd, LinkRate, PullLink, Transfer, break_off
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.remote import Offered, RemoteTier


class Split:
    """Sends a request's prompt to one replica, and the request, when that has computed it, to another, which pulls
    the prompt's whole blocks and computes what is behind them. The first keeps its blocks until they have been
    pulled.

    `rates` are those of the links to each replica. The first `prefill` of them compute prompts; the engines of the
    others are built with their `tiers`.
    `serve` comes before the first request. A prompt of fewer than `least_tokens`, and a request for one token, is
    served where it decodes.
    """

    def __init__(self, rates: Sequence[LinkRate], prefill: int, least_tokens: int = 0) -> None:
        self.transfers: list[Transfer] = []
        self._rates = rates
        self.prefilling: Sequence[int] = range(prefill)
        self.decoding: Sequence[int] = range(prefill, len(rates))
        self.tiers: dict[int, RemoteTier] = {index: self._tier(rates[index], index) for index in self.decoding}
        self._least_tokens = least_tokens
        self._ends = [LinkEnd() for _ in self.prefilling]
        self._sources: dict[str, int] = {}  # who keeps the blocks of a request
        self._computed: dict[str, int] = {}  # tokens of a request's prompt that it has computed

    def serve(self, fleet: Dispatcher, router: Router) -> None:
        """Comes before the first request: to whose replicas the parts go; `router` chooses who computes prompts."""
        self._fleet, self._router = fleet, router

    def takes(self, request: Request) -> bool:
        """Whether a request's prompt is computed apart."""
        size = self._fleet.views[0].block_size
        tokens = len(request.prompt_token_ids)
        return request.sampling.max_tokens > 1 and tokens >= max(self._least_tokens, size)

    def begin(self, asked: Asked, routed: RoutedPrompt, now: float) -> None:
        """A request arrives: its prompt goes to a replica that computes it. Raises RequestRefusedError."""
        fleet, request = self._fleet, asked.request
        name = request.request_id

        def prefilled(record: RequestRecord) -> None:
            if record.completed:
                left = asked._replace(on_finish=forget)
                fleet.at(record.finished_s, left, partial(self._hand_over, asked, routed, record))
            else:
                for sample in range(request.sampling.n):  # which have the prompt in common
                    forget(replace(record, sample=sample))

        def forget(record: RequestRecord) -> None:
            self._let_go(name, record.finished_s)
            asked.on_finish(record)

        self._ask(Asked(request, None, prefilled, partial(self.begin, asked, routed)), routed, now)

    def stepped(self, replica: Replica, record: StepRecord) -> None:
        """A replica has taken a step. Nothing is sent before a prompt is computed."""

    def lose(self, replica: int, now: float) -> None:
        """A replica is about to die: its transfers break off. What was to be pulled from it is computed where it
        was to go.
        """
        break_off(self.transfers, replica, now, self._ends_of)
        for name in [name for name, source in self._sources.items() if source == replica]:
            self._fleet.lost_tokens += self._computed.pop(name, 0)
            self._lose_source(name, now)

    def _ends_of(self, sent: Transfer) -> Iterable[LinkEnd]:
        """The sides of links that a transfer keeps busy."""
        link = self.tiers[sent.target].up
        return (self._ends[sent.source], link.own) if isinstance(link, PullLink) else ()

    def _lose_source(self, name: str, now: float) -> None:
        """What is kept of a request's prompt is lost, and what of it is on its way."""
        for index, tier in self.tiers.items():
            tier.withdraw(name)
            replica = self._fleet.replicas[index]
            pool = replica.core.pool
            loading = pool.offload.loading if isinstance(pool, BlockPool) else {}
            for load in [loading[key] for key in tier.taken(name)]:
                if load.done_s > now:
                    load.is_lost, load.done_s = True, now
                    replica.wake(now)
        self._let_go(name, now)

    def _ask(self, prompt: Asked, routed: RoutedPrompt, now: float) -> None:
        """A prompt goes to a replica that computes it, and keeps its blocks. Raises RequestRefusedError."""
        request = prompt.request
        name = request.request_id
        source = self._sources[name] = self._fleet.choose(self._router, routed, self.prefilling, now, "prefill")
        replica = self._fleet.replicas[source]
        replica.core.keep(name)
        prompt_alone = SamplingParams(max_tokens=1, ignore_eos=True, seed=request.sampling.seed)

        def computed(record: RequestRecord) -> None:
            if record.completed:
                self._computed[name] = (record.computed_prompt_tokens or 0) - record.cached_tokens
            prompt.on_finish(record)

        asked = prompt._replace(request=replace(request, sampling=prompt_alone), on_finish=computed)
        try:
            replica.submit(asked, now)
        except RequestRefusedError:
            self._let_go(name, now)
            raise

    def _tier(self, rate: LinkRate, target: int) -> RemoteTier:
        """What is offered to a replica that decodes."""

        def source() -> LinkEnd:
            return self._ends[self._sources[tier.source]]

        def note(ready_s: float, start_s: float, end_s: float, num_bytes: int) -> None:
            name = tier.source
            sent = Transfer(name, self._sources[name], target, ready_s, start_s, end_s, num_bytes)
            self.transfers.append(sent)

        def pulled(name: str) -> None:
            self._let_go(name, self._fleet.replicas[target].engine.clock.now())

        tier = RemoteTier(rate.block_bytes, PullLink(rate, source, note), pulled)
        return tier

    def _contents(self, routed: RoutedPrompt, target: int) -> dict[Key, Offered]:
        return self._rates[target].contents(routed, self._fleet.views[target].block_size)

    def _hand_over(self, asked: Asked, routed: RoutedPrompt, first: RequestRecord, now: float) -> None:
        """A prompt is computed: the request goes to a replica that decodes it, and finds nothing to pull if the one
        that computed it has died.
        """
        fleet, name = self._fleet, asked.request.request_id
        target = fleet.choose(fleet.router, routed, self.decoding, now, "decode")
        tier = self.tiers[target]

        def decoded(record: RequestRecord) -> None:
            tier.withdraw(name)
            self._let_go(name, record.finished_s)
            computed = 0 if record.sample else first.computed_prompt_tokens
            record = replace(record, scheduled_s=first.scheduled_s, computed_prompt_tokens=computed)
            asked.on_finish(replace(record, cached_tokens=first.cached_tokens))

        def again(when_s: float) -> None:
            tier.withdraw(name)
            self._let_go(name, when_s)
            self.begin(asked, routed, when_s)

        if name in self._sources:
            tier.offer(name, self._contents(routed, target))
        try:
            fleet.replicas[target].submit(asked._replace(on_finish=decoded, again=again), now)
        except RequestRefusedError:
            tier.withdraw(name)
            raise

    def _let_go(self, name: str, now: float) -> None:
        """Nobody needs what a replica keeps of a request."""
        source = self._sources.pop(name, None)
        self._computed.pop(name, None)
        if source is not None:
            replica = self._fleet.replicas[source]
            replica.core.release(name)
            replica.wake(now)
