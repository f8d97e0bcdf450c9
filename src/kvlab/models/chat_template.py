"""Chat templates: a checkpoint's Jinja text, which makes one prompt of messages. Strangers wrote it, so it runs in
Jinja's sandbox: it reaches nothing but what it is given, and makes no text of gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlab.core import Message
from kvlab.errors import TokenizerError, shown

_MOST_CHARS = 16 << 20  # of a prompt
_MOST_TEMPLATE_CHARS = 1 << 20


class _Sandbox(ImmutableSandboxedEnvironment):
    """As transformers sets it up; `*` and `**` make nothing large."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise, strftime_now=lambda text: datetime.now().strftime(text))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [value if isinstance(value, int | float) else len(value) for value in (left, right)]
        if operator == "**" or abs(sizes[0] * sizes[1]) > _MOST_CHARS:
            raise SecurityError(f"{operator} of large values")
        return super().call_binop(context, operator, left, right)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    """Without the escapes of HTML that Jinja's own has."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A template; `variables` are the special tokens that it may name. Raises TokenizerError for a broken one."""

    def __init__(self, text: str, variables: Mapping[str, str | None], source: str) -> None:
        self._source, self._variables = source, dict(variables)
        if len(text) > _MOST_TEMPLATE_CHARS:
            raise TokenizerError(f"{source}: its chat template has {len(text):,} characters, too many to be one")
        try:
            self._template: Template = _Sandbox().from_string(text)
        except TemplateSyntaxError as error:
            text = f"{source}: its chat template is broken, in line {error.lineno}: {error}"
            raise TokenizerError(text) from error
        except Exception as error:  # nested too deep
            raise TokenizerError(f"{source}: its chat template is broken ({type(error).__name__})") from error

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """The messages as one text; with `reply` it ends where the assistant's answer begins.

        Raises TokenizerError for messages that the template does not take.
        """
        values = [{"role": message.role, "content": message.content} for message in messages]
        try:
            parts, size = [], 0
            for part in self._template.generate(
                messages=values, add_generation_prompt=reply, tools=None, **self._variables
            ):
                parts.append(part)
                size += len(part)
                if size > _MOST_CHARS:
                    raise SecurityError(f"more than {_MOST_CHARS} characters")
        except Exception as error:  # whatever a stranger's text does
            reason = shown(str(error) or type(error).__name__)
            text = f"{self._source}: its chat template does not take the messages: {reason}"
            raise TokenizerError(text) from error
        return "".join(parts)
