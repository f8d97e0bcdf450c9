"""What clients get back: bodies and chunks of completions and chats, as OpenAI's API defines them."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from kvlab.core import FinishReason, Request, StepOutput, TokenLogprobs
from kvlab.server.bodies import ChatRequest, CompletionRequest, Generation
from kvlab.server.calls import Event
from kvlab.server.errors import ApiError
from kvlab.server.model import ServedModel
from kvlab.server.tool_forms import ToolCall
from kvlab.server.tools import Tools

Json = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_as_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each chunk

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def server_sent(data: object, kind: str | None = None) -> bytes:
    """Data as a server-sent event, of a kind that its line names."""
    return f"{'' if kind is None else f'event: {kind}{chr(10)}'}data: {_as_json(data)}\n\n".encode()


class Answer(ABC):
    """The answer to one call, event by event: `stream_...` for a stream, `add` and `body` for the whole."""

    kind: str  # its name in OpenAI's API
    chunk_kind: str
    _gives_no_token = False  # the prompt is all that was asked for; its request computes a token nevertheless

    def __init__(self, name: str, body: Generation, requests: Sequence[Request], model: ServedModel) -> None:
        self.name = name
        self._created = int(time.time())
        self._body = body
        self._requests = requests
        self._model = model
        self._samples = requests[0].sampling.n
        self._texts = [""] * (len(requests) * self._samples)
        self._ids: list[list[int]] = [[] for _ in self._texts]
        self._logprobs: list[list[Json]] = [[] for _ in self._texts]
        self._reasons: list[str | None] = [None] * len(self._texts)
        self._prompt_logprobs: list[list[Json | None] | None] = [None] * len(requests)
        self._cached = 0

    def add(self, event: Event) -> None:
        """Take an event into the whole answer."""
        index = self._index(event)
        self._texts[index] += self._text(index, event)
        if (logprobs := self._logprobs_of(index, event)) is not None:
            self._logprobs[index].append(logprobs)
        self._note(event)

    def stream_begin(self) -> bytes:
        """What a stream has before its first token."""
        return b""

    def stream_event(self, event: Event) -> bytes:
        """What it has of an event."""
        index = self._index(event)
        choice: Json = {"index": index, **self._delta(index, event)}
        choice["logprobs"] = self._logprobs_of(index, event)
        choice["finish_reason"] = self._reason(index, event.output)
        if self._body.return_token_ids:
            is_given = event.output.token_id is not None and not self._gives_no_token
            choice["token_ids"] = [event.output.token_id] if is_given else []
            if not self._ids[index]:
                choice["prompt_token_ids"] = list(self._requests[event.request].prompt_token_ids)
        is_first = event.output.prompt_logprobs is not None
        self._note(event)
        chunk = self._head(self.chunk_kind) | {"choices": [choice]}
        if is_first and self._body.prompt_logprobs is not None:
            self._add_prompt_logprobs(chunk, event.request)
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return server_sent(chunk)

    def stream_end(self) -> bytes:
        """What it has behind its last event: where the usage was asked for, a chunk without choices that has it."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return _DONE
        return server_sent(self._head(self.chunk_kind) | {"choices": [], "usage": self.usage()}) + _DONE

    def stream_error(self, error: ApiError) -> bytes:
        """What it has at its end if it failed."""
        return server_sent(error.body()) + _DONE

    def body(self) -> Json:
        """The whole answer."""
        choices = []
        for index, reason in enumerate(self._reasons):
            choice = {"index": index, **self._whole(index), "finish_reason": reason}
            if self._body.return_token_ids:
                prompt = self._requests[index // self._samples].prompt_token_ids
                choice |= {"token_ids": self._ids[index], "prompt_token_ids": list(prompt)}
            choices.append(choice)
        whole = self._head(self.kind) | {"choices": choices, "usage": self.usage()}
        if self._body.prompt_logprobs is not None:
            for number in range(len(self._requests)):
                self._add_prompt_logprobs(whole, number)
        return whole

    def usage(self) -> Json:
        """Tokens so far."""
        prompt = sum(len(request.prompt_token_ids) for request in self._requests)
        output = sum(map(len, self._ids))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    @abstractmethod
    def _delta(self, index: int, event: Event) -> Json:
        """What a chunk adds to a choice."""

    @abstractmethod
    def _whole(self, index: int) -> Json:
        """A choice of the whole answer."""

    @abstractmethod
    def _logprobs_of(self, index: int, event: Event) -> Json | None:
        """An output's log-probabilities, where they were asked for."""

    def _add_prompt_logprobs(self, found: Json, request: int) -> None:
        """Add those of a request's prompt to a chunk or an answer, as vLLM has them: to each of its choices."""
        for choice in found["choices"]:
            if choice["index"] // self._samples == request:
                choice["prompt_logprobs"] = self._prompt_logprobs[request]

    def _alternatives(self, token: int, entry: TokenLogprobs) -> Json:
        """A prompt's token and its alternatives by id. The rank of one that is not among them is not known."""
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(entry.top, 1)}
        known = ranked | {token: ranked.get(token, (entry.logprob, None))}
        return {
            str(other): {"logprob": value, "rank": rank, "decoded_token": self._token(other)}
            for other, (value, rank) in known.items()
        }

    def _text(self, index: int, event: Event) -> str:
        """The text that an event adds to a choice."""
        return event.output.text

    def _note(self, event: Event) -> None:
        index, output = self._index(event), event.output
        if output.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            tokens = self._requests[event.request].prompt_token_ids[1:]
            pairs = zip(tokens, output.prompt_logprobs, strict=True)
            self._prompt_logprobs[event.request] = [None, *(self._alternatives(*pair) for pair in pairs)]
        if output.token_id is not None and not self._gives_no_token:
            self._ids[index].append(output.token_id)
        self._reasons[index] = self._reason(index, output)
        if event.record is not None and not event.record.sample:
            self._cached += event.record.cached_tokens

    def _reason(self, index: int, output: StepOutput) -> str | None:
        """Why a choice ended; None: it has not."""
        return None if output.finish_reason is None else _REASONS.get(output.finish_reason)

    def _index(self, event: Event) -> int:
        return event.request * self._samples + event.output.index

    def _head(self, kind: str) -> Json:
        return {"id": self.name, "object": kind, "created": self._created, "model": self._model.name}

    def _token(self, token_id: int) -> str:
        """A token's text; without a tokenizer, or where it is asked for, its id."""
        if self._model.tokenizer is None or self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._model.decode([token_id], special=self._body.skip_special_tokens is False)


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"
    _body: CompletionRequest

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offsets: dict[int, int] = {}
        self._gives_no_token = bool(self._body.echo) and self._body.max_tokens == 0

    def _delta(self, index: int, event: Event) -> Json:
        return {"text": self._text(index, event)}

    def _whole(self, index: int) -> Json:
        entries = self._logprobs[index]
        lists = {key: [value for one in entries for value in one[key]] for key in entries[0]} if entries else None
        return {"text": self._texts[index], "logprobs": lists}

    def _text(self, index: int, event: Event) -> str:
        """With echo, the prompt before the first of it."""
        output = "" if self._gives_no_token else event.output.text
        if self._body.echo and not self._ids[index]:
            special = self._body.skip_special_tokens is False
            return self._model.decode(self._requests[event.request].prompt_token_ids, special=special) + output
        return output

    def _logprobs_of(self, index: int, event: Event) -> Json | None:
        """With echo those of the prompt come with the first; its first token has none."""
        output = event.output
        if self._body.logprobs is None or output.logprobs is None or output.token_id is None:
            return None
        pairs = list[tuple[int, TokenLogprobs | None]]()
        if self._body.echo and output.prompt_logprobs is not None:
            prompt = self._requests[event.request].prompt_token_ids
            pairs += zip(prompt, [None, *output.prompt_logprobs], strict=True)
        if not self._gives_no_token:
            pairs.append((output.token_id, output.logprobs))
        texts, offsets = [self._token(token) for token, _ in pairs], list[int]()
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else entry.logprob for _, entry in pairs],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in pairs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> Json:
        return {self._token(token): value for token, value in entry.top[: self._body.logprobs]}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    _body: ChatRequest

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        tools = Tools.of(self._body)
        self._only_call = None if tools is None else tools.named
        self._readers = [None if tools is None else tools.reader(self._model) for _ in self._texts]
        self._calls: list[list[Json]] = [[] for _ in self._texts]

    def _delta(self, index: int, event: Event) -> Json:
        role: Json = {} if self._ids[index] else {"role": "assistant"}  # in the first chunk, which has a token too
        earlier = len(self._calls[index])
        text = self._text(index, event)
        if self._only_call is not None:
            call: Json = {"index": 0, "function": {"arguments": text}}
            if not self._ids[index]:
                call = {"index": 0} | _call(ToolCall(self._only_call, text))
            return {"delta": role | {"tool_calls": [call]}}
        calls = [{"index": earlier + n} | call for n, call in enumerate(self._calls[index][earlier:])]
        delta = role | {"content": text} if text or not calls else role
        return {"delta": delta | {"tool_calls": calls} if calls else delta}

    def _text(self, index: int, event: Event) -> str:
        """With echo, the last message before the first of it, where it is the assistant's."""
        last = self._body.messages[-1]
        echoed = last.text() if self._body.echo and last.role == "assistant" and not self._ids[index] else ""
        reader = self._readers[index]
        if reader is None:
            return echoed + event.output.text
        text, calls = reader.add(event.output.text)
        if event.output.finish_reason is not None:
            rest, more = reader.close()
            text, calls = text + rest, calls + more
        self._calls[index] += map(_call, calls)
        return echoed + text

    def _whole(self, index: int) -> Json:
        content = [token for entry in self._logprobs[index] for token in entry["content"]]
        logprobs = {"content": content} if self._body.logprobs else None
        text, calls = self._texts[index], self._calls[index]
        if self._only_call is not None:
            text, calls = "", [_call(ToolCall(self._only_call, text))]
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        return {"message": message | {"tool_calls": calls} if calls else message, "logprobs": logprobs}

    def _reason(self, index: int, output: StepOutput) -> str | None:
        reason = super()._reason(index, output)
        return "tool_calls" if reason == "stop" and self._calls[index] else reason

    def _add_prompt_logprobs(self, found: Json, request: int) -> None:
        found["prompt_logprobs"] = self._prompt_logprobs[request]  # of a chat, which has one prompt

    def _logprobs_of(self, index: int, event: Event) -> Json | None:
        output = event.output
        if not self._body.logprobs or output.logprobs is None or output.token_id is None:
            return None
        logprobs: TokenLogprobs = output.logprobs
        top = [self._entry(token, value) for token, value in logprobs.top]
        return {"content": [self._entry(output.token_id, logprobs.logprob) | {"top_logprobs": top}]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._token(token_id)
        data: bytes | None = text.encode()
        if "\ufffd" in text and self._model.tokenizer is not None:  # a part of a character has no text of its own
            data = self._model.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}
