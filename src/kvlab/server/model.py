"""The model that a server serves: its name, its words, its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.core import Message
from kvlab.errors import KvlabError
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.errors import ApiError, context_exceeded

_HEAD_CHARS = 16  # of a text, for each token that the model takes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Without a tokenizer the model takes and gives token ids alone."""

    name: str
    max_tokens: int  # of prompt and output together
    vocab_size: int
    created: int  # seconds since 1970 at which it was loaded
    tokenizer: Tokenizer | None = None

    @property
    def takes(self) -> str:
        """The most that a prompt may be: `messages`, `text`, or token `ids`."""
        if self.tokenizer is None:
            return "ids"
        return "messages" if self.tokenizer.has_template else "text"

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvlab",
            "max_model_len": self.max_tokens,
        }

    def encode(self, prompt: str | Sequence[Message], field: str, *, bounded: bool = True) -> tuple[int, ...]:
        """The ids of a text or of a conversation, which came as `field`. With `bounded`, a text that is far too
        long for the model is not encoded to its end. Raises ApiError.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            text = f"{self.name} has no tokenizer: send token ids as prompt to /v1/completions"
            raise ApiError(400, text, field)
        try:
            is_text = isinstance(prompt, str)
            text = prompt if isinstance(prompt, str) else tokenizer.render(prompt)
            encode = tokenizer.encode if is_text else tokenizer.encode_rendered
            head = text[: _HEAD_CHARS * self.max_tokens]
            # Twice: the last tokens of a part may be fewer in the whole.
            if bounded and len(head) < len(text) and len(encode(head)) > 2 * self.max_tokens:
                raise context_exceeded(self.max_tokens, f"you sent more of them in {field}", field)
            return tuple(encode(text))
        except KvlabError as error:
            text = str(error).replace(tokenizer.source, self.name)  # a path is nothing for clients
            raise ApiError(400, text, field) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; none without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)
