"""What a workload is, in a few figures: enough to tell two apart, and to make it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.workloads.digest import workload_digest


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """A workload as an input of a run. `source` is where it came from: the file, or the settings that draw the same
    requests again. `profile` holds counts, and minimum, mean, median, 90th percentile and maximum of lengths in
    tokens.
    """

    name: str
    digest: str
    source_type: str  # local: a file; synthetic: drawn
    source: dict[str, Any]
    profile: dict[str, Any]


def describe_workload(
    config: WorkloadConfig, requests: Sequence[Request], *, vocab_size: int, seed: int
) -> WorkloadFacts:
    """The facts of a configuration's requests, as `build_requests` made them."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    if config.path is not None:
        kind, origin = "local", {"uri": str(Path(config.path).expanduser().absolute())}
    else:
        kind, origin = "synthetic", {}
    return WorkloadFacts(
        name=config.name,
        digest=workload_digest(requests),
        source_type=kind,
        source=origin | settings | {"seed": seed, "vocab_size": vocab_size},
        profile=_profile(requests),
    )


def _profile(requests: Sequence[Request]) -> dict[str, Any]:
    prompts = [len(request.prompt_token_ids) for request in requests]
    return {
        "num_rows": len(requests),  # MLflow's page looks for this name
        "samples": sum(request.sampling.n for request in requests),
        "later_turns": sum(request.follows is not None for request in requests),
        "prompt_tokens": sum(prompts),
        "prompt_length": _spread(prompts),
        "output_length": _spread([request.sampling.max_tokens for request in requests]),
        "last_arrival_s": round(max((r.arrival_s for r in requests if r.follows is None), default=0.0), 3),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90 = np.percentile(values, [50, 90]).tolist()
    mean = round(float(np.mean(values)), 1)
    return {"min": min(values), "mean": mean, "p50": p50, "p90": round(p90, 1), "max": max(values)}
