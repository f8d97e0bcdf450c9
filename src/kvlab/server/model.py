"""The model that a server serves: its name, its words, its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.core import Message
from kvlab.errors import KvlabError
from kvlab.models.chat_template import AS_USUAL, Rendering
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.errors import ApiError, context_exceeded
from kvlab.server.tool_forms import form_of

if TYPE_CHECKING:
    from kvlab.models.grammars import Grammars

_HEAD_CHARS = 16  # of a text, for each token that the model takes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Without a tokenizer the model takes and gives token ids alone."""

    name: str
    max_tokens: int  # of prompt and output together
    vocab_size: int
    created: int  # seconds since 1970 at which it was loaded
    tokenizer: Tokenizer | None = None
    has_logprobs: bool = True  # a simulated device has none
    grammars: Grammars | None = None  # where answers can follow one
    tool_call_parser: str = "auto"  # see TOOL_FORMS

    @property
    def takes(self) -> str:
        """The most that a prompt may be: `messages`, `text`, or token `ids`."""
        if self.tokenizer is None:
            return "ids"
        return "messages" if self.tokenizer.has_template else "text"

    @property
    def template(self) -> str:
        """Its chat template; empty where it has none, or a broken one, of which rendering says what is wrong."""
        try:
            return (self.tokenizer.info()["chat_template"] if self.tokenizer else None) or ""
        except KvlabError:
            return ""

    @property
    def tool_form(self) -> str:
        """The form in which the model writes tool calls."""
        return form_of(self.template) if self.tool_call_parser == "auto" else self.tool_call_parser

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvlab",
            "max_model_len": self.max_tokens,
        }

    def encode(
        self,
        prompt: str | Sequence[Message],
        field: str,
        *,
        bounded: bool = True,
        special: bool | None = None,
        rendering: Rendering = AS_USUAL,
    ) -> tuple[int, ...]:
        """The ids of a text or of a conversation, which came as `field`. With `bounded`, a text that is far too
        long for the model is not encoded to its end. `special`: with the tokens that the checkpoint begins a text
        with; None: a text with them, a conversation, whose template writes them, without. `rendering`: how messages
        are written. Raises ApiError.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            text = f"{self.name} has no tokenizer: send token ids as prompt to /v1/completions"
            raise ApiError(400, text, field)
        try:
            is_text = isinstance(prompt, str)
            text = prompt if isinstance(prompt, str) else tokenizer.render(prompt, rendering)
            is_special = is_text if special is None else special
            encode = tokenizer.encode if is_special else tokenizer.encode_rendered
            head = text[: _HEAD_CHARS * self.max_tokens]
            # Twice: the last tokens of a part may be fewer in the whole.
            if bounded and len(head) < len(text) and len(encode(head)) > 2 * self.max_tokens:
                raise context_exceeded(self.max_tokens, f"you sent more of them in {field}", field)
            return tuple(encode(text))
        except KvlabError as error:
            text = str(error).replace(tokenizer.source, self.name)  # a path is nothing for clients
            raise ApiError(400, text, field) from error

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of words, each as it is at the beginning of a text and behind a space. Raises ApiError."""
        ids = []
        for word in words:
            plain, spaced = (self.encode(text, "bad_words", special=False) for text in (word, f" {word.lstrip()}"))
            ids.append(plain)
            if spaced and spaced[:1] != plain[:1] and len(spaced) == len(plain):  # as vLLM: no space of its own
                ids.append(spaced)
        return tuple(dict.fromkeys(ids))

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls each of the ids."""
        return [] if self.tokenizer is None else self.tokenizer.entries(token_ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, without special ones unless `special`; none without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, special=special)
