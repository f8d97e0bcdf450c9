"""Chat templates: a checkpoint's Jinja text, which makes one prompt of messages. Strangers wrote it, so it runs in
Jinja's sandbox, in a process with limits of memory and time.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvlab.confined import Confined, ConfinedError
from kvlab.core import Message
from kvlab.errors import TokenizerError, shown

_MOST_TEMPLATE_CHARS = 1 << 20
_process = Confined("kvlab.models.template_process", memory=512 << 20, seconds=5)


class Rendering(NamedTuple):
    """How messages are written: with `reply` up to where the assistant's answer begins, with `continues` up to the
    end of the last message's content. The template may name the `variables`, too.
    """

    reply: bool = True
    continues: bool = False
    variables: Mapping[str, Any] | None = None


AS_USUAL = Rendering()


class ChatTemplate:
    """A template; `variables` are the special tokens that it may name. Raises TokenizerError for a broken one."""

    def __init__(
        self, text: str, variables: Mapping[str, str | None], source: str, process: Confined = _process
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

    def info(self) -> dict[str, str | None]:
        """Its text, and the special tokens that it may name."""
        return {"chat_template": self._text, **self._variables}

    def render(self, messages: Sequence[Message], how: Rendering = AS_USUAL) -> str:
        """The messages as one text. Raises TokenizerError for messages that the template does not take, or whose
        last it writes otherwise.
        """
        values = [
            {"role": message.role, "content": message.content, **(message.fields or {})} for message in messages
        ]
        about = {**(how.variables or {}), "messages": values, "add_generation_prompt": how.reply}
        answer = self._ask({"variables": {"tools": None, **self._variables, **about}})
        if "text" not in answer:
            reason = shown(answer["error"])
            raise TokenizerError(f"{self._source}: its chat template does not take the messages: {reason}")
        text = str(answer["text"])
        if not how.continues:
            return text
        last = messages[-1].content.strip()
        start = text.rfind(last)
        if not last or start < 0:
            raise TokenizerError(f"{self._source}: its chat template does not write the last message as it is")
        end = start + len(last)
        spaces = messages[-1].content[len(messages[-1].content.rstrip()) :]
        return text[: end + len(spaces) if text.startswith(spaces, end) else end]

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        question = json.dumps({"template": self._text, **asked}).encode()
        try:
            answer: dict[str, Any] = json.loads(self._process.ask(question))
        except ConfinedError as error:
            return {"error": f"it {error}"}
        return answer
