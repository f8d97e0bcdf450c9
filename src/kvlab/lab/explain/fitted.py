"""A run that computed its steps, simulated with times that are fitted to those very steps."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from kvlab.config import FrameworkConfig
from kvlab.core import Request
from kvlab.errors import ConfigError
from kvlab.lab.calibrate import RealRun, calibrate
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.serve import simulated
from kvlab.simulation.timings.fitted import FittedTiming

_MOST_OFF = 0.1  # of the mean time of all requests, and of those that are asked about


@dataclass(frozen=True, slots=True)
class Resimulation:
    """A run as it is simulated, with what its requests really waited for; how far that is from the run, in a
    sentence, and whether it is near enough to say what a change would do.
    """

    explanation: Explanation
    error: str
    agrees: bool


def resimulate(explained: Explanation, run: RealRun, keys: Collection[SampleKey]) -> Resimulation:
    """Simulate an explained run by its own steps. `keys`: the requests that are asked about.

    Raises ConfigError for a run of too few steps, and for one that guesses tokens ahead.
    """
    config = explained.plan.config
    if (method := config.scheduler.speculation.method) is not None:
        text = "guesses tokens ahead, and a simulation cannot know which of them hold"
        raise ConfigError("scheduler.speculation.method", method, text)
    timing = FittedTiming(calibrate([run], draws=1).calibration, explained.plan.model)
    executor = replace(config.executor, kind="simulated", recording=None)
    plan = replace(
        explained.plan,
        config=replace(config, executor=executor, framework=FrameworkConfig()),
        timing=timing,
        recording=None,
        requests=_with_lengths(explained),
    )
    records = {record.key: record for record in simulated(plan).records}
    text, agrees = "timed by its own steps, the run as it was takes", True
    for what, some in (("all", records.keys()), (next(iter(keys))[0], keys)):
        took, again = (
            float(np.mean([of[key].e2el_ms or 0.0 for key in some if key in records and key in explained.records]))
            for of in (explained.records, records)
        )
        off = again / took - 1
        agrees &= abs(off) <= _MOST_OFF
        text += f"{'' if what == 'all' else ','} {again:,.1f} ms for {what} where it took {took:,.1f} "
        text += f"({100 * off:+.1f} %)"
    return Resimulation(replace(explained, plan=plan, records=records), text, agrees)


def _with_lengths(explained: Explanation) -> list[Request]:
    """The requests with the output lengths that they had: a simulation draws no token that ends a sequence."""
    lengths: dict[str, int] = {}
    for (name, _), record in explained.records.items():
        lengths[name] = max(lengths.get(name, 1), len(record.output_token_ids))
    return [
        request if length == request.expected_tokens else replace(request, output_tokens=length)
        for request in explained.plan.requests
        for length in (lengths.get(request.request_id, 1),)
    ]
