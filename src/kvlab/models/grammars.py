"""Grammars that outputs follow, token by token: JSON schemas, regular expressions, choices, and Lark's form.

llguidance says which tokens of the vocabulary may come next (https://github.com/guidance-ai/llguidance); it parses
what was produced with an Earley parser over the tokens' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from threading import Lock
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from kvlab.core import Grammar, GrammarState, limits
from kvlab.errors import GrammarError, shown

_KEPT = 64  # grammars, which are compiled once
#: Between the parts of JSON: a model that likes white space would otherwise write nothing else.
_WHITE_SPACE = r"[ \t\n\r]{0,16}"

_SCHEMAS = {"items", "additionalProperties"}  # keywords of JSON Schema whose values are schemas, or have some
_LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"properties", "$defs", "definitions"}
_OTHERS = {"additionalProperties", "unevaluatedProperties", "patternProperties"}


class Grammars:
    """Compiles grammars for a vocabulary of `vocab_size` tokens, of which `ends` end a sequence. `tokenizer` gives
    a tokenizer in the form of tokenizer.json. Safe from several threads.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, ends: Sequence[int]) -> None:
        self._make, self._vocab_size, self._ends = tokenizer, vocab_size, list(ends)
        self._lock = Lock()
        self._compiled = lru_cache(maxsize=_KEPT)(self._compile)
        self._tokenizer: llguidance.LLTokenizer | None = None  # made for the first grammar: it takes half a second

    def json_schema(self, schema: Mapping[str, Any] | bool | str, white_space: str | None = None) -> Grammar:
        """JSON that the schema describes; `white_space`: what may be between its parts, a regular expression.
        Objects have no properties but those that the schema names, unless it says which. Raises GrammarError for a
        schema that is none, or names what is not supported.
        """
        try:
            given = json.loads(schema) if isinstance(schema, str) else schema
            if isinstance(given, bool):
                given = {} if given else {"not": {}}
            if not isinstance(given, Mapping):
                raise GrammarError(f"a JSON schema is an object, not {shown(given, repr)}")
            options = {"whitespace_pattern": _WHITE_SPACE if white_space is None else white_space}
            text = json.dumps({**_closed(given), "x-guidance": options})
        except RecursionError as error:
            raise GrammarError("the JSON schema is nested too deep") from error
        except json.JSONDecodeError as error:
            raise GrammarError(f"the JSON schema is no JSON: {error}") from error
        return self._grammar("JSON schema", llguidance.LLMatcher.grammar_from_json_schema, text)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, text: str) -> Grammar:
        """A regular expression of Rust's kind, which the whole output matches. Raises GrammarError."""
        return self._grammar("regular expression", llguidance.LLMatcher.grammar_from_regex, text)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts. Raises GrammarError."""
        if not texts or not all(texts):
            raise GrammarError("a choice needs texts, none of them empty")
        rules = "start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return self._grammar("choice", llguidance.LLMatcher.grammar_from_lark, rules)

    def lark(self, text: str) -> Grammar:
        """A context-free grammar in Lark's form, or in GBNF. Raises GrammarError."""
        try:
            rules = gbnf_to_lark(text) if "::=" in text else text
        except Exception as error:  # the converter has no kind of its own
            raise GrammarError(f"the grammar cannot be read: {shown(error)}") from error
        return self._grammar("grammar", llguidance.LLMatcher.grammar_from_lark, rules)

    def _grammar(self, kind: str, read: Callable[[str], str], text: str) -> Grammar:
        if len(text) > limits.MAX_GRAMMAR_CHARS:
            raise GrammarError(f"the {kind} has {len(text):,} characters; at most {limits.MAX_GRAMMAR_CHARS:,}")
        try:
            return self._compiled(kind, read(text))
        except ValueError as error:
            raise GrammarError(f"the {kind} cannot be followed: {_in_a_line(error)}") from error

    def _compile(self, kind: str, text: str) -> CompiledGrammar:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    self._make(), n_vocab=self._vocab_size, eos_token=self._ends
                )
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        matcher.compute_bitmask()  # the first takes longest, and some fail there: not in an engine's step
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return CompiledGrammar(matcher, self._vocab_size)


class CompiledGrammar(Grammar):
    """Compiled for a vocabulary."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> GrammarState:
        return _State(self._matcher.deep_copy(), self._vocab_size)


class _State(GrammarState):
    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._consumed: tuple[int, ...] = ()

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        output, common = tuple(output), len(self._consumed)
        if output[:common] != self._consumed:
            pairs = zip(output, self._consumed, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._matcher.rollback(len(self._consumed) - common)
        common += self._matcher.try_consume_tokens(list(output[common:]))
        self._consumed = output[:common]
        bits = self._matcher.compute_bitmask() if common == len(output) else None
        if self._matcher.is_error():
            raise GrammarError(f"its grammar cannot be followed: {_in_a_line(self._matcher.get_error())}")
        if bits is None:
            return None
        is_allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        return is_allowed.view(np.bool_)


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name: a small model would go on inventing some."""
    if not isinstance(schema, Mapping) or "allOf" in schema:  # of which each part names some
        return schema
    closed = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS:
            closed[name] = _closed(value)
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            closed[name] = [_closed(part) for part in value]
        elif name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            closed[name] = {key: _closed(part) for key, part in value.items()}
    if "properties" in schema and not _OTHERS & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _in_a_line(error: object) -> str:
    return shown(" ".join(str(error).partition("<state>")[0].split()))
