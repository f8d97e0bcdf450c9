"""Whether runs that should produce the same tokens did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlab.lab.compare.groups import Group, differing, settings
from kvlab.lab.records import RunRecord

_SAME_WEIGHTS = ("family", "architecture", "path", "weights")


class Agreement(StrEnum):
    """What became of the comparison."""

    EQUAL = "equal"
    DIFFER = "differ"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Whether a run's outputs are those of another, and in a sentence part why not."""

    agreement: Agreement
    text: str


def check_groups(baseline: Group, other: Group) -> OutputCheck:
    """Compare each finished run of a group with one run of the baseline; the first that differs is told of."""
    runs = [run for run in other.runs if run is not baseline.example]
    if not baseline.runs or not runs:
        return OutputCheck(Agreement.NOT_COMPARABLE, "not comparable (no two finished runs)")
    checks = [check_outputs(baseline.example, run) for run in runs]
    return next((check for check in checks if check.agreement is not Agreement.EQUAL), checks[0])


def check_outputs(first: RunRecord, second: RunRecord) -> OutputCheck:
    """Compare the tokens of two runs, request by request and sample by sample. Greedy outputs are those of
    temperature 0: they depend on the model and the prompt alone.
    """
    if reason := _not_comparable(first, second):
        return OutputCheck(Agreement.NOT_COMPARABLE, f"not comparable ({reason})")
    tokens = [{record.key: record.output_token_ids for record in run.requests()} for run in (first, second)]
    common = [key for key in tokens[0] if key in tokens[1]]
    if not common:
        return OutputCheck(Agreement.NOT_COMPARABLE, "not comparable (no outputs of the same requests were kept)")
    places = {
        key: place for key in common if (place := _first_difference(tokens[0][key], tokens[1][key])) is not None
    }
    missing = len(set(tokens[0]) ^ set(tokens[1]))
    beside = f"; {missing} in one of the runs alone" if missing else ""
    if not places:
        agreement = Agreement.DIFFER if missing else Agreement.EQUAL
        return OutputCheck(agreement, f"equal for {len(common)} requests{beside}")
    (request, sample), place = next(iter(places.items()))
    which = f"request {request}" + (f" sample {sample}" if sample else "")
    return OutputCheck(
        Agreement.DIFFER,
        f"differ for {len(places)} of {len(common)} requests (first: {which}, token {place}){beside}",
    )


def _not_comparable(first: RunRecord, second: RunRecord) -> str | None:
    temperatures = [run.config.get("workload.temperature") or 0 for run in (first, second)]
    if any(temperatures):
        return "sampled, not greedy"
    keys = differing([settings(first), settings(second)])
    models = [key for key in keys if key.startswith("model.") and key.split(".")[1] in _SAME_WEIGHTS]
    if models:
        return f"other model: {', '.join(models[:3])}"
    if "seed" in keys and "dummy" in (first.config.get("model.weights"), second.config.get("model.weights")):
        return "other random weights: seed"
    digests = {run.facts.get("workload_digest") for run in (first, second)}
    if len(digests) > 1:
        return "other workload"
    return None


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The place of the first token that differs, counted from 0; the length of the shorter where that begins the
    longer.
    """
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second)) if len(first) != len(second) else None
