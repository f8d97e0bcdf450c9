"""A workload in a few figures: enough to compare two, and to make the same requests again."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.hashed_prompt import HashedPrompt
from kvlab.workloads.trace_format import read_header

#: Sources whose files have lengths alone: each request is given a prompt of its own, whatever it began with.
_LENGTHS_ALONE = ("azure", "burstgpt", "sharegpt_lengths")


def unknown_prompts(config: WorkloadConfig) -> str | None:
    """Why it cannot be known what a workload's prompts have in common; None where it is."""
    if config.source == "recorded":
        if "prefixes" not in read_header(config.path or "").unknown:
            return None
    elif config.source not in _LENGTHS_ALONE:
        return None
    return f"unknown: workload={config.name} has the lengths of prompts, and not what they begin with"


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
    origin = {} if config.path is None else {"uri": str(Path(config.path).expanduser().absolute())}
    return WorkloadFacts(
        name=config.name,
        digest=workload_digest(requests),
        source_type="local" if origin else "synthetic",
        source=origin | settings | {"seed": seed, "vocab_size": vocab_size},
        profile=_profile(requests),
    )


def workload_digest(requests: Sequence[Request]) -> str:
    """16 hexadecimal digits over every request's arrival, prompt, output length, most tokens, samples, priority,
    deadline, salt, pinned tokens and what it follows.
    """
    digest = hashlib.sha256()
    for request in requests:
        sampling = request.sampling
        head: tuple[object, ...] = request.arrival_s, sampling.max_tokens, sampling.n, request.salt, request.follows
        if request.output_tokens is not None:
            head += ("output", request.output_tokens)
        if request.priority:  # so that workloads without keep their digests
            head += (request.priority,)
        if request.deadline_s is not None:
            head += ("deadline", request.deadline_s)
        if request.pin_tokens:
            head += ("pin", request.pin_tokens)
        digest.update(repr(head).encode())
        prompt = request.prompt_token_ids
        if isinstance(prompt, HashedPrompt):  # what its tokens are made of
            digest.update(repr(prompt).encode())
        else:
            digest.update(np.array(prompt, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def _profile(requests: Sequence[Request]) -> dict[str, Any]:
    prompts = [len(request.prompt_token_ids) for request in requests]
    return {
        "num_rows": len(requests),  # MLflow's page looks for this name
        "samples": sum(request.sampling.n for request in requests),
        "later_turns": sum(request.follows is not None for request in requests),
        "prompt_tokens": sum(prompts),
        "prompt_length": _spread(prompts),
        "output_length": _spread([request.expected_tokens for request in requests]),
        "last_arrival_s": round(max((r.arrival_s for r in requests if r.follows is None), default=0.0), 3),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    p50, p90 = np.percentile(values, [50, 90]).tolist()
    mean = round(float(np.mean(values)), 1)
    return {"min": min(values), "mean": mean, "p50": p50, "p90": round(p90, 1), "max": max(values)}
