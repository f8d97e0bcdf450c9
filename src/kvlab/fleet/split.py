"""Prefill and decode on different replicas: some compute prompts, the others pull their K and V."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvlab.core import Request, RequestRecord, SamplingParams, StepRecord
from kvlab.errors import RequestRefusedError
from kvlab.fleet.dispatcher import Dispatcher
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.replica import Asked, Replica
from kvlab.fleet.transfer import LinkEnd, LinkRate, PullLink, Transfer, break_off
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.remote import Offered, RemoteTier


class Split:
    """Prefill first: a replica computes a request's prompt and keeps its blocks. Then the request goes to another,
    which pulls the prompt's whole blocks and computes what is behind them.

    `rates` are those of the links to each replica. The first `prefill` replicas compute prompts; the engines of the
    others are built with their `tiers`. A prompt of fewer than `least_tokens`, and a request for one token, is
    served where it decodes.
    """

    def __init__(self, rates: Sequence[LinkRate], prefill: int, least_tokens: int = 0) -> None:
        self.transfers: list[Transfer] = []
        self._rates = rates
        self._sending, self._receiving = ([LinkEnd() for _ in rates] for _ in range(2))
        decoding = range(prefill, len(rates))
        self.tiers: dict[int, RemoteTier] = {index: self._tier(rates[index], index) for index in decoding}
        self._least_tokens = least_tokens
        self._sources: dict[str, int] = {}  # by request: the replica that computes its prompt and keeps the blocks
        self._computed: dict[str, int] = {}  # by request: tokens that it has computed there

    def serve(self, fleet: Dispatcher) -> None:
        """Split requests of this fleet. Comes before the first."""
        self._fleet = fleet

    def takes(self, request: Request) -> bool:
        """Whether a request's prompt is computed apart."""
        least = max(self._least_tokens, self._fleet.views[0].block_size)
        return request.sampling.max_tokens > 1 and len(request.prompt_token_ids) >= least

    def begin(self, asked: Asked, routed: RoutedPrompt, now: float) -> None:
        """A request arrives: its prompt goes to a replica that computes it. Raises RequestRefusedError."""
        request, name = asked.request, asked.request.request_id

        def prefilled(record: RequestRecord) -> None:
            if record.completed:
                hand_over = partial(self._hand_over, asked, routed, record)
                self._fleet.serve_at(record.finished_s, asked._replace(on_finish=forget, serve=hand_over))
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
        break_off(self.transfers, replica, now)
        for end in (self._sending[replica], self._receiving[replica]):
            end.break_off(now)
        for name in [name for name, source in self._sources.items() if source == replica]:
            self._fleet.lost_tokens += self._computed.pop(name, 0)
            self._lose_source(name, now)

    def _lose_source(self, name: str, now: float) -> None:
        """The blocks that are kept of a request's prompt are lost, and what of them is on its way."""
        for index, tier in self.tiers.items():
            tier.withdraw(name)
            replica = self._fleet.replicas[index]
            for load in [replica.loading[key] for key in tier.taken(name)]:
                if load.done_s > now:
                    replica.lose_load(load, now)
        self._let_go(name, now)

    def _ask(self, prompt: Asked, routed: RoutedPrompt, now: float) -> None:
        """A prompt goes to a replica that computes it and keeps its blocks. Raises RequestRefusedError."""
        request = prompt.request
        name = request.request_id
        source = self._sources[name] = self._fleet.choose(routed, now, "prefill")
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
        """What a replica that decodes can pull."""

        def source() -> LinkEnd:
            return self._sending[self._sources[tier.source]]

        def note(ready_s: float, start_s: float, end_s: float, num_bytes: int) -> None:
            self._note(tier.source, target, ready_s, start_s, end_s, num_bytes)

        def pulled(name: str) -> None:
            self._let_go(name, self._fleet.replicas[target].engine.clock.now())

        link = PullLink(rate, own=self._receiving[target], source=source, note=note)
        tier = RemoteTier(rate.block_bytes, link, pulled)
        return tier

    def _note(self, name: str, target: int, ready_s: float, start_s: float, end_s: float, num_bytes: int) -> None:
        """Keep a transfer of a request's prompt."""
        self.transfers.append(Transfer(name, self._sources[name], target, ready_s, start_s, end_s, num_bytes))

    def _contents(self, routed: RoutedPrompt, target: int) -> dict[Key, Offered]:
        return self._rates[target].contents(routed, self._fleet.views[target].block_size)

    def _hand_over(self, asked: Asked, routed: RoutedPrompt, first: RequestRecord, now: float) -> None:
        """A prompt is computed: the request goes to a replica that decodes it. There is nothing to pull if the one
        that computed the prompt has died.
        """
        name, target = asked.request.request_id, self._fleet.choose(routed, now, "decode")
        if name in self._sources:
            self.tiers[target].offer(name, self._contents(routed, target))
        self._decode(asked, routed, target, lambda: first, now)

    def _decode(
        self, asked: Asked, routed: RoutedPrompt, target: int, first: Callable[[], RequestRecord | None], now: float
    ) -> None:
        """A request goes to the replica that decodes it. `first` gives the record of its prompt, if that was
        computed apart. Raises RequestRefusedError.
        """
        name = asked.request.request_id

        def decoded(record: RequestRecord) -> None:
            self._end(name, target, record.finished_s)
            prompt = first()
            asked.on_finish(record if prompt is None else self._joined(prompt, record))

        def again(when_s: float) -> None:
            self._end(name, target, when_s)
            self.begin(asked, routed, when_s)

        try:
            self._fleet.replicas[target].submit(asked._replace(on_finish=decoded, serve=again), now)
        except RequestRefusedError:
            self._end(name, target, now)
            raise

    def _joined(self, first: RequestRecord, record: RequestRecord) -> RequestRecord:
        """The record of a sample, with what became of its prompt where that was computed."""
        computed = 0 if record.sample else first.computed_prompt_tokens
        record = replace(record, computed_prompt_tokens=computed, cached_tokens=first.cached_tokens)
        return replace(record, scheduled_s=first.scheduled_s)

    def _end(self, name: str, target: int, now: float) -> None:
        """A request has ended where it decodes, or was lost or refused there."""
        self.tiers[target].withdraw(name)
        self._let_go(name, now)

    def _let_go(self, name: str, now: float) -> None:
        """Nobody needs the blocks any more that a replica keeps of a request."""
        source = self._sources.pop(name, None)
        self._computed.pop(name, None)
        if source is not None:
            replica = self._fleet.replicas[source]
            replica.core.release(name)
            replica.wake(now)
