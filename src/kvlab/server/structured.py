"""Structured outputs: from what a client asks an answer to be like to the grammar that it follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kvlab.core import Grammar, limits
from kvlab.errors import GrammarError, shown
from kvlab.server.bodies import Generation, Sampling, StructuredOutputs
from kvlab.server.errors import ApiError
from kvlab.server.model import ServedModel

if TYPE_CHECKING:
    from kvlab.models.grammars import Grammars

_NEEDED = 'needed: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'


def check_size(body: Sampling) -> None:
    """Raise ApiError for a structure too large to be one."""
    for name in ("response_format", "structured_outputs", "tools", "text"):
        value = getattr(body, name, None)
        if value and (size := len(json.dumps(value, default=BaseModel.model_dump))) > limits.MAX_GRAMMAR_CHARS:
            raise ApiError(400, f"{name} has {size:,} characters; at most {limits.MAX_GRAMMAR_CHARS:,}", name)


def grammar_of(body: Generation, model: ServedModel) -> Grammar | None:
    """What the answer has to follow; None: nothing. Raises ApiError."""
    has_format = body.response_format is not None and body.response_format.get("type") != "text"
    if has_format and body.structured_outputs:
        raise ApiError(400, "response_format and structured_outputs: give one of them", "structured_outputs")
    if body.structured_outputs:
        return _structured_outputs(body.structured_outputs, model)
    return None if body.response_format is None else _response_format(body.response_format, model)


def made(field: str, make: Callable[[], Grammar]) -> Grammar:
    """The grammar. Raises ApiError."""
    try:
        return make()
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", field.partition(".")[0]) from error


def compiler(model: ServedModel, field: str) -> Grammars:
    """What makes grammars of the model's words. Raises ApiError where nothing can follow one."""
    if model.grammars is None:
        what = "a simulated device follows no grammar"
        if model.has_logprobs:
            what = f"{model.name} has no tokenizer, or no token that ends an answer"
        raise ApiError(400, f"{field}: {what}; leave it out", field)
    return model.grammars


def _response_format(value: dict[str, Any], model: ServedModel) -> Grammar | None:
    """As OpenAI's API defines it."""
    field, kind = "response_format", value.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise ApiError(400, f"{field}.type={shown(kind, repr)}: must be text, json_object or json_schema", field)
    if kind == "json_object" and value.get("schema") is None:
        return compiler(model, field).json_object()
    said = value if kind == "json_object" else value.get("json_schema")  # some clients have a schema there, too
    schema = said.get("schema") if isinstance(said, dict) else None
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{field} has no schema; {_NEEDED}", field)
    return made(field, lambda: compiler(model, field).json_schema(schema))


def _structured_outputs(asked: StructuredOutputs, model: ServedModel) -> Grammar:
    """As vLLM has it: one of its kinds, and the white space of JSON."""
    field, grammars = "structured_outputs", compiler(model, "structured_outputs")
    kinds: dict[str, tuple[Any, Callable[[Any], Grammar]]] = {
        "json": (asked.json_, lambda schema: grammars.json_schema(schema, asked.whitespace_pattern)),
        "regex": (asked.regex, grammars.regex),
        "choice": (asked.choice, grammars.choice),
        "grammar": (asked.grammar, grammars.lark),
        "json_object": (asked.json_object or None, lambda _: grammars.json_object()),
    }
    known = [kind for kind, (value, _) in kinds.items() if value is not None]
    names = [*known, *(shown(name) for name, value in (asked.model_extra or {}).items() if value)]
    if len(names) != 1 or not known:
        text = f"needed: one of {', '.join(kinds)}"
        raise ApiError(400, f"{field} has {', '.join(names) or 'nothing'}; {text}", field)
    value, make = kinds[known[0]]
    return made(f"{field}.{known[0]}", lambda: make(value))
