"""Text as its tokens come: characters whole, stop strings never output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core import FinishReason, Request, SamplingParams, StepOutput
from kvlab.engine.text import TextStream
from tests.support.engines import Stream, drain, make_engine, request
from tests.support.model import expected_tokens

PIECES = ("a", "b", "ab", "ba", "aab", "c", "", "abc")


def pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def utf8(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def letters(ids: Sequence[int]) -> str:
    """A letter for each token of the tiny model."""
    return "".join(chr(0x4E00 + token) for token in ids)


def feed(stream: TextStream, ids: Sequence[int]) -> tuple[list[str], bool]:
    """What each token made certain, and whether a stop string ended it; the rest, if none did, comes last."""
    parts = []
    for token in ids:
        text, stopped = stream.add(token)
        parts.append(text)
        if stopped:
            return parts, True
    return [*parts, stream.close()], False


def by_the_book(ids: Sequence[int], stop: Sequence[str], min_tokens: int) -> tuple[str, int | None]:
    """The whole answer, and after how many tokens a stop string ended it."""
    for count in range(max(1, min_tokens), len(ids) + 1):
        before, text = pieces(ids[: count - 1]), pieces(ids[:count])
        ends = [
            place
            for each in stop
            for place in range(len(text))
            if text.startswith(each, place) and len(before) < place + len(each)
        ]
        if ends:
            return text[: min(ends)], count
    return pieces(ids), None


class TestStopStrings:
    @settings(max_examples=400)
    @given(
        ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
        stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
        min_tokens=st.integers(0, 6),
    )
    def test_any_text_ends_before_the_first_that_counts(
        self, ids: list[int], stop: list[str], min_tokens: int
    ) -> None:
        parts, stopped = feed(TextStream(pieces, (0, 5), stop, min_tokens), ids)
        expected, count = by_the_book(ids, stop, min_tokens)
        if count is None:
            assert ("".join(parts), stopped) == (expected, False)
        else:
            assert (stopped, len(parts)) == (True, count)
            assert "".join(parts) == expected

    def test_what_may_become_one_is_held_back_until_it_is_decided(self) -> None:
        stream = TextStream(utf8, b"x", ("END", "ENOUGH"))
        seen = [stream.add(token)[0] for token in b"an E, an EN, an ENO"]
        assert "".join(seen) == "an E, an EN, an "
        assert seen[3:6] == ["", "E,", " "]
        assert stream.close() == "ENO"

    def test_one_inside_another_ends_at_the_earlier(self) -> None:
        parts, stopped = feed(TextStream(pieces, (), ("abc", "b")), [5, 7])
        assert ("".join(parts), stopped) == ("c", True)

    def test_one_is_output_where_it_is_asked_for_and_nothing_behind_it(self) -> None:
        parts, stopped = feed(TextStream(pieces, (), ("abc", "b"), include_stop=True), [5, 7])
        assert ("".join(parts), stopped) == ("cabc", True)
        parts, stopped = feed(TextStream(utf8, b"x", ("END",), include_stop=True), b"the END of")
        assert ("".join(parts), stopped) == ("the END", True)

    def test_none_in_the_prompt(self) -> None:
        stream = TextStream(utf8, b"the EN", ("END",))
        assert "".join(feed(stream, b"D of it")[0]) == "D of it"


class TestCharacters:
    TEXT = "naïve, 日本語 🎈 ok"

    def test_are_output_whole(self) -> None:
        parts, _ = feed(TextStream(utf8, b"prompt"), self.TEXT.encode())
        assert "".join(parts) == self.TEXT
        assert "\ufffd" not in "".join(parts)
        assert len(parts) == len(self.TEXT.encode()) + 1

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_an_incomplete_one_is_output_at_the_end(self, cut: int) -> None:
        parts, _ = feed(TextStream(utf8, b"p"), b"go " + "🎈".encode()[:cut])
        assert parts[:-1] == ["g", "o", " "] + [""] * cut
        assert parts[-1].startswith("\ufffd")

    def test_bytes_that_never_become_one_do_not_hold_the_rest_back(self) -> None:
        stream = TextStream(utf8, b"p")
        assert any(stream.add(0xFF)[0] for _ in range(8))

    def test_a_tokenizer_that_drops_the_first_space(self) -> None:
        """As those do whose words carry their space; the space between prompt and output is the output's."""
        words = [" one", " two", " three"]
        stream = TextStream(lambda ids: "".join(words[token] for token in ids).removeprefix(" "), (0,))
        assert feed(stream, [1, 2])[0] == [" two", " three", ""]

    def test_the_cost_of_a_token_does_not_grow(self) -> None:
        sizes: list[int] = []

        def decode(ids: Sequence[int]) -> str:
            sizes.append(len(ids))
            return utf8(ids)

        feed(TextStream(decode, b"a long prompt " * 50), b"text " * 200)
        assert max(sizes) <= 6

    BYTES = st.one_of(
        st.integers(0, 255), st.sampled_from([0x80, 0xBD, 0xA0, 0xE4, 0xF0, 0x9F, 0xC3, 0x41, 0xCC, 0x81])
    )
    SPLIT = st.tuples(st.text("a é日🎈\u0301👩‍👩‍👧🇩🇪", max_size=12), st.lists(st.integers(1, 9), max_size=40))

    @settings(max_examples=150)
    @given(text=SPLIT, prompt=st.sampled_from([b"", b"p", "日".encode()]))
    def test_a_text_split_anywhere_joins_to_itself(self, text: tuple[str, list[int]], prompt: bytes) -> None:
        """Emoji of several characters, combining ones, Chinese: tokens are any runs of their bytes."""
        data, tokens = text[0].encode(), list[bytes]()
        for size in (*text[1], *[1] * len(data)):
            tokens, data = ([*tokens, data[:size]], data[size:]) if data else (tokens, data)
        vocabulary = [prompt, *tokens]
        stream = TextStream(lambda ids: b"".join(vocabulary[i] for i in ids).decode("utf-8", "replace"), [0])
        parts, _ = feed(stream, range(1, len(vocabulary)))
        assert "".join(parts) == text[0]
        assert not any("\ufffd" in part for part in parts)

    @settings(max_examples=250)
    @given(data=st.lists(BYTES, max_size=60))
    def test_any_bytes_join_to_their_decoding(self, data: list[int]) -> None:
        parts, _ = feed(TextStream(utf8, b"p"), data)
        assert "".join(parts) == utf8(data)


