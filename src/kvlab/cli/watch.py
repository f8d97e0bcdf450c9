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
from typing import TYPE_CHECKING, Any

from kvlab.cli.settings import command, setting
from kvlab.config.values import at_least, server_root
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.prefix_replay.curves import ReplayCurves
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.watch.server_metrics import ServerMetrics
    from kvlab.lab.watch.view import ServerPool, Verdict


_FIGURES = ("batches", "before", "stored", "removed", "cleared", "restarts", "unknown", "gaps", "missed", "peak")


@dataclass
class WatchSettings:
    """What is watched."""

    events: str | None = setting(
        None, "where the server publishes its KV events, as tcp://127.0.0.1:5557", "ADDRESS"
    )
    replay: str | None = setting(None, "where events that were missed can be asked for", "ADDRESS")
    url: str | None = setting(None, "the server, for its metrics", "URL")
    api_key: str | None = setting(None, "its key, for its metrics", "'${oc.env:NAME}'")
    seconds: float | None = setting(None, "how long; null: until Ctrl-C", "S")
    trace: str | None = setting(None, "what kvlab record wrote of the same time", "FILE")
    hash_with: str | None = setting(None, "what the trace's hashes are keyed with", "FILE")
    json: bool = setting(False, "every figure as JSON; or --json", "true")

    def __post_init__(self) -> None:
        self.url = self.url and server_root(self.url)
        at_least("seconds", self.seconds, 0)
        if self.events is None:
            raise ConfigError("events", None, "name where the server publishes its KV events: tcp://127.0.0.1:5557")
        if self.trace is not None and self.hash_with is None:
            text = "is read with the key that its hashes have: record it with hash_with=FILE, and name that here"
            raise ConfigError("trace", self.trace, text)


def _watch(settings: WatchSettings, pool: ServerPool, console: Terminal) -> ServerMetrics | str | None:
    """Listen to the end. Returns the last metrics, or why there are none. Raises ConfigError where nobody
    published.
    """
    from kvlab.lab.run.interrupt import stop_on_signal
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.watch.server_metrics import ServerMetrics, read_metrics
    from kvlab.lab.watch.view import line
    from kvlab.peers.kv_events import EventListener

    metrics: ServerMetrics | str | None = None

    def look() -> ServerMetrics | str | None:
        found = read_metrics(settings.url, settings.api_key) if settings.url else None
        return metrics if isinstance(metrics, ServerMetrics) and isinstance(found, str) else found

    listener, nobody = EventListener(pool, str(settings.events), settings.replay), "no publisher was reached"
    begin = looked = time.monotonic()
    try:
        with stop_on_signal(Terminal(quiet=True)) as should_stop, console.status("no event yet") as status:
            while not should_stop() and (settings.seconds is None or time.monotonic() - begin < settings.seconds):
                listener.hear(0.2)
                if time.monotonic() - looked >= 1:
                    looked = time.monotonic()
                    metrics = look()
                    known = metrics if isinstance(metrics, ServerMetrics) else None
                    status.update(line(pool, known) if listener.has_reached else f"{nobody} yet")
            listener.hear(0)
        if not (pool.batches or listener.has_reached):
            raise ConfigError("events", settings.events, f"{nobody}; name where the server publishes its KV events")
        if listener.unanswered:
            console.print(f"replay={settings.replay}: gave no answer; what was missed is not known")
    finally:
        listener.close()
    return look()


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


@command(__doc__, WatchSettings, bare=False, alone=True)
def main(settings: WatchSettings) -> int:
    from kvlab.extras import need_events
    from kvlab.lab.terminal import Terminal
    from kvlab.lab.traffic import read_key
    from kvlab.lab.watch.view import ServerPool, show, show_verdict
    from kvlab.workloads.prompt_blocks import BlockHasher

    need_events("events", settings.events)
    console = Terminal(stderr=settings.json)
    pool = ServerPool(BlockHasher(read_key(settings.hash_with), 16) if settings.hash_with else None)
    metrics = _watch(settings, pool, console)
    if isinstance(metrics, str):
        text = f"gives no /metrics ({metrics}), so that what it found and its size are not known"
        console.print(f"url={settings.url}: {text}")
        metrics = None
    if not settings.json:
        show(pool, metrics, console)  # whatever becomes of the trace
    verdict = _verdict(settings, pool) if settings.trace else None
    blocks = metrics.blocks if metrics is not None and metrics.blocks else pool.peak
    curves = _curves(settings, pool, blocks) if settings.trace and blocks else None
    if settings.json:
        figures: dict[str, Any] = {name: getattr(pool, name) for name in (*_FIGURES, "again_s")}
        figures |= {"blocks": len(pool.now), "verdict": verdict and asdict(verdict)}
        print(json.dumps(figures | {"replay": curves and curves.as_dict()}, indent=2))
        return 0
    if verdict is not None:
        show_verdict(verdict, pool, console)
    if curves is not None:
        from kvlab.lab.prefix_replay.curves import show_curves

        console.print()
        show_curves(curves, console)
    return 0
