"""A sequence's text as its tokens come, and the stop strings that end it."""

from collections.abc import Callable, Sequence

#: Turns token ids into text. The text of some tokens need not be that of each, joined.
Detokenizer = Callable[[Sequence[int]], str]

_CONTEXT = 5  # prompt tokens decoded along, so that the output's first space is kept where a tokenizer strips it
_LONGEST_CHARACTER = 8  # tokens; of more, only the last bytes can still become one
_MOST_PENDING = 3  # bytes, all but the last of the longest character; each may be decoded as a character of its own
_INCOMPLETE = "\ufffd"


class TextStream:
    """One sequence's output as text, emitted as soon as it is certain.

        tokens:  ... forgotten | context | not read yet        what they add to the context's text is new
        text:    ... emitted   | held: may become a stop string | incomplete character

    A stop string counts if it ends in the text of token number `min_tokens` or later. It is not emitted, unless
    `include_stop`, nor what follows it.
    """

    def __init__(
        self,
        detokenize: Detokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenize = detokenize
        self._ids = list(prompt[-_CONTEXT:])
        self._read = len(self._ids)
        self._pending = 0  # characters at the end of the read tokens' text that were not emitted
        self._stop = tuple(stop)
        self._left = min_tokens
        self._include_stop = include_stop
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """The text that the next token makes certain, and whether a stop string ended it."""
        self._ids.append(token)
        self._left -= 1
        before, self._held = len(self._held), self._held + self._decode()
        if self._left <= 0:
            # Only what ends in the new text counts: a stop string held before was found before, or came too early.
            starts = [(self._held.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._stop]
            places = [(start, length) for start, length in starts if start >= 0]
            if places:
                start, length = min(places)
                text, self._held = self._held[: start + length if self._include_stop else start], ""
                return text, True
        cut = len(self._held) - self._may_become_stop()
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def close(self) -> str:
        """What was held back: nothing comes any more that could make it a stop string."""
        text, self._held = self._held + self._decode(whole=False), ""
        return text

    def _may_become_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) and stop != end for stop in self._stop):
                return length
        return 0

    def _decode(self, *, whole: bool = True) -> str:
        """The text of the tokens not read yet; `whole`: without an incomplete character at its end."""
        if self._read == len(self._ids) and not self._pending:
            return ""
        text, pending = self._detokenize(self._ids), 0
        if whole and text.endswith(_INCOMPLETE):
            if len(self._ids) - self._read < _LONGEST_CHARACTER:
                return ""
            pending = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MOST_PENDING)
        new = text[len(self._detokenize(self._ids[: self._read])) - self._pending : len(text) - pending]
        if self._read < len(self._ids):
            del self._ids[: self._read]  # of what was read, the last to come suffice as context
        self._read, self._pending = len(self._ids), pending
        return new
