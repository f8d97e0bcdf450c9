"""How far predicted figures have been off, of runs that are simulated with measured operations."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from kvlab.core import RequestRecord
from kvlab.engine.plan import EnginePlan
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import ATTAINMENT, service_levels
from kvlab.models.sparse import is_mixture
from kvlab.simulation.accuracy import FIGURES, Case, Interval, bound, interval, ratios, sentence
from kvlab.simulation.timings.silicon import SiliconTiming

ACCURACY = "accuracy"  # of a run's summary


class Predicted(NamedTuple):
    """Mean latencies of a run by the names of FIGURES, and how far those of measured deployments like it were off.
    `attainment`: percent of requests within their limits if all latencies were at the high end, and at the low end,
    of that; None: no limits.
    """

    framework: str  # of several groups each
    is_sparse: bool
    means_ms: dict[str, float]
    errors: dict[str, Interval]
    attainment: tuple[float, float] | None

    def sentence(self) -> str:
        """Each figure with its interval, in words."""
        return sentence(self.means_ms, self.errors) + _attained(self.attainment)

    def as_dict(self) -> dict[str, Any]:
        """What the run's summary keeps: measured / predicted - 1 of nine in ten, `low` and `high`."""
        kept: dict[str, Any] = {name: [own.low, own.high] for name, own in self.errors.items()}
        return kept | {"framework": self.framework, "is_sparse": self.is_sparse, "attainment": self.attainment}


def predicted(
    groups: Sequence[tuple[range, EnginePlan]], log: RunLog, limits: Mapping[str, float]
) -> Predicted | None:
    """Of a run on replicas with these numbers; of several groups with the widest of their errors. None: no request
    has both latencies, or no deployment of a framework was measured so: steps are timed otherwise than by measured
    operations, or without CUDA graphs, or with states.
    """
    if any(_is_unlike(plan) for _, plan in groups):
        return None
    served = [record for record in log.records if record.ttft_ms is not None and record.tpot_ms is not None]
    errors = dict[str, Interval]()
    for replicas, plan in groups:
        own = [record for record in served if record.replica in replicas]
        if not own or (case := _case(plan, len(replicas), own)) is None:
            continue
        for name in FIGURES:
            if (found := interval(case, name)) is None:
                return None
            errors[name] = errors.get(name, found).widest(found)
    if not errors:
        return None
    means = {name: fmean(getattr(record, f"{name}_ms") for record in served) for name in ("ttft", "tpot")}
    attainment = None
    if limits:
        slower, faster = ({name: most / (1 + errors[name][end]) for name, most in limits.items()} for end in (1, 0))
        attainment = service_levels(log, slower)[ATTAINMENT], service_levels(log, faster)[ATTAINMENT]
    frameworks = " and ".join(dict.fromkeys(plan.config.framework.tables for _, plan in groups))
    return Predicted(frameworks, is_mixture(groups[0][1].model), means, errors, attainment)


def _is_unlike(plan: EnginePlan) -> bool:
    """Whether no deployment like this was measured. What the timing or the executor of a plugin makes of measured
    operations was compared with none either.
    """
    if type(plan.timing) is not SiliconTiming or plan.config.executor.kind != "simulated":
        return True
    return not plan.config.framework.cuda_graphs or plan.model.has_states


def _case(plan: EnginePlan, replicas: int, served: Sequence[RequestRecord]) -> Case | None:
    """What is compared with measured deployments: these replicas, and the requests that they served. None: they
    have no device.
    """
    config = plan.config
    if config.hardware is None:
        return None
    seconds = max(record.finished_s for record in served) - min(record.arrival_s for record in served)
    return Case(
        config.framework.tables,
        config.hardware.name,
        config.model.name,
        is_mixture(plan.model),
        config.executor.tensor_parallel,
        fmean(record.prompt_tokens for record in served),
        fmean(len(record.output_token_ids) for record in served),
        sum(record.e2el_ms or 0 for record in served) / 1000 / max(seconds, 1e-9) / replicas,
    )


def how_far_off(summaries: Iterable[Mapping[str, Any]], *, compared: bool = False) -> str | None:
    """What runs' summaries say of that, the widest of each figure; `compared`: their ratios too. None: nothing."""
    known = [summary[ACCURACY] for summary in summaries if ACCURACY in summary]
    if not known:
        return None
    widest = {name: max(abs(error) for found in known for error in found[name]) for name in reversed(FIGURES)}
    parts = [f"{name} within {bound(error)}" for name, error in widest.items()]
    text = f"predicted: nine of ten measured deployments like this had mean {' and '.join(parts)}"
    if len(known) == 1:
        text += _attained(known[0]["attainment"])
    kinds = {(found["framework"], found.get("is_sparse", False)) for found in known}
    near = _ratios_of(kinds) if compared else ""
    return f"{text}; {near}" if near else text


def ratios_off(plans: Iterable[EnginePlan]) -> str:
    """How near ratios of such simulated runs were to measured ones; empty unless all have measured operations of
    one framework whose ratios are known.
    """
    return _ratios_of(
        {("" if _is_unlike(plan) else plan.config.framework.tables, is_mixture(plan.model)) for plan in plans}
    )


def _ratios_of(kinds: Collection[tuple[str, bool]]) -> str:
    """By framework and whether models are mixtures; empty for several kinds."""
    if len(kinds) != 1:
        return ""
    ((framework, is_sparse),) = kinds
    return ratios(framework, is_sparse=is_sparse)


def _attained(attainment: Sequence[float] | None) -> str:
    if attainment is None:
        return ""
    return "; if that far off, {:.1f} to {:.1f} % are within the limits".format(*attainment)
