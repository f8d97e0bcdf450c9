"""The model that a server serves: its name, its words, its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.core import Message
from kvlab.errors import KvlabError
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.errors import ApiError


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

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt. Raises ApiError."""
        return tuple(self._words("prompt").encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; none without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a conversation. Raises ApiError."""
        try:
            return tuple(self._words("messages").encode_prompt(messages))
        except KvlabError as error:
            raise ApiError(400, str(error), "messages") from error

    def _words(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            text = f"{self.name} has no tokenizer: send token ids as prompt to /v1/completions"
            raise ApiError(400, text, field)
        return self.tokenizer
