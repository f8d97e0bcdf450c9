"""OpenAI's /v1/responses: text in, text out, whole or as named events. Nothing is stored between calls."""

from typing import Any

from kvlab.errors import shown
from kvlab.server.answers import ChatAnswer, Json, server_sent
from kvlab.server.bodies import ChatRequest, Message, ResponsesRequest, Sampling
from kvlab.server.calls import Event
from kvlab.server.errors import ApiError
from kvlab.server.parameters import check_meaning

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The same call as a chat. Raises ApiError for what is no text."""
    check_meaning(body)
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += [_message(number, item) for number, item in enumerate(body.input)]
    if not messages:
        raise ApiError(400, "input is empty", "input")
    shape = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(shape, dict):
        raise ApiError(400, f'text.format={shown(shape, repr)}: needed: {{"type": "text"}} or a schema', "text")
    if shape.get("type") == "json_schema":  # flat here, nested in chats
        shape = {"type": "json_schema", "json_schema": shape}
    said: dict[str, Any] = {
        **{name: getattr(body, name) for name in Sampling.model_fields},
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": None if body.top_logprobs is None else True,
        "top_logprobs": body.top_logprobs,
        "response_format": shape,
    }
    return ChatRequest(messages=messages, **{name: value for name, value in said.items() if value is not None})


def _message(number: int, item: dict[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    is_message = item.get("type", "message") == "message" and role in ("user", "assistant", "system", "developer")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if is_message and isinstance(parts, list):
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            return Message.model_validate({"role": role, "content": "".join(map(str, texts))})
    text = 'is no message of text; needed: {"role": "user", "content": "..."}'
    raise ApiError(400, f"input[{number}] {text}", "input")


class ResponsesAnswer(ChatAnswer):
    """Of /v1/responses."""

    kind = chunk_kind = "response"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._item_id = self.name.replace("resp_", "msg_", 1)
        self._events = 0

    def stream_begin(self) -> bytes:
        """The events before the first token."""
        response = self._response("in_progress", [])
        item = self._item("in_progress", [])
        return (
            self._named("response.created", response=response)
            + self._named("response.in_progress", response=response)
            + self._named("response.output_item.added", output_index=0, item=item)
            + self._named("response.content_part.added", **self._place(), part=self._part(""))
        )

    def stream_event(self, event: Event) -> bytes:
        """A token, as an event."""
        self.add(event)
        logprobs = self._logprobs[0][-1:] if self._body.logprobs else []
        entries = [entry for token in logprobs for entry in token["content"]]
        delta = event.output.text
        return self._named("response.output_text.delta", **self._place(), delta=delta, logprobs=entries)

    def stream_end(self) -> bytes:
        """The events behind the last token."""
        body = self.body()
        part, item = body["output"][0]["content"][0], body["output"][0]
        done = {"text": self._texts[0], "logprobs": part["logprobs"]}
        return (
            self._named("response.output_text.done", **self._place(), **done)
            + self._named("response.content_part.done", **self._place(), part=part)
            + self._named("response.output_item.done", output_index=0, item=item)
            + self._named(f"response.{body['status']}", response=body)
        )

    def stream_error(self, error: ApiError) -> bytes:
        """What went wrong on the way, as an event."""
        return self._named("error", code=str(error.code), message=str(error), param=error.param)

    def body(self) -> Json:
        """The whole answer."""
        status = "incomplete" if self._reasons[0] == "length" else "completed"
        return self._response(status, [self._item(status, [self._part(self._texts[0])])])

    def usage(self) -> Json:
        """Tokens so far."""
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, output: list[Json]) -> Json:
        sampling = self._requests[0].sampling
        return {
            "id": self.name,
            "object": self.kind,
            "created_at": self._created,
            "status": status,
            "model": self._model.name,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": sampling.max_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tool_choice": "none",
            "tools": [],
            "usage": None if status == "in_progress" else self.usage(),
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> Json:
        logprobs = [entry for token in self._logprobs[0] for entry in token["content"]]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _named(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return server_sent({"type": kind, "sequence_number": self._events - 1, **fields}, kind)
