"""The forms in which models write tool calls, read as the text comes: what of it is content, and what is a call."""

import json
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from kvlab.registry import Registry


class ToolCall(NamedTuple):
    """A function that the model calls; `arguments` are JSON."""

    name: str
    arguments: str


Read = tuple[str, list[ToolCall]]


class ToolReader(ABC):
    """Reads one answer."""

    @abstractmethod
    def add(self, text: str) -> Read:
        """The content and the calls that this text completes."""

    @abstractmethod
    def close(self) -> Read:
        """What was held back, at the answer's end."""


TOOL_FORMS: Registry[type[ToolReader]] = Registry("server.tool_call_parser")


@TOOL_FORMS.register("hermes")
class HermesReader(ToolReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them, anywhere in a
    text. What is between the tags and is no call is content, with them.
    """

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self._is_inside, self._has_called = "", False, False

    def add(self, text: str) -> Read:
        content, calls = "", list[ToolCall]()
        self._held += text
        while True:
            before, tag, behind = self._held.partition(self._END if self._is_inside else self._BEGIN)
            if not tag:
                break
            if not self._is_inside:
                content += before.rstrip()
            elif (call := _as_call(before)) is not None:
                calls.append(call)
                self._has_called = True
            else:
                content += self._BEGIN + before + self._END
            self._held, self._is_inside = behind, not self._is_inside
        if not self._is_inside:
            # White space may be what stands before a call.
            cut = len(self._held[: len(self._held) - _begun(self._held, self._BEGIN)].rstrip())
            content, self._held = content + self._held[:cut], self._held[cut:]
        return content, calls

    def close(self) -> Read:
        held, self._held = self._held, ""
        if not self._is_inside:
            return "" if self._has_called and not held.strip() else held, []
        call = _as_call(held)  # a model may end where a tag would be
        return (self._BEGIN + held, []) if call is None else ("", [call])


@TOOL_FORMS.register("llama3_json")
class LlamaReader(ToolReader):
    """An answer that is `{"name": ..., "parameters": {...}}` and nothing else, as Llama 3 writes them; several are
    separated by ";", and a tag may be before them. Every other answer is content.
    """

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held, self._is_content = "", False

    def add(self, text: str) -> Read:
        if self._is_content:
            return text, []
        self._held += text
        begin = self._held.lstrip()
        if begin and begin[0] != "{" and not self._TAG.startswith(begin[: len(self._TAG)]):
            self._is_content, held, self._held = True, self._held, ""
            return held, []
        return "", []

    def close(self) -> Read:
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix(self._TAG).strip(), list[ToolCall]()
        while rest:
            if (first := _first_call(rest)) is None:
                return held, []
            calls.append(first[0])
            rest = first[1].lstrip().removeprefix(";").lstrip()
        return "" if calls else held, calls


class ListReader(ToolReader):
    """A JSON list of `{"name": ..., "parameters": {...}}`: what an answer is held to that has to call something.
    Of one that is cut the calls that are whole.
    """

    def __init__(self) -> None:
        self._held, self._has_called = "", False

    def add(self, text: str) -> Read:
        self._held += text
        calls = list[ToolCall]()
        while "}" in text:
            first = _first_call(self._held.lstrip().removeprefix("," if self._has_called else "[").lstrip())
            if first is None:
                break
            calls.append(first[0])
            self._held, self._has_called = first[1], True
        return "", calls

    def close(self) -> Read:
        return ("" if self._has_called else self._held), []


def _as_call(text: str) -> ToolCall | None:
    """The call that a text is; None: it is none."""
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _first_call(text: str) -> tuple[ToolCall, str] | None:
    """The call that a text begins with, and what is behind it; None: it begins with none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    call = _call_of(value)
    return None if call is None else (call, text[end:])


def _call_of(value: Any) -> ToolCall | None:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(name, str) else None
    if isinstance(arguments, str):  # some write it as text that is JSON
        return ToolCall(str(name), arguments)
    return ToolCall(str(name), json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _begun(text: str, tag: str) -> int:
    """Characters at the end of a text that may become the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def form_of(template: str) -> str:
    """The form that a chat template asks its model for."""
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return "llama3_json" if is_llama and "<tool_call>" not in template else "hermes"
