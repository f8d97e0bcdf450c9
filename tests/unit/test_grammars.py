"""Which tokens may follow an output, against what the texts of all tokens say."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import GrammarError
from kvlab.models.grammars import Grammars
from kvlab.models.tokenizer import Tokenizer
from kvlab.models.word_tokenizer import word_tokenizer

VOCAB, END = 900, 5  # more tokens than the tokenizer has: the model's may be wider
CHOICES = ("yes", "yes please", "no", 'he said "no"\n', "naïve ☃", "\\")


@cache
def tokenizer() -> Tokenizer:
    found = word_tokenizer(800)
    assert found is not None
    return found


@cache
def grammars() -> Grammars:
    return tokenizer().grammars(VOCAB, [END])


@cache
def texts() -> list[bytes]:
    """Of each token; special ones have none."""
    found = [bytes([0xFF])] * VOCAB
    backend = json.loads(tokenizer()._backend.to_str())
    table = {char: byte for byte, char in byte_characters().items()}
    special = {entry["id"] for entry in backend["added_tokens"]}
    for text, token in backend["model"]["vocab"].items():
        if token not in special:
            found[token] = bytes(table[char] for char in text)
    return found


def byte_characters() -> dict[int, str]:
    """The characters that stand for bytes in byte-level BPE (GPT-2)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def left(output: list[int]) -> list[bytes]:
    """What is left of each of the choices that the output may become."""
    done = b"".join(texts()[token] for token in output)
    return [choice.encode()[len(done) :] for choice in CHOICES if choice.encode().startswith(done)]


@given(st.data())
def test_choices_allow_what_begins_one_of_them(data: st.DataObject) -> None:
    """Wherever the output goes back to, as after proposals that were not accepted."""
    state = grammars().choice(CHOICES).start()
    output: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        allowed = state.allowed(output)
        assert allowed is not None
        assert allowed.shape == (VOCAB,)
        found = set(allowed.nonzero()[0].tolist())
        words, rests = sorted(found - {END}), left(output)
        assert all(any(rest.startswith(texts()[token]) for rest in rests) for token in words)
        # Where there is one way to write what has to come, that is asked for.
        assert all(any(rest.startswith(texts()[token]) for token in words) for rest in rests if rest)
        assert (END in found) == (b"" in rests)
        wrong = [*output, tokenizer().encode_rendered("Q")[0], 1]
        assert state.allowed(wrong) is None
        goes_on: bool = data.draw(st.booleans())
        if words and goes_on:
            output = [*output, data.draw(st.sampled_from(words))]
        else:
            output = output[: data.draw(st.integers(0, len(output)))]


def walk(state: Any, seed: int, most: int = 400) -> str:
    """The text of an output that follows the grammar at random, to its end."""
    import random

    draw, output = random.Random(seed), list[int]()
    while len(output) < most:
        allowed = state.allowed(output).nonzero()[0].tolist()
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.3):
            break
        output.append(draw.choice([token for token in allowed if token != END]))
    return b"".join(texts()[token] for token in output).decode()


@pytest.mark.parametrize("seed", range(8))
def test_texts_are_what_was_asked_for(seed: int) -> None:
    pattern = r"[a-c]{2,4}-([0-9]{3}|x+)!"
    assert re.fullmatch(pattern, walk(grammars().regex(pattern).start(), seed))
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 3, "maximum": 40}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    for given_schema in (schema, json.dumps(schema)):
        found = json.loads(walk(grammars().json_schema(given_schema).start(), seed))
        assert list(found) == ["kind", "count"]
        assert found["kind"] in ("a", "b")
        assert 3 <= found["count"] <= 40
    text = walk(grammars().json_schema(schema, white_space="[ ]?").start(), seed)
    assert not re.search(r"\s\s|\n", text)
    assert re.fullmatch(r"(ab)+c", walk(grammars().lark('start: "ab"+ "c"').start(), seed))
    assert re.fullmatch(r"(ab)+c", walk(grammars().lark('root ::= "ab" root | "abc"').start(), seed))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"const": 1}}, "required": ["a"]},
        {"anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"a": {"const": 1}}, "required": ["a"]}}},
        {
            "properties": {"properties": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
            "required": ["properties"],
        },
    ],
)
def test_objects_have_the_properties_that_are_named(schema: dict[str, Any]) -> None:
    found = json.loads(walk(grammars().json_schema({"type": "object", **schema}).start(), 1))
    assert found in ({"a": 1}, {"properties": {"a": 1}})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}},
        {"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 1}}}]},
    ],
)
def test_and_others_where_the_schema_says_which(schema: dict[str, Any]) -> None:
    state = grammars().json_schema({"type": "object", **schema}).start()
    assert state.allowed(tokenizer().encode_rendered('{"a": 1, "b')) is not None


