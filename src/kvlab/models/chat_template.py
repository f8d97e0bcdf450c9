"""Chat templates: a checkpoint's Jinja text, which makes one prompt of messages. Strangers wrote it, so it runs in
Jinja's sandbox, in a process with limits of memory and time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.confined import Confined, ConfinedError
from kvlab.core import Message
from kvlab.errors import TokenizerError, shown

_MOST_TEMPLATE_CHARS = 1 << 20
_process = Confined("kvlab.models.template_process", memory=512 << 20, seconds=5)


class ChatTemplate:
    """A template; `variables` are the special tokens that it may name. Raises TokenizerError for a broken one."""

    def __init__(
        self,
        text: str,
        variables: Mapping[str, str | None],
        source: str,
        process: Confined = _process,
    ) -> None:
        self._text, self._source, self._variables, self._process = text, source, dict(variables), process
        if len(text) > _MOST_TEMPLATE_CHARS:
            raise TokenizerError(f"{source}: its chat template has {len(text):,} characters, too many to be one")
        wrong = self._ask({})
        if "line" in wrong:
            where = f", in line {wrong['line']}: {shown(wrong['error'])}"
        elif "error" in wrong:  # nested too deep
            where = f" ({shown(wrong['error'])})"
        else:
            return
        raise TokenizerError(f"{source}: its chat template is broken{where}")

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """The messages as one text; with `reply` it ends where the assistant's answer begins.

        Raises TokenizerError for messages that the template does not take.
        """
        values = [{"role": message.role, "content": message.content} for message in messages]
        about = {"messages": values, "add_generation_prompt": reply, "tools": None, **self._variables}
        found = self._ask({"variables": about})
        if "text" not in found:
            reason = shown(found["error"])
            raise TokenizerError(f"{self._source}: its chat template does not take the messages: {reason}")
        return str(found["text"])

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        question = json.dumps({"template": self._text, **asked}).encode()
        try:
            found: dict[str, Any] = json.loads(self._process.ask(question))
        except ConfinedError as error:
            return {"error": f"it {error}"}
        return found
