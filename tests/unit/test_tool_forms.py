"""Tool calls in the forms in which models write them, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import KvlabError
from kvlab.server.tool_forms import TOOL_FORMS, ListReader, ToolReader, form_of

CALL = '{"name": "f", "arguments": {"a": "é<tool>"}}'
F = ("f", '{"a": "é<tool>"}')
G = ("g", "{}")

HERMES = {
    "Hello, <b>you</b>! 1 < 2\n": ("Hello, <b>you</b>! 1 < 2\n", []),
    f"<tool_call>\n{CALL}\n</tool_call>": ("", [F]),
    f"I look. \n\n<tool_call>{CALL}</tool_call>\n": ("I look.", [F]),
    f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "g", "parameters": "{{}}"}}</tool_call>': ("", [F, G]),
    f"<tool_call>{CALL}</tool_call> Done.": (" Done.", [F]),
    f"<tool_call>\n{CALL}": ("", [F]),
    "<tool_call>no JSON</tool_call> so": ("<tool_call>no JSON</tool_call> so", []),
    '<tool_call>{"name": 7}</tool_call>': ('<tool_call>{"name": 7}</tool_call>', []),
    '<tool_call>{"name": "f", "argu': ('<tool_call>{"name": "f", "argu', []),
    "a <tool_cal": ("a <tool_cal", []),
    "<tool_call>" + "[" * 5000: ("<tool_call>" + "[" * 5000, []),
}
LLAMA = {
    "Hello {you}": ("Hello {you}", []),
    "  ": ("  ", []),
    "<|python_tag|>": ("<|python_tag|>", []),
    "<|pyt": ("<|pyt", []),
    "<b>": ("<b>", []),
    '{"name": "f", "parameters": {"a": "é<tool>"}}': ("", [F]),
    '<|python_tag|>{"name": "f", "parameters": {"a": "é<tool>"}}; {"name": "g", "arguments": {}}': ("", [F, G]),
    '{"name": "f"': ('{"name": "f"', []),
    '{"answer": 7}': ('{"answer": 7}', []),
    '{"name": "g", "parameters": {}} and more': ('{"name": "g", "parameters": {}} and more', []),
}
LISTS = {
    '[{"name": "f", "parameters": {"a": "é<tool>"}}, {"name": "g", "parameters": {}}]': ("", [F, G]),
    '[\n{"name": "f", "parameters": {"a": "é<tool>"}},\n{"name": "g", "par': ("", [F]),
    '[{"name": "f", "para': ('[{"name": "f", "para', []),
}
CASES = [
    (kind, text, *expected)
    for kind, cases in (
        (TOOL_FORMS.get("hermes"), HERMES),
        (TOOL_FORMS.get("llama3_json"), LLAMA),
        (ListReader, LISTS),
    )
    for text, expected in cases.items()
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
@given(st.data())
def test_content_and_calls_are_the_same_for_every_cut(
    kind: type[ToolReader], text: str, content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    reader = kind()
    pieces = [reader.add(text[start:end]) for start, end in pairwise(cuts)]
    pieces.append(reader.close())
    assert "".join(piece for piece, _ in pieces) == content
    assert [tuple(call) for _, each in pieces for call in each] == calls


def test_content_is_not_held_back_but_for_what_may_be_a_call() -> None:
    reader = TOOL_FORMS.get("hermes")()
    assert [reader.add(text)[0] for text in ("Hel", "lo", " <", "b", "> x")] == ["Hel", "lo", "", " <b", "> x"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{% if role == 'ipython' %}", "llama3_json"),
        ("", "hermes"),
    ],
)
def test_the_form_is_that_of_the_template(template: str, form: str) -> None:
    assert form_of(template) == form


def test_a_form_that_nobody_knows_is_named() -> None:
    with pytest.raises(KvlabError, match=r"server.tool_call_parser.*hermes.*llama3_json"):
        TOOL_FORMS.get("pythonic")
