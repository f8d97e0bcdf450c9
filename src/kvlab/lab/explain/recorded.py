"""Why another server took as long as it did: its recorded trace, simulated with the settings that it is thought to
have, and what the simulation does not explain.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from kvlab.config import RunConfig
from kvlab.errors import ConfigError
from kvlab.lab.explain.lives import Cause, Interval
from kvlab.lab.explain.replayed import Explanation, observe
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.serve import simulated
from kvlab.workloads.trace_format import TracedRequest, read_trace


@dataclass(frozen=True, slots=True)
class RecordedExplanation(Explanation):
    """A trace's requests: what the server did, and a simulation's terms with what is missing to that."""

    recorded: Mapping[SampleKey, TracedRequest]

    def latency_ms(self, key: SampleKey) -> float:
        """The recorded one."""
        return self.recorded[key].e2el_ms or 0.0

    def first_token_ms(self, key: SampleKey) -> float | None:
        """The recorded one, if the trace has it."""
        return self.recorded[key].ttft_ms

    def intervals_of(self, key: SampleKey) -> list[Interval]:
        """The simulated ones, and behind them what the server took longer."""
        intervals, arrival_s = Explanation.intervals_of(self, key), self.records[key].arrival_s
        end_s = arrival_s + self.latency_ms(key) / 1000
        start_s = intervals[-1].end_s if intervals else arrival_s
        return [*intervals, Interval(start_s, end_s, Cause.UNEXPLAINED)] if end_s > start_s else intervals

    def terms_of(self, key: SampleKey, until_s: float | None = None) -> dict[Cause, float]:
        """The simulated terms, and the rest of the recorded time, which is negative where that was shorter."""
        terms = Explanation.terms_of(self, key, until_s)
        whole = self.latency_ms(key) if until_s is None else self.first_token_ms(key) or 0.0
        return terms | {Cause.UNEXPLAINED: whole - sum(terms.values())}

    @property
    def agreement(self) -> str:
        """How near the simulation comes, in a sentence."""
        took = np.array([self.latency_ms(key) for key in self.lives])
        simulated = np.array([self.records[key].e2el_ms for key in self.lives], dtype=np.float64)
        off = float(np.median(np.abs(simulated / took - 1)))
        text = (
            f"the simulation takes {simulated.mean():,.1f} ms in the mean and the server took {took.mean():,.1f}; "
        )
        text += f"half of the requests are off by {100 * off:.1f} % or more"
        said = [key for key in self.lives if self.recorded[key].cached_tokens is not None]
        if said:
            server = sum(self.recorded[key].cached_tokens or 0 for key in said)
            ours = sum(self.records[key].cached_tokens for key in said)
            text += f"; it finds {ours:,} tokens in the prefix cache where the server said {server:,}"
            beyond = [self.recorded[key] for key in said]
            count = sum((row.cached_tokens or 0) > row.prompt_tokens for row in beyond)
            text += f", in {count:,} requests more than the prompt has" if count else ""
        return text


def explain_trace(config: RunConfig, detail: Collection[str] = ()) -> RecordedExplanation:
    """Simulate the trace `workload.path` with these settings, and hold it against what the server did. Of the
    requests of `detail` it is kept who held the blocks that they waited for.

    Raises ConfigError for settings that are not simulated, and a trace that does not say how long requests took.
    """
    if config.executor.kind != "simulated":
        text = "is not simulated; say what the server ran on, as executor=simulated hardware=h100_sxm model=NAME"
        raise ConfigError("executor.kind", config.executor.kind, text)
    path = config.workload.path
    rows = enumerate(request for _, request in read_trace(path or ""))
    # Numbered as workload=recorded does. What was cut off ended by its client, which no simulation knows.
    ended = (
        (number, row) for number, row in rows if row.e2el_ms and row.output_tokens and row.finish_reason != "abort"
    )
    recorded = {(f"r{number}", 0): row for number, row in ended}
    if not recorded:
        raise ConfigError("trace", path, "does not say how long requests took (e2el_ms), as kvlab record does")
    plan = plan_run(config)
    seen = observe(plan, simulated(plan).steps, detail)
    lives = {key: life for key, life in seen.lives.items() if key in recorded}
    return RecordedExplanation(plan, seen.records, lives, seen.prompts, seen.hops, seen.pulls, recorded)
