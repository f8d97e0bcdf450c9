"""Reads a server's metrics."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

_MOST_S = 5.0  # for an answer
_METRIC = re.compile(r"^vllm:(\w+?)(?:\{(.*?)\})? ([-+\d.eE]+|NaN)$", re.MULTILINE)
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What `/metrics` says; None: it does not."""

    running: float | None = None
    waiting: float | None = None
    prompt_tokens: float | None = None  # that were looked up
    hit_tokens: float | None = None
    blocks: int | None = None


def read_metrics(url: str) -> ServerMetrics | None:
    """The metrics of a server; None where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_MOST_S) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    found = {name: (labels or "", float(value)) for name, labels, value in _METRIC.findall(text)}

    def value(*names: str) -> float | None:
        return next((found[name][1] for name in names if name in found), None)

    blocks = _BLOCKS.search(found.get("cache_config_info", ("", 0.0))[0])
    return ServerMetrics(
        value("num_requests_running"),
        value("num_requests_waiting"),
        value("prefix_cache_queries_total", "prefix_cache_queries"),
        value("prefix_cache_hits_total", "prefix_cache_hits"),
        int(blocks[1]) if blocks else None,
    )
