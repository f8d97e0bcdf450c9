"""The process that reads large bodies, so that the server's threads go on: as JSON, as requests, within the bounds
of what can be served. What is left of a body has texts, and no more values than can be served.
"""

import json
import logging
from typing import Any

from pydantic import ValidationError

from kvlab.confined import serve
from kvlab.core import limits
from kvlab.errors import shown
from kvlab.server import bodies
from kvlab.server.errors import ApiError, context_exceeded, invalid_body, no_json, wrong
from kvlab.server.parameters import check_meaning, conversation, prompts_of
from kvlab.server.structured import check_size

_COUNTS = {
    "stop": limits.MAX_STOPS,
    "stop_token_ids": limits.MAX_STOP_TOKENS,
    "logit_bias": limits.MAX_BIASES,
    "allowed_token_ids": limits.MAX_ALLOWED,
    "bad_words": limits.MAX_BAD_WORDS,
}
_LONGEST_NAME, _MOST_NAMES = 100, 20  # of fields that nobody knows


def _answer(question: bytes) -> bytes:
    """Asked is a line with `path` and `max_tokens`, and the body. The answer begins with B before what is left of
    the body, with E before an error's status, message, parameter and code.
    """
    head, _, body = question.partition(b"\n")
    try:
        return b"B" + _as_json(_read(body, **json.loads(head)))
    except ApiError as error:
        return b"E" + _as_json([error.status, str(error), error.param, error.code])


def _read(body: bytes, path: str, max_tokens: int) -> dict[str, Any]:
    try:
        request = bodies.KINDS[path].model_validate(_parsed(body))
    except ValidationError as error:
        errors = [{**wrong, "loc": ("body", *wrong["loc"])} for wrong in error.errors()]
        raise invalid_body(errors, "application/json") from error
    if isinstance(request, bodies.DetokenizeRequest):
        _bounded("tokens", len(request.tokens), max_tokens)
    if isinstance(request, bodies.Sampling):
        check_size(request)
        check_meaning(request)
        for name, most in _COUNTS.items():
            value = getattr(request, name)
            if not isinstance(value, str) and value is not None and len(value) > most:
                raise wrong(name, f" has {len(value)} entries; at most {most}")
    for name in ("input", "messages"):
        entries = getattr(request, name, None) or ()
        if not isinstance(entries, str) and len(entries) > max_tokens:
            raise wrong(name, f" has {len(entries)} entries; at most one for each of {max_tokens} tokens")
    if isinstance(request, bodies.CompletionRequest):
        for prompt in prompts_of(request):
            if not isinstance(prompt, str) and not request.truncate_prompt_tokens:
                _bounded("prompt", len(prompt), max_tokens)
    if isinstance(request, bodies.ChatRequest | bodies.TokenizeRequest) and request.messages is not None:
        texts = [message.content for message in conversation(request.messages)]
        request.messages = [
            message.model_copy(update={"content": text})
            for message, text in zip(request.messages, texts, strict=True)
        ]
    for part in (request, getattr(request, "stream_options", None)):
        if part is not None and (extra := part.model_extra):
            names = [name for name in extra if len(name) <= _LONGEST_NAME][:_MOST_NAMES]
            extra.clear()  # which are ignored; the server logs their names
            extra |= dict.fromkeys(names)
    return request.model_dump(exclude_unset=True, by_alias=True)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise no_json(error.msg) from error
    except UnicodeDecodeError as error:
        raise no_json("it is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise no_json(shown(error)) from error


def _bounded(field: str, count: int, most: int) -> None:
    if count > most:
        raise context_exceeded(most, f"you sent {count} tokens in {field}", field)


def _as_json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value).encode()


if __name__ == "__main__":
    logging.disable()  # the server logs what it is told
    serve(_answer)
