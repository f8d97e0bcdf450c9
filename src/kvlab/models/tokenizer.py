"""Text to tokens and back, with the tokenizer of a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.core import Message
from kvlab.errors import TokenizerError, shown
from kvlab.models.chat_template import AS_USUAL, ChatTemplate, Rendering
from kvlab.models.files import check_file, read_object
from kvlab.models.gguf import is_gguf, read_gguf
from kvlab.models.hub import HubError
from kvlab.models.published import checkpoint

if TYPE_CHECKING:
    import tokenizers

    from kvlab.config import ModelConfig
    from kvlab.models.grammars import Grammars

_FILE, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_LARGEST = 64 << 20  # bytes of tokenizer.json; Gemma's has 33 million
_LONG_TEXT = 4096  # characters, from which on other threads run while it is encoded; encode() keeps them waiting
_WORD = re.compile(" ?[a-z]{3,12}")
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # what SentencePiece calls a byte
_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2's vocabulary writes as they are
_OTHER = (byte for byte in range(256) if byte not in _PLAIN)  # the others are characters from 256 on
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + at): byte for at, byte in enumerate(_OTHER)}
_ADVICE = (
    "use model=smollm2_135m (kvlab fetch smollm2) or another checkpoint that has one, or lend it one, as "
    "model.tokenizer=fetched:smollm2"
)


class Tokenizer:
    """The tokenizer of a checkpoint and its chat template, if it has one; `source` names it in messages."""

    def __init__(
        self, backend: tokenizers.Tokenizer, source: str, template: Callable[[], ChatTemplate] | None = None
    ) -> None:
        self._backend, self.source, self._template = backend, source, template

    @property
    def has_template(self) -> bool:
        """Whether it takes messages."""
        return self._template is not None

    def info(self) -> dict[str, str | None]:
        """The chat template, and the special tokens that it may name. Raises TokenizerError for a broken one."""
        return {"chat_template": None} if self._template is None else self._template().info()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the checkpoint begins every text with. Raises TokenizerError."""
        return self._encode(text, special=True)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; special ones, such as an end of sequence, have none, unless `special`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=not special)

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls each token: its bytes as it writes them, as `Ġthe`."""
        return [self._backend.id_to_token(token) or "" for token in token_ids]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Those of a token that may be a part of a character; None: the vocabulary does not say them."""
        (entry,) = self.entries([token_id])
        if byte := _BYTE.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        return bytes(_BYTES[letter] for letter in entry) if entry and _BYTES.keys() >= set(entry) else None

    def render(self, messages: Sequence[Message], how: Rendering = AS_USUAL) -> str:
        """Messages as the text that the checkpoint was trained with; see `ChatTemplate.render`. Raises
        TokenizerError.
        """
        if self._template is None:
            advice = "give a text as prompt, or use a checkpoint that was trained to chat"
            raise TokenizerError(f"{self.source} has no chat template, which messages need; {advice}")
        return self._template().render(messages, how)

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a text, or of a part, that `render` made: nothing is added to it."""
        return self._encode(text, special=False)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a text, or of messages whose answer is asked for. Raises TokenizerError."""
        return self.encode(prompt) if isinstance(prompt, str) else self.encode_rendered(self.render(prompt))

    def words(self, most: int) -> tuple[list[int], list[int]]:
        """The tokens, of the first `most`, that are a word of small letters: those without, and those with a space
        before it. A text of one of the former and any of the latter behind it is encoded to these tokens.
        """
        ids = range(min(most, self._backend.get_vocab_size()))
        texts = self._backend.decode_batch([[token] for token in ids], skip_special_tokens=True)
        words = [(token, text) for token, text in zip(ids, texts, strict=True) if _WORD.fullmatch(text)]
        encoded = self._backend.encode_batch_fast([text for _, text in words], add_special_tokens=False)
        own = [(token, text) for (token, text), code in zip(words, encoded, strict=True) if code.ids == [token]]
        spaced = {text: token for token, text in own if text[0] == " "}  # others may be a part of a word
        return [token for token, text in own if f" {text}" in spaced], list(spaced.values())

    def grammars(self, vocab_size: int, ends: Sequence[int]) -> Grammars:
        """Of outputs of a model with so many tokens, of which `ends` end a sequence."""
        from kvlab.models.grammars import Grammars

        return Grammars(self._backend.to_str, vocab_size, ends)

    def lent(self) -> Tokenizer:
        """The same for a model that was not trained with it, and may have more tokens: each of them has a text."""
        return LentTokenizer(self._backend, self.source, self._template)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=special).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except Exception as error:  # half a surrogate pair is no text
            raise TokenizerError(f"{self.source}: cannot encode {shown(text, repr)} ({shown(error)})") from error


