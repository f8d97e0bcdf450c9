"""Whether two groups did the same work: without that a time says nothing about what made it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.lab.compare.groups import Group, differing, pairs_of, settings, short_keys
from kvlab.lab.records import RunRecord

_SHOWN = 6


def obstacle(baseline: Group, other: Group, by: Sequence[str] = ()) -> str | None:
    """Why these groups cannot be compared, with the keys that differ; None where they can.

    They have to have computed the same model on the same requests: the digests of their workloads tell where both
    are known, else the workload's settings. What `by` names is what the comparison is about, and no obstacle. A
    group of unlike runs is compared only pair by pair.
    """
    if not baseline.members or not other.members:
        empty = baseline if not baseline.members else other
        return f"no run of {empty.name} finished"
    pairs = pairs_of(baseline, other)
    for group in (baseline, other):
        if group.mixed and not pairs:
            unlike = _listed(short_keys(group.runs, group.mixed))
            return f"the runs of {group.name} differ among themselves in {unlike}; name these keys in `by` too"
    for first, second in pairs or [(baseline.example, other.example)]:
        keys = [key for key in _other_work(first, second) if not _named(key, by)]
        if keys:
            return f"not the same work: {_listed(short_keys([first, second], keys))} differ"
    return None


def _other_work(first: RunRecord, second: RunRecord) -> list[str]:
    """The keys of model and workload in which the work differs."""
    keys = differing([settings(first), settings(second)])
    # How long a sequence may become sizes the cache; what is served does not change with it.
    found = [key for key in keys if key.startswith("model.") and key not in ("model.max_seq_len", "model.name")]
    digests = [run.facts.get("workload_digest") for run in (first, second)]
    if digests[0] is None or digests[1] is None:
        return found + [key for key in keys if key.startswith("workload.") and key != "workload.name"]
    if digests[0] == digests[1]:
        return found
    workload = [key for key in keys if key.startswith("workload.") or key == "seed"]
    return found + (workload or ["workload.path"])


def _named(key: str, by: Sequence[str]) -> bool:
    return key in by or key.split(".")[0] in by


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
