"""The requests of a run: drawn from distributions, read from a file, or from a source that a plugin adds."""

from __future__ import annotations

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.sources import WORKLOAD_SOURCES


def build_requests(config: WorkloadConfig, *, vocab_size: int, seed: int) -> list[Request]:
    """The workload's requests: those that follow no other by arrival, then those that do, each behind the one it
    follows. The same seed gives the same requests.

    Raises WorkloadError for a file that cannot be read, naming the line.
    """
    requests = WORKLOAD_SOURCES.get(config.source)(config, vocab_size=vocab_size, seed=seed)
    first = [request for request in requests if request.follows is None]
    later = [request for request in requests if request.follows is not None]
    return sorted(first, key=lambda request: request.arrival_s) + later


def may_sample(config: WorkloadConfig) -> bool:
    """Whether any of the workload's requests may sample its tokens. Drawn requests all have `workload.temperature`;
    those of another source may have a temperature of their own.
    """
    return config.temperature > 0 or WORKLOAD_SOURCES.get(config.source) is not WORKLOAD_SOURCES.get("synthetic")
