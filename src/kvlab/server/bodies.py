"""What clients send, as OpenAI's API defines it, with vLLM's additions (docs/server.md lists both).

A field that is not here is ignored, as OpenAI's servers do, and logged once, unless it would change what the answer
means (`CHANGES_MEANING`): then the request is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field

#: Fields of the protocol that would change the answer, with the values of those that ask for nothing.
CHANGES_MEANING: Mapping[str, list[object]] = yaml.safe_load(
    Path(__file__).with_name("changes_meaning.yaml").read_text(encoding="utf-8")
)


T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # of millions of mistakes the first is enough


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Strict):
    """What a stream says beside its tokens."""

    include_usage: bool | None = None  # a last chunk without choices has the tokens' numbers
    continuous_usage_stats: bool | None = None  # every chunk has them


class StructuredOutputs(_Strict):
    """What an answer has to follow, as vLLM has it: one of these."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")  # a schema
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None  # Lark's form, or GBNF
    json_object: bool | None = None
    whitespace_pattern: str | None = None  # between the parts of JSON


class Sampling(_Strict):
    """What every way to ask for an answer has in common. Null is the same as leaving a field out."""

    model: str | None = None
    stop: str | List[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    # vLLM's additions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: List[int] | None = None
    allowed_token_ids: List[int] | None = None
    bad_words: List[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # kvlab's addition
    cache_pin_tokens: int | None = None


class Generation(Sampling):
    """What completions and chat have beside that."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None  # {"type": "json_schema", "json_schema": {...}}, or json_object
    # vLLM's additions
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None  # alternatives to each token of the prompt, 20 at most
    truncate_prompt_tokens: int | None = None  # keep the prompt's last; -1: as many as the model takes
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: str | List[str] | List[int] | List[List[int]] = Field(description="text, token ids, or lists of either")
    echo: bool | None = None
    logprobs: int | None = None  # alternatives to each token, 20 at most


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: str | List[dict[str, Any]] | None = None  # parts of {"type": "text", "text": ...}
    tool_calls: List[dict[str, Any]] | None = None  # of an assistant, as an answer has them
    tool_call_id: str | None = None  # of the call that a tool answers
    name: str | None = None

    def text(self) -> str:
        """The content. Raises ValueError for parts that are not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise ValueError('content has a part that is no text; needed: {"type": "text", "text": "..."}')
        return "".join(map(str, texts))


class Rendering(_Strict):
    """How a chat template is to write messages, as vLLM has it."""

    add_generation_prompt: bool | None = None  # the text ends where the answer begins; without it true
    continue_final_message: bool | None = None  # or behind the last message, which the answer continues
    chat_template_kwargs: dict[str, Any] | None = None  # what else the template may name
    add_special_tokens: bool | None = None  # with which the checkpoint begins a text


class ChatRequest(Generation, Rendering):
    """The body of /v1/chat/completions."""

    messages: List[Message] = Field(min_length=1)
    echo: bool | None = None  # the last message before the answer, where both have the same role
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None  # alternatives to each token, 20 at most
    tools: List[dict[str, Any]] | None = None  # {"type": "function", "function": {"name", "parameters"}}
    tool_choice: str | dict[str, Any] | None = None  # auto, none, required, or a function
    parallel_tool_calls: bool | None = None


class ResponsesRequest(Sampling):
    """The body of /v1/responses: texts alone, and nothing that an earlier call left."""

    input: str | List[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None


class TokenizeRequest(Rendering):
    """The body of /tokenize: a prompt, or messages as a chat has them."""

    model: str | None = None
    prompt: str | None = None
    messages: List[Message] | None = None
    tools: List[dict[str, Any]] | None = None  # that the model is told of with the messages
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: List[int]


#: The paths that take a body.
KINDS: Mapping[str, type[Generation | ResponsesRequest | TokenizeRequest | DetokenizeRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
