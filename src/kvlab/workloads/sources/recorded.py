"""Recorded traffic in kvlab's own trace format, which `kvlab import` makes of others."""

from collections.abc import Iterator

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.errors import ConfigError
from kvlab.workloads.lengths import draw_length
from kvlab.workloads.sources import WORKLOAD_SOURCES
from kvlab.workloads.trace_format import UNKNOWN, read_header, read_trace
from kvlab.workloads.traces import Row, trace_requests


@WORKLOAD_SOURCES.register("recorded")
def read_recorded(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests of the trace `workload.path`. Prompts whose hashes begin alike begin with equal tokens. What has
    no output length gets one of `workload.output_len`, at most what its client asked for. Raises WorkloadError, or
    ConfigError for arrival=trace of a trace without times.
    """
    if config.arrival == "trace" and "times" in read_header(config.path or "").unknown:
        raise ConfigError("workload.arrival", config.arrival, f"{config.path} has {UNKNOWN['times']}")
    return trace_requests(_rows(config, seed), config, vocab_size=vocab_size, seed=seed)


def _rows(config: WorkloadConfig, seed: int) -> Iterator[Row]:
    block_tokens = read_header(config.path or "").block_tokens
    generator = np.random.default_rng([seed, 2])
    for place, request in read_trace(config.path or ""):
        drawn = draw_length(generator, config.output_len)  # of every row, so that the others keep theirs
        yield Row(
            place,
            request.arrival_s or 0.0,
            "arrival_s",
            request.prompt_tokens,
            min(drawn, request.max_tokens or drawn) if request.output_tokens is None else request.output_tokens,
            tuple(request.hashes or ()),
            request.session,
            block_tokens,
            request.max_tokens,
        )