class LentTokenizer(Tokenizer):
    """A tokenizer for a model that was not trained with it: see `Tokenizer.lent`."""

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; those that it does not have begin again at its first."""
        size = self._backend.get_vocab_size()
        return super().decode([token % size for token in token_ids], special=special)


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer lent to a model, or that of its checkpoint.

    Raises TokenizerError where there is none, or none that can be read.
    """
    where = model.tokenizer or model.path or model.weights or "dummy"
    if where == "dummy":
        raise TokenizerError(f"model.name={shown(model.name)} has random weights and no tokenizer; {_ADVICE}")
    key = "model.path" if model.tokenizer is None else "model.tokenizer"
    try:
        path = checkpoint(where, (_FILE, _SETTINGS, _TEMPLATE), key=key)
    except HubError as error:
        raise TokenizerError(f"{shown(where)}: the hub gave no tokenizer ({error})") from error
    file = path if is_gguf(path.name) else path / _FILE
    if not file.exists():
        raise TokenizerError(f"{path} has no {_FILE}, so there is no text with it; {_ADVICE}")
    tokenizer = _load(file, file.stat().st_mtime_ns)
    return tokenizer if model.tokenizer is None else tokenizer.lent()


def find_tokenizer(model: ModelConfig) -> Tokenizer | None:
    """The same for whoever can do without: None where the checkpoint has none, or none that can be read.

    Raises TokenizerError for `model.tokenizer`, which was asked for.
    """
    try:
        return load_tokenizer(model)
    except TokenizerError:
        if model.tokenizer is not None:
            raise
        return None


@lru_cache(maxsize=2)  # a run asks for it more than once
def _load(file: Path, _modified: int) -> Tokenizer:
    return _from_gguf(file) if is_gguf(file.name) else _from_directory(file.parent)


def _from_gguf(path: Path) -> Tokenizer:
    from kvlab.models.gguf_tokenizer import gguf_tokenizer, token_text

    try:
        file = read_gguf(path)
        backend = gguf_tokenizer(file)
    except ValueError as error:
        raise TokenizerError(f"{path} {error}") from error
    text = file.metadata.get("tokenizer.chat_template")
    variables = {f"{name}_token": token_text(file, name) for name in ("bos", "eos")}
    return Tokenizer(backend, str(path), _template(text, variables, str(path)))


def _from_directory(directory: Path) -> Tokenizer:
    import tokenizers

    file, settings_file, template_file = (directory / name for name in (_FILE, _SETTINGS, _TEMPLATE))
    settings: dict[str, Any] = {}
    try:
        if check_file(file) > _LARGEST:
            raise ValueError(f"has more than the {_LARGEST} bytes that are read")
        backend = tokenizers.Tokenizer.from_file(str(file))
        file = settings_file
        if os.path.lexists(file):
            settings = read_object(file)
        file = template_file
        text = settings.get("chat_template")
        if os.path.lexists(file) and check_file(file) < _LARGEST:
            text = file.read_text(encoding="utf-8")
    except Exception as error:  # the library's kinds too
        reason = str(error) if isinstance(error, ValueError) else f"cannot be read ({shown(error)})"
        raise TokenizerError(f"{file} {reason}") from error
    if isinstance(text, list):  # several by name; that of a chat is called default
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    variables = {f"{name}_token": _content(settings.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk")}
    return Tokenizer(backend, str(directory), _template(text, variables, str(directory)))


def _content(token: Any) -> str | None:
    """A special token, which is a text or an object with one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _template(text: Any, variables: dict[str, str | None], source: str) -> Callable[[], ChatTemplate] | None:
    """The template, made when it is first used: one that is broken is in nobody's way before."""
    if not isinstance(text, str) or not text:
        return None
    return lru_cache(maxsize=1)(lambda: ChatTemplate(text, variables, source))