class TestThroughTheEngine:
    ASKED = request("a", 21, 9)

    def asked(self, **sampling: Any) -> Request:
        return request("a", 21, 9, **sampling)

    def test_the_last_text_comes_with_the_end(self) -> None:
        tokens = expected_tokens(self.ASKED)
        engine, stream = make_engine(detokenize=letters), Stream()
        engine.add_request(self.asked(stop=(letters([*tokens[-2:], 0]),)), stream)
        drain(engine)
        assert [len(output.text) for output in stream.outputs[-2:]] == [0, 2]
        assert stream.ends == [FinishReason.LENGTH]

    def test_what_was_held_back_is_output_on_abort(self) -> None:
        tokens = expected_tokens(self.ASKED)
        engine, stream = make_engine(detokenize=letters), Stream()
        engine.add_request(self.asked(stop=(letters([tokens[0], 0]),)), stream)
        engine.step()
        assert [output.text for output in stream.outputs] == [""]
        engine.abort("a")
        assert [output.text for output in stream.outputs] == ["", letters(tokens[:1])]

    def test_samples_have_texts_of_their_own(self) -> None:
        engine = make_engine(detokenize=letters)
        first = engine.add_request(self.asked(n=3, temperature=3.0, seed=1))
        drain(engine)
        texts = [one.text for one in (first, *first.siblings)]
        assert texts == [letters(one.output_token_ids) for one in (first, *first.siblings)]
        assert len(set(texts)) == 3

    def test_a_preempted_sequence_outputs_nothing_twice(self) -> None:
        engine, streams = make_engine(detokenize=letters, admission_reserve=0), {name: Stream() for name in "abc"}
        sequences = [engine.add_request(request(name, 20, 30), stream) for name, stream in streams.items()]
        drain(engine)
        assert any(sequence.preemptions for sequence in sequences)
        for stream in streams.values():
            assert "".join(output.text for output in stream.outputs) == letters(stream.tokens)

    @pytest.mark.parametrize("good_tokens", [0, 4])
    def test_a_detokenizer_that_fails_ends_its_own_request(self, good_tokens: int) -> None:
        tokens = expected_tokens(self.ASKED)
        good_tokens = tokens.index(tokens[good_tokens])

        def broken(ids: Sequence[int]) -> str:
            if ids and ids[-1] == tokens[good_tokens]:
                raise KeyError("no such piece")
            return letters(ids)

        engine, outputs = make_engine(detokenize=broken), list[StepOutput]()
        failed = engine.add_request(self.asked(), outputs.append)
        drain(engine)
        assert failed.finish_reason is FinishReason.FAILED
        assert failed.error == "its detokenizer raised KeyError: 'no such piece'"
        assert len(outputs) == good_tokens + 1
        other = engine.add_request(Request("b", (1,), SamplingParams(1, stop_token_ids=tuple(range(200)))))
        drain(engine)
        assert other.finish_reason is FinishReason.STOP
