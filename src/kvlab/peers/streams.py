"""OpenAI's completions: what a request's body says, and the events of a streamed answer."""

import json
from collections.abc import Mapping
from typing import Any

from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.errors import RequestRefusedError

Json = dict[str, Any]

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_PLAIN = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n")
#: Fields of SamplingParams that are vLLM's additions to the protocol, sent where they ask for something.
_ADDED = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")


def check_request(request: Request, *, extensions: bool) -> None:
    """Raise RequestRefusedError for what OpenAI's protocol alone cannot ask."""
    asked = [name for name in _asked(request.sampling) if name != "ignore_eos"]  # a run says if it was not obeyed
    if asked and not extensions:
        name = asked[0]
        text = f"request {request.request_id}: {name} is no part of OpenAI's protocol; engine.extensions=true asks"
        raise RequestRefusedError(f"{text} for it in vLLM's terms", name)


def request_body(request: Request, model: str, salt: str, *, extensions: bool, options: Mapping[str, Any]) -> Json:
    """The body of /v1/completions. The prompt is token ids, so that every engine computes the same."""
    sampling = request.sampling
    body: Json = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.expected_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {name: getattr(sampling, name) for name in _PLAIN if getattr(sampling, name) is not None}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if extensions:
        body["stream_options"]["continuous_usage_stats"] = True
        body["return_token_ids"] = True
        body["cache_salt"] = salt if request.salt is None else f"{salt}-{request.salt}"
        body |= _additions(request)
        if request.priority:
            body["priority"] = request.priority
        if request.pin_tokens:
            body["cache_pin_tokens"] = request.pin_tokens
    return body | dict(options)


def _asked(sampling: SamplingParams) -> Json:
    """The values of vLLM's fields that ask for something."""
    plain = SamplingParams(sampling.max_tokens)
    return {name: getattr(sampling, name) for name in _ADDED if getattr(sampling, name) != getattr(plain, name)}


def _additions(request: Request) -> Json:
    """vLLM's fields for a request, with its length forced where it ends at nothing else."""
    sampling = request.sampling
    asked = _asked(sampling)
    if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        asked["min_tokens"] = request.expected_tokens  # the length is forced
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}


class EventReader:
    """Cuts a stream of server-sent events into the JSON of each."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Json]:
        """The events that are complete with this data. Raises ValueError for what is no JSON object."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text and text != b"[DONE]":
                event = json.loads(text)
                if not isinstance(event, dict):
                    raise ValueError("an event is no object")
                events.append(event)
        return events


def finish_reason(text: str) -> FinishReason:
    """The protocol's word; an unknown one is a stop."""
    return _REASONS.get(text, FinishReason.STOP)


def error_text(body: object) -> str:
    """What an answer that is an error says, in whichever of the usual shapes."""
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if key in body:
                return error_text(body[key])
    return " ".join(str(body).split())[:500]
