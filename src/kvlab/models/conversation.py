"""A conversation as tokens: each prompt begins with the tokens of the turns before, so that a prefix cache has
them.
"""

from collections.abc import Sequence

from kvlab.core import Message
from kvlab.models.tokenizer import Tokenizer


class Conversation:
    """What was said so far. `ask` changes nothing; `answered` ends a turn."""

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._messages = [Message("system", system)] if system else []
        self._ids: list[int] = []  # of what was said, as it was computed
        self._text = ""  # the same, as the template renders it

    def ask(self, text: str) -> list[int]:
        """The tokens of the conversation with this message, ready for the answer. Raises TokenizerError.

        Only what is new is encoded: an answer's own tokens need not be those that its text would be encoded to.
        Where the template does not render the earlier turns as before, the whole is encoded anew.
        """
        rendered = self._rendered(text)
        if self._ids and rendered.startswith(self._text):
            return self._ids + self._tokenizer.encode_rendered(rendered[len(self._text) :])
        return self._tokenizer.encode_rendered(rendered)

    def answered(self, text: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The message was `text`, its prompt what `ask` made of it, and these tokens came; without the one that
        ended the answer, which the template adds itself.
        """
        words = self._tokenizer.decode(answer)
        self._text = self._rendered(text) + words
        self._ids = [*prompt, *answer]
        self._messages += [Message("user", text), Message("assistant", words)]

    def _rendered(self, text: str) -> str:
        return self._tokenizer.render([*self._messages, Message("user", text)])
