"""What a server's prefix cache has, as its KV events tell it, and what its recorded requests found there; also in
sentences.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvlab.lab.terminal import Terminal
from kvlab.lab.watch.server_metrics import ServerMetrics
from kvlab.peers.kv_events import Name, batch_events, event_fields
from kvlab.workloads.prompt_blocks import BlockHasher
from kvlab.workloads.trace_format import TracedRequest


@dataclass(slots=True)
class Presence:
    """When a content was in the pool: from each of `since` on to the same of `until`, which may lack the last."""

    since: list[float] = field(default_factory=list)
    until: list[float] = field(default_factory=list)

    def at(self, when: float) -> bool:
        """Whether it was there."""
        number = bisect_right(self.since, when) - 1
        return number >= 0 and (number >= len(self.until) or when < self.until[number])


@dataclass(slots=True)
class ServerPool:
    """A pool by its events. Times are seconds since 1970, by the server's clock. With a `hasher`, contents have the
    hashes of a trace that was recorded with the same key, one for each of its blocks of `trace_tokens`.
    """

    hasher: BlockHasher | None = None
    trace_tokens: int = 16
    block_tokens: int | None = None  # of the server
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unknown: int = 0  # removals of what was stored before anybody watched, or in batches that were missed
    batches: int = 0
    before: int = 0  # batches that were sent before the first that was heard
    gaps: int = 0
    missed: int = 0  # batches
    peak: int = 0
    again_s: list[float] = field(default_factory=list)  # from each eviction that was regretted until it was stored
    now: dict[Name, list[int]] = field(default_factory=dict)  # what is there, and its hashes in a trace
    presences: dict[int, Presence] = field(default_factory=dict)  # by the hash in a trace
    _digests: dict[Name, bytes] = field(default_factory=dict)  # the last hash of each content that was ever there
    _gone: dict[Name, float] = field(default_factory=dict)
    expected: int | None = None  # the number of the next batch
    latest: float = 0.0  # when the last one was made
    restarts: int = 0
    _may_be_new: bool = False

    def reconnected(self) -> None:
        """See EventTaker: if numbers do not go on, the server has begun again."""
        self._may_be_new = True

    def take(self, number: int, payload: Sequence[Any]) -> None:
        """Take a batch, whose `number` should be the expected one. Raises EventError."""
        when, events = batch_events(number, payload)
        if self.expected is None:
            self.before = number
        missed = 0 if self.expected is None else number - self.expected
        if missed < 0 and when <= self.latest:  # asked for again, or sent twice
            return
        if missed < 0 or (missed and self._may_be_new):  # of one that goes on a few are missed at most
            self._begin_again(when)
            missed = number
        self.gaps += missed > 0
        self.missed += missed
        self.expected, self.latest, self._may_be_new = number + 1, when, False
        self.batches += 1
        for event in events:
            self._event(event, when)
        self.peak = max(self.peak, len(self.now))

    def _begin_again(self, when: float) -> None:
        """The server has begun anew, and counts from 0: what it had is gone, and nothing was evicted."""
        self.restarts += 1
        for hashes in self.now.values():
            for block in hashes:
                self.presences[block].until.append(when)
        self.now.clear()
        self._gone.clear()

    def _event(self, event: Any, when: float) -> None:
        kind, values = event_fields(event)
        if values.get("group_idx"):  # of the first group of layers alone
            return
        if kind == "BlockStored":
            self._store(values, when)
        elif kind == "BlockRemoved":
            for name in values["block_hashes"]:
                self._remove(name, when)
        elif kind == "AllBlocksCleared":
            self.cleared += 1
            for name in list(self.now):
                self._remove(name, when)

    def _store(self, values: Mapping[str, Any], when: float) -> None:
        names, tokens, size = values["block_hashes"], values["token_ids"], values["block_size"]
        self.block_tokens = size
        last = self._digests.get(values["parent_block_hash"], b"")
        is_known = values["parent_block_hash"] is None or bool(last)
        for number, name in enumerate(names):
            self.stored += 1
            if name in self._gone:
                self.again_s.append(when - self._gone.pop(name))
            hashes: list[int] = []
            if self.hasher is not None and is_known and size % self.trace_tokens == 0:
                digests = self.hasher.behind(last, tokens[number * size : (number + 1) * size])
                last, hashes = digests[-1], [int.from_bytes(digest, "big") for digest in digests]
                self._digests[name] = last
            for block in hashes if name not in self.now else ():
                self.presences.setdefault(block, Presence()).since.append(when)
            self.now[name] = hashes

    def _remove(self, name: Name, when: float) -> None:
        hashes = self.now.pop(name, None)
        if hashes is None:
            self.unknown += 1
            return
        self.removed += 1
        self._gone[name] = when
        for block in hashes:
            self.presences[block].until.append(when)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trace's requests found in a pool: prompt tokens; those that the server said were cached, and those
    that were there by the events when it came; requests in which both agree, in which the server found more, less.
    Requests of which the server did not say it are counted as `unsaid` alone. `unasked_blocks` are in the pool at
    the end, and only the request that brought them has asked for them.
    """

    prompt_tokens: int
    said_tokens: int
    there_tokens: int
    agree: int
    more: int
    less: int
    unsaid: int
    unasked_blocks: int


