"""Requests from a file of JSON lines: `arrival_s`, `prompt_token_ids` or `prompt_tokens`, `max_tokens`,
`priority`, `deadline_s`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.validation import check_deadline, check_sampling
from kvlab.errors import WorkloadError
from kvlab.workloads.prompts import make_request, random_prompt
from kvlab.workloads.sources import WORKLOAD_SOURCES

_LONGEST_PROMPT = 100_000_000  # beyond any model; a typing error must not fill the memory
FIELDS = ("arrival_s", "prompt_token_ids", "prompt_tokens", "max_tokens", "priority", "deadline_s")
SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in FIELDS)


@WORKLOAD_SOURCES.register("jsonl")
def read_jsonl(config: WorkloadConfig, *, vocab_size: int, seed: int) -> list[Request]:
    """The requests in the file `workload.path`.

    One request per line: its `max_tokens`, its prompt as `prompt_token_ids` or as a number of random
    `prompt_tokens`, `arrival_s` in seconds, a `priority` (0 if absent) and a `deadline_s` in seconds after
    the arrival (none if absent). Empty lines are skipped.

    A line may have other fields of SamplingParams too, in place of what the workload says. Raises WorkloadError
    naming the file and line for anything else.
    """
    path = Path(config.path or "").expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise WorkloadError(f"workload.path={path}: cannot be read: {reason}") from error
    generator = np.random.default_rng(seed)
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, max_tokens, arrival_s, priority = _parse(row, generator, vocab_size)
            request = make_request(len(requests), prompt, max_tokens, arrival_s, config, seed, priority=priority)
            request = replace(request, deadline_s=row.get("deadline_s"))
            check_deadline(request)
            requests.append(_with_sampling(request, row, vocab_size))
        except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
            raise WorkloadError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise WorkloadError(f"workload.path={path}: holds no request")
    return requests


def _parse(row: Any, generator: np.random.Generator, vocab_size: int) -> tuple[tuple[int, ...], int, float, int]:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(set(row) - set(FIELDS) - set(SAMPLING_FIELDS))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS + SAMPLING_FIELDS)}")
    if ("prompt_token_ids" in row) == ("prompt_tokens" in row):
        raise ValueError("needs either prompt_token_ids or prompt_tokens")
    max_tokens = _whole(row, "max_tokens")
    arrival_s = _seconds(row.get("arrival_s", 0.0))
    if type(priority := row.get("priority", 0)) is not int:
        raise ValueError(f"priority={priority!r}: must be a whole number; the lowest goes first")
    if "prompt_tokens" in row:
        count = _whole(row, "prompt_tokens")
        if count > _LONGEST_PROMPT:
            raise ValueError(f"prompt_tokens={count}: at most {_LONGEST_PROMPT}")
        return random_prompt(generator, count, vocab_size), max_tokens, arrival_s, priority
    ids = row["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise ValueError("prompt_token_ids: must be a list of at least one token id")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"prompt_token_ids: {outside} is outside the model's vocabulary of {vocab_size}")
    return tuple(ids), max_tokens, arrival_s, priority


def _with_sampling(request: Request, row: dict[str, Any], vocab_size: int) -> Request:
    """The request with what its row says on sampling. Raises RequestRefusedError, a ValueError."""
    said = {name: row[name] for name in SAMPLING_FIELDS if name in row}
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in said.items()}
    request = replace(request, sampling=replace(request.sampling, **values))
    check_sampling(request.request_id, request.sampling, vocab_size=vocab_size, has_text=False)
    return request


def _seconds(value: Any) -> float:
    if type(value) in (int, float) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ValueError(f"arrival_s={repr(value)[:40]}: must be a number of seconds, at least 0")


def _whole(row: dict[str, Any], field: str) -> int:
    value = row.get(field)
    if type(value) is not int or value < 1:
        raise ValueError(f"{field}={value!r}: must be a whole number, at least 1")
    return value
