"""Requests from a file of JSON lines: `arrival_s`, a prompt as text or tokens, `max_tokens`, `priority`,
`deadline_s`, `salt`, `pin_tokens`.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.config.values import MOST_SECONDS
from kvlab.core import Message, Request, SamplingParams
from kvlab.engine.validation import check_sampling, check_urgency
from kvlab.errors import WorkloadError, shown
from kvlab.workloads.lines import json_object, read_lines
from kvlab.workloads.prompts import MAX_PROMPT_TOKENS, make_request, random_prompt
from kvlab.workloads.sources import WORKLOAD_SOURCES

PROMPTS = ("prompt_token_ids", "prompt_tokens", "prompt", "messages")
FIELDS = ("arrival_s", *PROMPTS, "max_tokens", "priority", "deadline_s", "salt", "pin_tokens")
SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in FIELDS)


@WORKLOAD_SOURCES.register("jsonl")
def read_jsonl(config: WorkloadConfig, *, vocab_size: int, seed: int) -> Iterator[Request]:
    """The requests in the file `workload.path`.

    One request per line: its `max_tokens`; its prompt as `prompt_token_ids`, as a number of random
    `prompt_tokens`, or as text, a `prompt` or the `messages` of a conversation; `arrival_s` in seconds, a
    `priority` (0 if absent) and a `deadline_s` in seconds after the arrival (none if absent); the `salt` of its
    tenant, text or a whole number; and `pin_tokens`, how many of the prompt's tokens it pins. Empty lines are
    skipped.

    A line may have other fields of SamplingParams too, in place of what the workload says; text ends at the end of
    sequence unless its line sets `ignore_eos`. Raises WorkloadError naming the file and line for anything else.
    """
    generator = np.random.default_rng(seed)
    made = 0
    for number, line in read_lines(config.path or ""):
        try:
            row = _read_row(line)
            prompt, max_tokens, arrival_s = _parse(row, generator, vocab_size)
            request = make_request(made, prompt, max_tokens, arrival_s, config, seed)
            request = replace(request, priority=row.get("priority", 0), deadline_s=row.get("deadline_s"))
            request = replace(request, prompt=_text(row), salt=_salt(row), pin_tokens=row.get("pin_tokens", 0))
            check_urgency(request)
            yield _with_sampling(request, row, vocab_size)  # raises what is wrong with the request's text
        except ValueError as error:
            raise WorkloadError(f"{shown(config.path)}, line {number}: {error}") from error
        made += 1
    if not made:
        raise WorkloadError(f"workload.path={shown(config.path)}: holds no request")


def _read_row(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError, saying what is wrong, for one with unknown fields too."""
    row = json_object(line)
    if "kvlab_trace" in row:
        raise ValueError("is the first of a trace of kvlab, which workload=recorded reads")
    unknown = sorted(set(row) - set(FIELDS) - set(SAMPLING_FIELDS))
    if unknown:
        known = ", ".join(FIELDS + SAMPLING_FIELDS)
        raise ValueError(f"unknown field {shown(unknown[0], repr)}; known: {known}")
    return row


def _parse(
    row: dict[str, Any], generator: np.random.Generator, vocab_size: int
) -> tuple[tuple[int, ...], int, float]:
    """Prompt, max_tokens and arrival of a row; of one with text the prompt is empty."""
    prompts = [name for name in PROMPTS if name in row]
    if len(prompts) != 1:
        raise ValueError(f"needs one of {', '.join(PROMPTS)}; it has {' and '.join(prompts) or 'none'}")
    max_tokens = _whole(row, "max_tokens")
    arrival_s = _seconds(row.get("arrival_s", 0.0))
    if "prompt_tokens" in row:
        count = _whole(row, "prompt_tokens")
        if count > MAX_PROMPT_TOKENS:
            raise ValueError(f"prompt_tokens={shown(count)}: at most {MAX_PROMPT_TOKENS}")
        return random_prompt(generator, count, vocab_size), max_tokens, arrival_s
    if "prompt_token_ids" not in row:
        return (), max_tokens, arrival_s
    ids = row["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise ValueError("prompt_token_ids: must be a list of at least one token id")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"prompt_token_ids: {shown(outside)} is outside the model's vocabulary of {vocab_size}")
    return tuple(ids), max_tokens, arrival_s


def _text(row: dict[str, Any]) -> str | tuple[Message, ...] | None:
    """What a row says in words. Raises ValueError for anything but text and messages of texts."""
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f"prompt={shown(row['prompt'], repr)}: must be a text, and not empty")
        return row["prompt"]
    if "messages" not in row:
        return None
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        text = 'must be a list of at least one {"role": "user", "content": "..."}'
        raise ValueError(f"messages={shown(messages, repr)}: {text}")
    return tuple(Message(**message) for message in messages)


def _is_message(value: Any) -> bool:
    has_fields = isinstance(value, dict) and set(value) == {"role", "content"}
    return has_fields and {str}.issuperset(map(type, value.values()))


def _with_sampling(request: Request, row: dict[str, Any], vocab_size: int) -> Request:
    """The request with what its row says on sampling. Raises RequestRefusedError, a ValueError."""
    said = {name: row[name] for name in SAMPLING_FIELDS if name in row}
    if request.prompt is not None:
        said.setdefault("ignore_eos", False)  # words end where their model ends them
    values: dict[str, Any] = {k: _frozen(value) for k, value in said.items()}
    request = replace(request, sampling=replace(request.sampling, **values))
    check_sampling(request.request_id, request.sampling, vocab_size=vocab_size, has_text=True)
    return request


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _salt(row: dict[str, Any]) -> str | int | None:
    salt = row.get("salt")
    if salt is None or type(salt) in (str, int):
        return cast(str | int | None, salt)
    raise ValueError(f"salt={shown(salt, repr)}: must be text or a whole number")


def _seconds(value: Any) -> float:
    if type(value) in (int, float) and 0 <= value <= MOST_SECONDS:
        return float(value)
    text = f"must be a number of seconds, from 0 to {MOST_SECONDS} (a year)"
    raise ValueError(f"arrival_s={shown(value, repr)}: {text}")


def _whole(row: dict[str, Any], field: str) -> int:
    value = row.get(field)
    if type(value) is not int or value < 1:
        raise ValueError(f"{field}={shown(value, repr)}: must be a whole number, at least 1")
    return value
