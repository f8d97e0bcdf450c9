"""When requests arrive."""

from collections.abc import Iterator
from itertools import accumulate, count, repeat

import numpy as np

from kvlab.config import WorkloadConfig


def arrival_times(config: WorkloadConfig, generator: np.random.Generator) -> Iterator[float]:
    """The arrivals of `workload.arrival`, in seconds, without end.

    `burst`: all at 0. `uniform`: one every 1 / rate seconds from 0 on. `poisson`: as many on average, the gaps
    exponential. `gamma`: gaps of the same mean from a gamma distribution of shape `burstiness`; 1 is Poisson, less
    has bursts and lulls (as in `vllm bench serve`).
    """
    rate = config.rate
    if config.arrival in ("burst", "trace") or not rate:
        return repeat(0.0)
    if config.arrival == "uniform":
        return (number / rate for number in count())
    if config.arrival == "poisson":
        return accumulate(generator.exponential(1 / rate) for _ in count())
    shape = config.burstiness
    return accumulate(generator.gamma(shape, 1 / (rate * shape)) for _ in count())
