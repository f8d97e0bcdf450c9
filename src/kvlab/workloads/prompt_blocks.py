"""What a trace keeps of a prompt: its length, and keyed hashes of its blocks (docs/reference/trace.md)."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.config import ModelConfig
from kvlab.core import Message
from kvlab.errors import KvlabError
from kvlab.models.chat_template import Rendering
from kvlab.models.tokenizer import load_tokenizer

_HASH_BYTES = 8
#: Makes tokens of a prompt as `prompts_of` gives it.
Encode = Callable[[Any], Sequence[int]]


def prompts_of(asked: Mapping[str, Any]) -> list[Any]:
    """The prompts of a request of OpenAI's API: texts and lists of token ids; of a chat, which has one, its
    messages and tools. Empty ones are left out.
    """
    if asked.get("messages"):
        return [{name: asked[name] for name in ("tools", "messages") if asked.get(name)}]
    prompt = asked.get("prompt")
    several = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
    return [one for one in (prompt or [] if several else [prompt]) if one]


def most_tokens(asked: Mapping[str, Any]) -> Any:
    """The most tokens that a request of OpenAI's API allows its output, under either name; None: it says
    nothing, or -1, which is no limit.
    """
    most = asked.get("max_completion_tokens")
    most = asked.get("max_tokens") if most is None else most
    return None if most == -1 else most


class BlockHasher:
    """Hashes of a prompt's blocks: BLAKE2b of the hash before and the block, keyed with `secret`, 64 bits."""

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        self._secret, self._block_tokens = secret, block_tokens
        self.key_id = hashlib.blake2b(b"kvlab trace", key=secret, digest_size=4).hexdigest()

    def tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Of a prompt's tokens."""
        return self._chain(np.asarray(token_ids, dtype="<u4").tobytes(), 4 * self._block_tokens)

    def text(self, text: bytes) -> list[int]:
        """Of a text, where there is no tokenizer: four bytes stand for a token."""
        return self._chain(text, 4 * self._block_tokens)

    def prompt(self, prompt: Any, encode: Encode | None) -> tuple[int, list[int]]:
        """The number of tokens of a prompt, as of `prompts_of`, and their hashes; without `encode` estimated."""
        if isinstance(prompt, list):
            return len(prompt), self.tokens(prompt)
        if encode is None:
            data = as_text(prompt).encode(errors="replace")
            return -(-len(data) // 4), self.text(data)
        ids = encode(prompt)
        return len(ids), self.tokens(ids)

    def behind(self, last: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Of tokens behind a block whose hash is `last`; b"": they begin a prompt. 8 bytes each."""
        return list(self._digests(last, np.asarray(token_ids, dtype="<u4").tobytes(), 4 * self._block_tokens))

    def _chain(self, data: bytes, size: int) -> list[int]:
        return [int.from_bytes(digest, "big") for digest in self._digests(b"", data, size)]

    def _digests(self, last: bytes, data: bytes, size: int) -> Iterator[bytes]:
        for start in range(0, len(data), size):
            block = last + data[start : start + size]
            last = hashlib.blake2b(block, key=self._secret, digest_size=_HASH_BYTES).digest()
            yield last


def as_text(prompt: Any) -> str:
    """A prompt as text: of a chat the JSON of its tools, which templates put first, and of its messages."""
    if isinstance(prompt, dict):
        return "".join(json.dumps(part, ensure_ascii=False) for part in prompt.values())
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def text_encoder(tokenizer: str | None) -> Encode | None:
    """What makes tokens of text, and of chats by the template, if there is one. Raises TokenizerError."""
    if tokenizer is None:
        return None
    model = ModelConfig(name="import", family="qwen3", tokenizer=tokenizer, weights="dummy")
    loaded = load_tokenizer(model)

    def encode(prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return loaded.encode(prompt)
        try:
            said, tools = prompt["messages"], {name: prompt[name] for name in ("tools",) if name in prompt}
            messages = [Message(str(message["role"]), _text(message.get("content")), message) for message in said]
            return loaded.encode_rendered(loaded.render(messages, Rendering(variables=tools)))
        except (KvlabError, AttributeError, KeyError, TypeError):  # no template, or none that takes these
            return loaded.encode(as_text(prompt))

    return encode


def _text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""
