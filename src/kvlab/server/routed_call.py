"""A client's call, as routers see it."""

import json
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from kvlab.fleet.prefixes import TOKEN_BYTES, KeyedPrompt
from kvlab.workloads.prompt_blocks import as_text, prompts_of

_TEXT_BYTES = 4  # that stand for a token, where there is no tokenizer
_PROMPTS = ("messages", "prompt", "input")  # of chats and completions, of responses and embeddings
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def asked_of(body: bytes) -> dict[str, Any] | None:
    """What a call asks for; None: it has no prompt."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return asked if isinstance(asked, dict) and any(asked.get(name) for name in _PROMPTS) else None


class RoutedCall(KeyedPrompt):
    """A call with a prompt (RoutedRequest). Without `tokens` the bytes of its text stand for them.

    `session`: a name of its conversation, of which a hash is kept; None: its `prompt_cache_key` or `user`.
    """

    def __init__(
        self,
        asked: Mapping[str, Any],
        request_id: str | None = None,
        session: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        self.request_id = request_id or uuid4().hex
        name = session or asked.get("prompt_cache_key") or asked.get("user")
        self.session = blake2b(str(name).encode(errors="replace"), digest_size=8).hexdigest() if name else ""
        self.session = self.session or self.request_id
        limit = next((asked[name] for name in _LIMITS if type(asked.get(name)) is int), 0)
        self.output_tokens: int = limit
        packed, token_bytes = _packed(prompt_of(asked), tokens)
        self.prompt_tokens = -(-len(packed) // token_bytes)
        salt = asked.get("cache_salt")
        super().__init__(lambda: packed, salt if isinstance(salt, str) else None, token_bytes)


def prompt_of(asked: Mapping[str, Any]) -> Any:
    """The prompt, as `prompts_of` gives it; several, and those of responses and embeddings, as they were sent."""
    found = prompts_of(asked)
    return found[0] if len(found) == 1 else next((asked[name] for name in _PROMPTS if asked.get(name)), "")


def _packed(prompt: Any, tokens: Sequence[int] | None) -> tuple[bytes, int]:
    """A prompt's tokens, or its text where they are not known, in bytes; and how many bytes a token has."""
    given = tokens if tokens is not None else prompt
    if isinstance(given, list):
        try:
            return array("q", given).tobytes(), TOKEN_BYTES
        except (OverflowError, TypeError):  # messages, or several prompts
            pass
    return as_text(prompt).encode(errors="replace"), _TEXT_BYTES
