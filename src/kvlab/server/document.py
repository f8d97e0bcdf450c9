"""What the OpenAPI document says of answers: their shapes, and the statuses that each route has."""

from typing import Any, Literal

from pydantic import BaseModel


class CachedTokens(BaseModel):
    """Of a prompt."""

    cached_tokens: int  # that the prefix cache had


class Usage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    logprobs: dict[str, Any] | None
    token_ids: list[int] = []  # these two where return_token_ids asks for them
    prompt_token_ids: list[int] = []


class CompletionChoice(_Choice):
    """One answer to one prompt."""

    text: str


class ChatMessage(BaseModel):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(_Choice):
    """One answer to a conversation."""

    message: ChatMessage


class _Body(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class Completion(_Body):
    """A whole answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Chat(_Body):
    """A whole answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the field, `code` is the status or a name for programs."""

    message: str
    type: str
    param: str | None
    code: int | str


class Error(BaseModel):
    """An error as OpenAI's API reports it."""

    error: ErrorDetail


class Health(BaseModel):
    """Whether requests are taken; `audit` where it was asked for: every broken invariant of the pool."""

    status: Literal["ready", "draining", "broken"]
    audit: list[str] = []


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """All there are."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """A text or messages as token ids."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None  # as the vocabulary has them, where they are asked for


class Text(BaseModel):
    """Token ids as text."""

    prompt: str


class Version(BaseModel):
    """Of kvlab."""

    version: str


Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """That a route may answer with these, too."""
    return {status: {"model": Error, "description": "An error as OpenAI's API reports it."} for status in statuses}


def generated(body: type[BaseModel]) -> Responses:
    """A whole answer, or with `stream` server-sent events."""
    return {200: {"model": body, "content": {"text/event-stream": {}}}}
