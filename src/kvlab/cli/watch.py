"""kvlab watch: what a running server's prefix cache has, by its KV events, and what was lost by evictions.

kvlab watch events=tcp://127.0.0.1:5557 url=http://127.0.0.1:8000
kvlab watch events=tcp://127.0.0.1:5557 url=http://127.0.0.1:8000 trace=monday.jsonl hash_with=key

For vLLM (--kv-events-config) and kvlab (server.kv_events). It ends after `seconds`, or with Ctrl-C, and says what
was evicted and stored again, and how long after. With the trace that `kvlab record` wrote meanwhile, with tokens
and the same key, also what its requests found, what nobody asked for, and what other policies would have found.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from kvlab.cli.settings import command, setting
from kvlab.config.values import server_root
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.prefix_replay.curves import ReplayCurves
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.watch.server_metrics import ServerMetrics
    from kvlab.lab.watch.view import ServerPool, Verdict


@dataclass
class WatchSettings:
    """What is watched."""

    events: str | None = setting(
        None, "where the server publishes its KV events, as tcp://127.0.0.1:5557", "ADDRESS"
    )
    replay: str | None = setting(None, "where events that were missed can be asked for", "ADDRESS")
    url: str | None = setting(None, "the server, for its metrics", "URL")
    api_key: str | None = setting(None, "its key, for its metrics: '${oc.env:NAME}'", "KEY")
    seconds: float | None = setting(None, "how long; null: until Ctrl-C", "S")
    trace: str | None = setting(None, "what kvlab record wrote of the same time", "FILE")
    hash_with: str | None = setting(None, "what the trace's hashes are keyed with", "FILE")
    json: bool = setting(False, "every figure as JSON; or --json", "true")

    def __post_init__(self) -> None:
        self.url = self.url and server_root(self.url)
        if self.events is None:
            raise ConfigError("events", None, "name where the server publishes its KV events: tcp://127.0.0.1:5557")
        if self.trace is not None and self.hash_with is None:
            text = "is read with the key that its hashes have: record it with hash_with=FILE, and name that here"
            raise ConfigError("trace", self.trace, text)


def _watch(settings: WatchSettings, pool: ServerPool, console: Terminal) -> ServerMetrics | None:
    """Listen to the end. Returns the last metrics."""
    from kvlab.lab.run.interrupt import stop_on_signal
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.watch.server_metrics import read_metrics
    from kvlab.peers.kv_events import EventListener

    listener, metrics = EventListener(pool, str(settings.events), settings.replay), None
    begin = looked = time.monotonic()
    try:
        with stop_on_signal(Terminal(quiet=True)) as should_stop, console.status("no event yet") as status:
            while not should_stop() and (settings.seconds is None or time.monotonic() - begin < settings.seconds):
                listener.hear(0.2)
                if time.monotonic() - looked >= 1:
                    looked = time.monotonic()
                    metrics = read_metrics(settings.url, settings.api_key) if settings.url else None
                    status.update(_line(pool, metrics))
            listener.hear(0)
    finally:
        listener.close()
    return (read_metrics(settings.url, settings.api_key) if settings.url else None) or metrics


def _line(pool: ServerPool, metrics: ServerMetrics | None) -> str:
    """The pool at this moment."""
    of = f" of {metrics.blocks:,}" if metrics is not None and metrics.blocks else ""
    said = f"{len(pool.now):,}{of} blocks, {pool.stored:,} stored, {pool.removed:,} evicted"
    if metrics is not None and metrics.running is not None:
        said += f"; {metrics.running:.0f} running, {metrics.waiting or 0:.0f} waiting"
    return said + (f"; {pool.missed:,} batches missed" if pool.missed else "")


def _verdict(settings: WatchSettings, pool: ServerPool) -> Verdict:
    from kvlab.lab.watch.view import judge
    from kvlab.workloads.trace_format import read_header, read_trace

    trace = str(settings.trace)
    header = read_header(trace, "trace")
    if header.started is None or header.key_id != (pool.hasher.key_id if pool.hasher else None):
        text = "has hashes of another key" if header.started is not None else "does not say when it was recorded"
        raise ConfigError("trace", trace, f"{text}; take one that kvlab record wrote with this hash_with")
    if "tokens" in header.unknown:
        text = "has hashes of texts, and events are of tokens; record it with tokenizer=upstream or a tokenizer"
        raise ConfigError("trace", trace, text)
    return judge(pool, (request for _, request in read_trace(trace)), header.started)


def _curves(settings: WatchSettings, pool: ServerPool, blocks: int) -> ReplayCurves | None:
    """What each policy would have found in the server's pool; None where it is not known."""
    from kvlab.config import WorkloadConfig
    from kvlab.lab.prefix_replay.curves import replay_curves
    from kvlab.lab.prefix_replay.traffic import read_traffic
    from kvlab.registry import registry
    from kvlab.workloads import build_requests

    workload = WorkloadConfig("recorded", "recorded", path=settings.trace, arrival="trace")
    requests = build_requests(workload, vocab_size=2**31, seed=0)
    traffic = read_traffic(requests, pool.block_tokens or 16)
    sizes = [size for size in (blocks, 2 * blocks) if size >= traffic.longest]
    return replay_curves(traffic, "recorded", registry("kv.eviction").names(), sizes) if sizes else None


def _show(pool: ServerPool, metrics: ServerMetrics | None, console: Terminal) -> None:
    said = [
        f"{pool.batches:,} batches of events: {pool.stored:,} blocks stored, {pool.removed:,} evicted, "
        f"{len(pool.now):,} there at the end, {pool.peak:,} at most"
    ]
    if pool.gaps:
        said.append(f"{pool.missed:,} batches were missed, in {pool.gaps:,} gaps: what they had is not known")
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
        said.append(f"its own metrics: {share:.1f} % of {metrics.prompt_tokens:,.0f} prompt tokens found")
    for sentence in said:
        console.print(sentence)


def _show_verdict(held: Verdict, pool: ServerPool, console: Terminal) -> None:
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


@command(__doc__, WatchSettings, bare=False, alone=True)
def main(settings: WatchSettings) -> int:
    from kvlab.extras import need_events
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.traffic import read_key
    from kvlab.lab.watch.view import ServerPool
    from kvlab.workloads.prompt_blocks import BlockHasher

    need_events("events", settings.events)
    console = Terminal(stderr=settings.json)
    pool = ServerPool(BlockHasher(read_key(settings.hash_with), 16) if settings.hash_with else None)
    metrics = _watch(settings, pool, console)
    if settings.url and metrics is None:
        console.print(f"url={settings.url}: gives no /metrics, so that what it found and its size are not known")
    if not settings.json:
        _show(pool, metrics, console)  # whatever becomes of the trace
    verdict = _verdict(settings, pool) if settings.trace else None
    blocks = metrics.blocks if metrics is not None and metrics.blocks else pool.peak
    curves = _curves(settings, pool, blocks) if settings.trace and blocks else None
    if settings.json:
        figures: dict[str, Any] = {
            name: getattr(pool, name)
            for name in ("batches", "stored", "removed", "cleared", "unknown", "gaps", "missed", "peak", "again_s")
        }
        figures |= {"blocks": len(pool.now), "verdict": verdict and asdict(verdict)}
        print(json.dumps(figures | {"replay": curves and curves.as_dict()}, indent=2))
        return 0
    if verdict is not None:
        _show_verdict(verdict, pool, console)
    if curves is not None:
        from kvlab.cli.replay import show

        console.print()
        show(curves, console)
    return 0
