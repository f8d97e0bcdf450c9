"""From a client's body to the engine's requests."""

import json
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvlab.core import Message, Request, SamplingParams, limits
from kvlab.core.request import PICKING
from kvlab.errors import shown
from kvlab.models.chat_template import Rendering
from kvlab.server import bodies
from kvlab.server.errors import ApiError, context_exceeded, wrong
from kvlab.server.model import ServedModel
from kvlab.server.structured import grammar_of
from kvlab.server.tools import Tools, told

_LONGEST_SALT = 1024  # characters

MAX_PROMPTS = 128  # of one call
_PART = 20_000  # ids
_COMPLETION_TOKENS = 16  # as OpenAI's, where a completion does not say
_SAME = (*PICKING, "min_tokens", "n", "ignore_eos", "skip_special_tokens")
_ignored: set[str] = set()  # fields of requests that were logged
_MOST_IGNORED = 100
_log = logging.getLogger(__name__)


def completion_requests(body: bodies.CompletionRequest, name: str, model: ServedModel) -> list[Request]:
    """One request for each prompt. Raises ApiError."""
    _check(body, model)
    if body.logprobs is not None and body.logprobs > limits.MAX_LOGPROBS:
        raise wrong("logprobs", f"={body.logprobs}: at most {limits.MAX_LOGPROBS}")
    if body.logprobs is not None:
        _check_logprobs(model, "echo" if body.echo else "logprobs")
    prompts = prompts_of(body)
    ids = [_ids_of(prompt, body, model) for prompt in prompts]
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and body.echo:
        most = 1  # which is computed, and not given
    sampling = _sampling(body, most, body.logprobs, model)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    names = [name] if len(ids) == 1 else [f"{name}-{number}" for number in range(len(ids))]
    return [_request(body, request_id, prompt, sampling) for request_id, prompt in zip(names, ids, strict=True)]


def chat_request(body: bodies.ChatRequest, name: str, model: ServedModel) -> Request:
    """The request of a conversation. Raises ApiError."""
    _check(body, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", " needs logprobs=true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= limits.MAX_LOGPROBS:
        raise wrong("top_logprobs", f"={body.top_logprobs}: from 0 to {limits.MAX_LOGPROBS}")
    if body.logprobs:
        _check_logprobs(model, "logprobs" if body.top_logprobs is None else "top_logprobs")
    tools = Tools.of(body)
    given = list(body.tools or ()) if tools is not None and tools.choice != "none" else []
    ids = _ids_of_messages(body, body.messages, given, model, bounded=not body.truncate_prompt_tokens)
    ids = _truncated(ids, body, model)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = model.max_tokens - len(ids)
    if room < 1:
        text = f"you sent {len(ids)} tokens in messages, which leaves no room for an answer"
        raise context_exceeded(model.max_tokens, text, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, room if asked is None else asked, logprobs, model)
    if tools is not None and (grammar := tools.grammar(model)) is not None:
        if sampling.grammar is not None:
            text = ": holds the answer to a call; leave response_format and structured_outputs out"
            raise wrong("tool_choice", text)
        sampling = replace(sampling, grammar=grammar)
    return _request(body, name, ids, sampling)


def _ids_of_messages(
    body: bodies.Rendering,
    messages: list[bodies.Message],
    tools: list[dict[str, Any]],
    model: ServedModel,
    *,
    bounded: bool,
) -> tuple[int, ...]:
    """The ids of a conversation with the tools that its model is told of, as the chat template is to write it; see
    `ServedModel.encode`. Raises ApiError.
    """
    turns, variables = conversation(messages), body.chat_template_kwargs or {}
    if body.continue_final_message and body.add_generation_prompt:
        text = "=true: the answer continues the last message; leave out add_generation_prompt"
        raise wrong("continue_final_message", text)
    if "tools" not in model.template:
        turns = told(turns, tools)
    elif tools:
        variables = {**variables, "tools": tools}
    continues, reply = bool(body.continue_final_message), body.add_generation_prompt
    rendering = Rendering(not continues if reply is None else reply, continues, variables)
    special = body.add_special_tokens or False
    return model.encode(turns, "messages", bounded=bounded, special=special, rendering=rendering)


def _ids_of(prompt: str | list[int], body: bodies.CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return _truncated(tuple(prompt), body, model)
    bounded = not body.truncate_prompt_tokens
    return _truncated(model.encode(prompt, "prompt", bounded=bounded, special=body.add_special_tokens), body, model)


def _truncated(ids: tuple[int, ...], body: bodies.Generation, model: ServedModel) -> tuple[int, ...]:
    """The last of the prompt's tokens, as many as are asked for."""
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    if most != -1 and not 1 <= most <= model.max_tokens:
        text = f"={shown(most)}: from 1 to {model.max_tokens}; -1 keeps as many as the model takes"
        raise wrong("truncate_prompt_tokens", text)
    return ids[-(model.max_tokens if most == -1 else most) :]


def tokens_answer(body: bodies.TokenizeRequest, model: ServedModel) -> bytes:
    """The JSON of /tokenize. Raises ApiError."""
    if body.prompt is None:
        ids = _ids_of_messages(body, body.messages or [], list(body.tools or ()), model, bounded=False)
    else:
        ids = model.encode(body.prompt, "prompt", bounded=False, special=body.add_special_tokens)
    # In parts: json keeps all other threads from running while it writes one.
    parts = [json.dumps(ids[start : start + _PART])[1:-1] for start in range(0, len(ids), _PART)]
    rest = f'"count":{len(ids)},"max_model_len":{model.max_tokens}'
    if body.return_token_strs:
        rest += f',"token_strs":{json.dumps(model.entries(ids))}'
    return f'{{"tokens":[{", ".join(parts)}],{rest}}}'.encode()


def conversation(messages: list[bodies.Message]) -> list[Message]:
    """Messages as a chat template takes them. Raises ApiError."""
    turns = []
    for number, message in enumerate(messages):
        try:
            turns.append(Message(message.role, message.text(), _fields(message)))
        except ValueError as error:
            raise ApiError(400, f"messages[{number}].{error}", "messages") from error
    return turns


def _fields(message: bodies.Message) -> dict[str, Any] | None:
    """What a template may read beside the content; arguments of calls as objects, as templates want them."""
    fields = {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name)) is not None}
    if not message.tool_calls:
        return fields or None
    calls = []
    for call in message.tool_calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("tool_calls has one that is no function with a name")
        arguments = function.get("arguments")
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return {**fields, "tool_calls": calls}


