"""Tools that a chat may call: what the model is told of them, and what its answer is held to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.core import Grammar, Message
from kvlab.errors import shown
from kvlab.server.bodies import ChatRequest
from kvlab.server.errors import ApiError
from kvlab.server.model import ServedModel
from kvlab.server.structured import compiler, made
from kvlab.server.tool_forms import TOOL_FORMS, ListReader, ToolReader

_MOST = 128
_NEEDED = 'needed: {"type": "function", "function": {"name": ..., "parameters": {...}}}'


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a call. `choice` is none, auto, required, or named: then `named` has to be called."""

    functions: dict[str, dict[str, Any]]
    choice: str
    named: str | None
    parallel: bool

    @classmethod
    def of(cls, body: ChatRequest) -> Tools | None:
        """Those of a call; None: it has none. Raises ApiError."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice needs tools", "tool_choice")
            return None
        if len(body.tools) > _MOST:
            raise ApiError(400, f"tools has {len(body.tools)} entries; at most {_MOST}", "tools")
        functions = dict[str, dict[str, Any]]()
        for number, tool in enumerate(body.tools):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict):
                raise ApiError(400, f"tools[{number}] is no function; {_NEEDED}", "tools")
            name, parameters = function.get("name"), function.get("parameters")
            if not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
                raise ApiError(400, f"tools[{number}] has no name, or parameters that are no schema", "tools")
            functions[name] = function
        return cls(functions, *_choice(choice, functions), body.parallel_tool_calls is not False)

    def reader(self, model: ServedModel) -> ToolReader | None:
        """Reads an answer; None: it is content, or a named function's arguments."""
        if self.choice in ("none", "named"):
            return None
        return ListReader() if self.choice == "required" else TOOL_FORMS.get(model.tool_form)()

    def grammar(self, model: ServedModel) -> Grammar | None:
        """What an answer is held to that has to call something. Raises ApiError."""
        if self.choice in ("none", "auto"):
            return None
        grammars = compiler(model, "tool_choice")
        if self.named is not None:
            arguments = _schema(self.functions[self.named])
            return made("tools", lambda: grammars.json_schema(arguments))
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": _schema(function)},
                "required": ["name", "parameters"],
            }
            for name, function in self.functions.items()
        ]
        whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            whole["maxItems"] = 1
        return made("tools", lambda: grammars.json_schema(whole))


def _choice(choice: Any, functions: dict[str, dict[str, Any]]) -> tuple[str, str | None]:
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto", None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        text = "must be none, auto, required, or a function that tools has"
        raise ApiError(400, f"tool_choice={shown(choice, repr)}: {text}", "tool_choice")
    return "named", name


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {}} | (function.get("parameters") or {})


def told(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages and tools in words, for a chat template that takes neither tools nor calls: in Hermes' form."""
    plain = [Message("user" if turn.role == "tool" else turn.role, _in_words(turn)) for turn in messages]
    if not tools:
        return plain
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions. Their signatures:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        "To call one, write its name and its arguments as JSON between these tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    if plain and plain[0].role in ("system", "developer"):
        return [Message(plain[0].role, f"{plain[0].content}\n\n{text}"), *plain[1:]]
    return [Message("system", text), *plain]


def _in_words(message: Message) -> str:
    if message.role == "tool":
        return f"<tool_response>\n{message.content}\n</tool_response>"
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in (message.fields or {}).get("tool_calls", ())
    ]
    return "\n".join([*([message.content] if message.content or not calls else []), *calls])