def judge(pool: ServerPool, requests: Iterable[TracedRequest], started: float) -> Verdict:
    """Hold a trace's requests against the events. `started`: when the trace's time was 0."""
    prompt = said = there = agree = more = less = unsaid = 0
    asked: dict[int, int] = {}
    size = pool.block_tokens or pool.trace_tokens
    for request in requests:
        hashes, when = request.hashes or (), started + (request.arrival_s or 0.0)
        hits = 0
        for block in hashes:
            asked[block] = asked.get(block, 0) + 1
        if (cached := request.cached_tokens) is None:
            unsaid += 1
            continue
        for block in hashes:
            presence = pool.presences.get(block)
            if presence is None or not presence.at(when):
                break
            hits += pool.trace_tokens
        hits = min(hits // size, (request.prompt_tokens - 1) // size) * size  # one token is always computed
        prompt, said, there = prompt + request.prompt_tokens, said + cached, there + hits
        agree += cached == hits
        more += cached > hits
        less += cached < hits
    unasked = sum(bool(hashes) and asked.get(hashes[-1], 0) < 2 for hashes in pool.now.values())
    return Verdict(prompt, said, there, agree, more, less, unsaid, unasked)


def line(pool: ServerPool, metrics: ServerMetrics | None) -> str:
    """The pool at this moment."""
    of = f" of {metrics.blocks:,}" if metrics is not None and metrics.blocks else ""
    said = f"{len(pool.now):,}{of} blocks, {pool.stored:,} stored, {pool.removed:,} evicted"
    if metrics is not None and metrics.running is not None:
        said += f"; {metrics.running:.0f} running, {metrics.waiting or 0:.0f} waiting"
    return said + (f"; {pool.missed:,} batches missed" if pool.missed else "")


def show(pool: ServerPool, metrics: ServerMetrics | None, console: Terminal) -> None:
    """What the events told, and the server's own metrics."""
    said = [
        f"{pool.batches:,} batches of events: {pool.stored:,} blocks stored, {pool.removed:,} evicted, "
        f"{len(pool.now):,} there at the end, {pool.peak:,} at most"
    ]
    if pool.before:
        was = "batch was" if pool.before == 1 else "batches were"
        said.append(
            f"{pool.before:,} {was} sent before: what is there from then is not known, nor counted; replay=ADDRESS "
            "asks for those that the server still has"
        )
    if pool.gaps:
        said.append(f"{pool.missed:,} batches were missed, in {pool.gaps:,} gaps: what they had is not known")
    if pool.restarts:
        times = "once" if pool.restarts == 1 else f"{pool.restarts} times"
        said.append(f"the server began again {times}: what it had then is gone, and is not counted as evicted")
    if pool.unknown:
        said.append(f"{pool.unknown:,} evicted blocks were stored before, or in what was missed")
    if pool.again_s:
        share = 100 * len(pool.again_s) / max(pool.removed, 1)
        said.append(
            f"{len(pool.again_s):,} blocks, {share:.1f} % of those evicted, were stored again: "
            f"{median(pool.again_s):,.1f} s later in the median, {min(pool.again_s):,.1f} s at least"
        )
    if metrics is not None and metrics.prompt_tokens:
        share = 100 * (metrics.hit_tokens or 0) / metrics.prompt_tokens
        said.append(
            f"its own metrics: {share:.1f} % of {metrics.prompt_tokens:,.0f} prompt tokens found since it began"
        )
    for sentence in said:
        console.print(sentence)


def show_verdict(held: Verdict, pool: ServerPool, console: Terminal) -> None:
    """How far recorded requests agree with the events."""
    if held.unsaid:
        advice = (
            "clients of streams ask with include_usage, and vLLM is started with --enable-prompt-tokens-details"
        )
        console.print(f"{held.unsaid:,} recorded requests do not say what the server found; {advice}")
    count = held.agree + held.more + held.less
    said, there = (100 * tokens / max(held.prompt_tokens, 1) for tokens in (held.said_tokens, held.there_tokens))
    share = 100 * held.unasked_blocks / max(len(pool.now), 1)
    if count:
        console.print(
            f"{count:,} recorded requests: the server found {said:.1f} % of their prompt tokens; by its events "
            f"{there:.1f} % were there when they came. Both agree in {held.agree:,} requests; in {held.more:,} it "
            f"found more, in {held.less:,} less"
        )
    console.print(f"{share:.1f} % of the blocks that are there were asked for by one request alone")