def test_any_object_begins_with_a_brace_and_takes_little_white_space() -> None:
    state, output = grammars().json_object().start(), list[int]()
    brace, space = (tokenizer().encode_rendered(text) for text in ("{", " "))
    assert [texts()[token][:1] for token in state.allowed(output).nonzero()[0]] == [b"{"] * 1  # type: ignore[union-attr]
    output += brace
    for _ in range(16):
        output += space
    allowed = state.allowed(output)
    assert allowed is not None
    assert not allowed[space[0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grammars().json_schema({"type": "nonsense"}), "the JSON schema cannot be followed: Invalid type"),
        (lambda: grammars().json_schema("[1"), "the JSON schema is no JSON"),
        (lambda: grammars().json_schema("[1]"), "a JSON schema is an object, not [1]"),
        (lambda: grammars().json_schema(False), "the JSON schema cannot be followed: "),
        (lambda: grammars().json_schema({"$ref": "http://a/b"}), "the JSON schema cannot be followed: "),
        (lambda: grammars().json_schema(nested(900)), "the JSON schema cannot be followed: recursion limit"),
        (lambda: grammars().json_schema(nested(100_000)), "the JSON schema is nested too deep"),
        (lambda: grammars().regex("(a"), "the regular expression cannot be followed: "),
        (lambda: grammars().regex("a" * 300_000), "the regular expression has 300,000 characters; at most 131,072"),
        (lambda: grammars().choice([]), "a choice needs texts, none of them empty"),
        (lambda: grammars().choice(["a", ""]), "a choice needs texts, none of them empty"),
        (lambda: grammars().lark("start: foo"), 'the grammar cannot be followed: at 1(8): unknown name: "foo"'),
        (lambda: grammars().lark("root ::= ("), "the grammar cannot be read: "),
    ],
)
def test_what_cannot_be_followed_is_said(make: Any, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def test_a_choice_may_be_one_of_thousands() -> None:
    choices = [f"{number} of many" for number in range(5000)]
    assert walk(grammars().choice(choices).start(), 1) in choices


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars().regex("(a|b)*a(a|b){30}"),
        lambda: grammars().regex("((a{0,1000}){0,1000}){0,1000}"),
        lambda: grammars().json_schema({"type": "string", "maxLength": 10**9}),
        lambda: grammars().json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
        lambda: grammars().json_schema(
            {"anyOf": [{"properties": {f"a{n}": {}}, "type": "object"} for n in range(1500)]}
        ),
        lambda: grammars().json_schema(
            {"allOf": [{"anyOf": [{"properties": {f"{n}{m}": {}}} for m in range(6)]} for n in range(8)]}
        ),
        lambda: grammars().lark('start: e\ne: e e | "a" | e e e | "a" e'),
        lambda: grammars().lark(
            "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"'
        ),
        lambda: grammars().lark('start: a*\na: b*\nb: "x"?'),
    ],
)
def test_what_is_meant_to_be_expensive_is_followed_or_refused(make: Any) -> None:
    with suppress(GrammarError):
        walk(make().start(), 1, most=40)


def test_a_schema_of_everything_allows_any_json() -> None:
    json.loads(walk(grammars().json_schema('{"type": ["null", "boolean", "integer"]}').start(), 1))
    assert grammars().json_schema(True).start().allowed([]) is not None
