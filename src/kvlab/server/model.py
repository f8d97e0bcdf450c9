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

    def encode(self, prompt: str | Sequence[Message], field: str) -> tuple[int, ...]:
        """The ids of a text or of a conversation, which came as `field`. Raises ApiError."""
        if self.tokenizer is None:
            text = f"{self.name} has no tokenizer: send token ids as prompt to /v1/completions"
            raise ApiError(400, text, field)
        try:
            return tuple(self.tokenizer.encode_prompt(prompt))
        except KvlabError as error:
            text = str(error).replace(self.tokenizer.source, self.name)  # a path is nothing for clients
            raise ApiError(400, text, field) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; none without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)
