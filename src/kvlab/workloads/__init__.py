"""The requests of a run: drawn from distributions, or read from a file."""

from __future__ import annotations

from pathlib import Path

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.jsonl import read_jsonl
from kvlab.workloads.synthetic import synthesize


def build_requests(config: WorkloadConfig, *, vocab_size: int, seed: int) -> list[Request]:
    """The workload's requests: those that follow no other by arrival, then those that do, each behind the one it
    follows. The same seed gives the same requests.

    Raises WorkloadError for a file that cannot be read, naming the line.
    """
    if config.source == "jsonl":
        requests = read_jsonl(Path(config.path or "").expanduser(), config, vocab_size=vocab_size, seed=seed)
    else:
        requests = synthesize(config, vocab_size=vocab_size, seed=seed)
    first = [request for request in requests if request.follows is None]
    later = [request for request in requests if request.follows is not None]
    return sorted(first, key=lambda request: request.arrival_s) + later
