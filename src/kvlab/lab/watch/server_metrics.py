"""Reads a server's metrics."""

import urllib.request
from dataclasses import dataclass
from urllib.error import HTTPError

from kvlab.peers.prometheus import block_tokens, cache_slots, kept_lines, read_series

_MOST_S = 5.0  # for an answer


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What `/metrics` says; None: it does not."""

    running: float | None = None
    waiting: float | None = None
    prompt_tokens: float | None = None  # that were looked up
    hit_tokens: float | None = None
    blocks: int | None = None


def read_metrics(url: str, api_key: str | None = None) -> ServerMetrics | str:
    """The metrics of a server, or why it gives none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/metrics", headers=headers), timeout=_MOST_S
        ) as answer:
            page = kept_lines(answer.read())
    except HTTPError as error:
        return f"{error.code} {error.reason}" + "; api_key= gives its key" * (error.code in (401, 403))
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    columns = read_series([(0.0, page)]).columns
    running, waiting, looked_up, hits = (
        columns[name][0] if name in columns else None
        for name in ("running", "waiting", "prefix_queries", "prefix_hits")
    )
    slots, size = cache_slots(page), block_tokens(page)
    return ServerMetrics(running, waiting, looked_up, hits, slots // size if slots and size else None)