def _check(body: bodies.Generation, model: ServedModel) -> None:
    if body.model is not None and body.model not in (model.name, ""):
        raise ApiError(404, f"model={shown(body.model, repr)}: there is {model.name!r}", "model")
    check_meaning(body)
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", " needs stream=true")


def check_meaning(body: bodies.Sampling) -> None:
    """Raise ApiError for a field that would change the answer; log the others that nobody knows, once each."""
    for name, value in (body.model_extra or {}).items():
        if name in bodies.CHANGES_MEANING:
            if value is not None and value not in bodies.CHANGES_MEANING[name]:
                raise wrong(name, f"={shown(value, repr)}: is not supported; leave it out")
        elif name not in _ignored and len(_ignored) < _MOST_IGNORED:
            _ignored.add(name)
            _log.warning("the field %s of requests is not known, and ignored", shown(name, repr))


def prompts_of(body: bodies.CompletionRequest) -> list[Any]:
    """The texts and lists of token ids. Raises ApiError."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise wrong("prompt", " is empty")
    prompts: list[Any] = [prompt] if isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise wrong("prompt", f" has {len(prompts)} prompts: at most {MAX_PROMPTS} in one call")
    return prompts


def _sampling(body: bodies.Generation, max_tokens: int, logprobs: int | None, model: ServedModel) -> SamplingParams:
    said = {name: getattr(body, name) for name in _SAME}
    if body.top_k == -1:  # vLLM's word for all
        said["top_k"] = 0
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise wrong("allowed_token_ids", " is empty: nothing could be sampled; leave it out")
    if (words := len(body.bad_words or ())) > limits.MAX_BAD_WORDS:
        raise wrong("bad_words", f" has {words} words; at most {limits.MAX_BAD_WORDS}")
    sampling = SamplingParams(max_tokens, temperature=1.0, logprobs=logprobs)  # OpenAI's default is no greedy one
    if body.prompt_logprobs is not None:
        _check_logprobs(model, "prompt_logprobs")
    for field in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(body, field) and not model.has_logprobs:
            raise wrong(field, ": a simulated device draws its words and has no logits to change; leave it out")
    return replace(
        sampling,
        prompt_logprobs=body.prompt_logprobs,
        **{name: value for name, value in said.items() if value is not None},
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_biases(body.logit_bias or {}),
        include_stop=bool(body.include_stop_str_in_output),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=model.bad_words(body.bad_words or ()),
        grammar=grammar_of(body, model),
    )


def _check_logprobs(model: ServedModel, field: str) -> None:
    if not model.has_logprobs:
        raise wrong(field, ": a simulated device computes no log-probabilities; leave it out")


def _biases(said: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), bias) for token, bias in said.items())
    except ValueError as error:
        raise wrong("logit_bias", ": keys are token ids") from error


def _request(body: bodies.Generation, name: str, ids: tuple[int, ...], sampling: SamplingParams) -> Request:
    if len(body.cache_salt or "") > _LONGEST_SALT:
        raise wrong("cache_salt", f": has {len(body.cache_salt or ''):,} characters; at most {_LONGEST_SALT}")
    pinned = body.cache_pin_tokens or 0
    if not 0 <= pinned <= len(ids):
        text = f"={shown(pinned)}: must be a number of the prompt's first tokens, from 0 to {len(ids)}"
        raise wrong("cache_pin_tokens", text)
    return Request(name, ids, sampling, salt=body.cache_salt, priority=body.priority or 0, pin_tokens=pinned)
