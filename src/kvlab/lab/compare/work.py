"""Whether groups did the same work, without which times say nothing about their cause, and made the same tokens."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from kvlab.core import UNKNOWN_TOKEN
from kvlab.lab.compare.groups import Group, differing, pairs_of, settings, short_keys
from kvlab.lab.results.records import RunRecord

_SHOWN = 6
_SAME_WEIGHTS = ("model.family", "model.architecture", "model.path", "model.weights")


def obstacle(baseline: Group, other: Group, by: Sequence[str] = ()) -> str | None:
    """Why these groups cannot be compared, with the keys that differ; None where they can.

    They have to have computed the same model on the same requests: that of workloads the digests show where both
    are known, else the workload's settings. What `by` names is what the comparison is about, and no obstacle. A
    group of unlike runs is compared only pair by pair.
    """
    for group in (baseline, other):
        if not group.runs:
            return f"no run of {group.name} finished"
    pairs = pairs_of(baseline, other)
    for group in (baseline, other):
        if group.mixed and not pairs:
            unlike = _listed(short_keys(group.runs, group.mixed))
            return f"the runs of {group.name} differ among themselves in {unlike}; name these keys in `by` too"
    for first, second in pairs or [(baseline.example, other.example)]:
        keys = [key for key in _other_work(first, second) if key not in by and key.split(".")[0] not in by]
        if keys:
            return f"not the same work: {_listed(short_keys([first, second], keys))} differ"
    return None


class OutputCheck(NamedTuple):
    """Whether a run's outputs are known to be those of another, and what there is to say on it."""

    equal: bool
    text: str


def check_groups(baseline: Group, other: Group) -> OutputCheck:
    """Compare each finished run of a group with one run of the baseline; the first that differs is returned."""
    runs = [run for run in other.runs if run is not baseline.example]
    if not baseline.runs or not runs:
        return OutputCheck(False, "not comparable (no two finished runs)")
    checks = [check_outputs(baseline.example, run) for run in runs]
    return next((check for check in checks if not check.equal), checks[0])


def check_outputs(first: RunRecord, second: RunRecord) -> OutputCheck:
    """Compare the tokens of two runs, request by request and sample by sample. Greedy outputs are those of
    temperature 0: they depend on the model and the prompt alone.
    """
    if reason := _not_comparable(first, second):
        return OutputCheck(False, f"not comparable ({reason})")
    one, two = ({record.key: record.output_token_ids for record in run.requests()} for run in (first, second))
    common = [key for key in one if key in two and UNKNOWN_TOKEN not in {*one[key], *two[key]}]
    if not common:
        return OutputCheck(False, "not comparable (no outputs of the same requests were kept)")
    different = [key for key in common if one[key] != two[key]]
    missing = len(one.keys() ^ two.keys())
    text = f"equal for {len(common)} requests"
    if different:
        (request, sample), tokens = different[0], zip_longest(one[different[0]], two[different[0]])
        which = f"request {request}" + (f" sample {sample}" if sample else "")
        index = next(index for index, (token, other) in enumerate(tokens) if token != other)
        text = f"differ for {len(different)} of {len(common)} requests (first: {which}, token {index})"
    text += f"; {missing} in one of the runs alone" if missing else ""
    return OutputCheck(not different and not missing, text)


def _not_comparable(first: RunRecord, second: RunRecord) -> str | None:
    if any(run.config.get("workload.temperature") for run in (first, second)):
        return "sampled, not greedy"
    for run in (first, second):
        if run.simulated and not run.config.get("executor.recording"):  # whose tokens were computed once
            return f"{run.simulated}: no tokens were computed"
    keys = differing([settings(first), settings(second)])
    dummy = "dummy" in (first.config.get("model.weights"), second.config.get("model.weights"))
    if len({run.config.get("engine.kind", "kvlab") for run in (first, second)}) > 1 and dummy:
        return "each engine draws random weights of its own"
    models = [key for key in keys if ".".join(key.split(".")[:2]) in _SAME_WEIGHTS]
    if models:
        return f"other model: {', '.join(models[:3])}"
    if "seed" in keys and dummy:
        return "other random weights: seed"
    same = first.facts.get("workload_digest") == second.facts.get("workload_digest")
    return None if same else "other workload"


def _other_work(first: RunRecord, second: RunRecord) -> list[str]:
    """The keys of model and workload in which the work differs."""
    keys = differing([settings(first), settings(second)])
    # How long a sequence may become sizes the cache; what is served does not change with it.
    other = [key for key in keys if key.startswith("model.") and key not in ("model.max_seq_len", "model.name")]
    digests = [run.facts.get("workload_digest") for run in (first, second)]
    if digests[0] is None or digests[1] is None:
        return other + [key for key in keys if key.startswith("workload.") and key != "workload.name"]
    if digests[0] == digests[1]:
        return other
    workload = [key for key in keys if key.startswith("workload.") or key == "seed"]
    return other + (workload or ["workload.path"])


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
