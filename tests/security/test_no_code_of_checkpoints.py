"""No call in this repository lets a library run what a model's directory holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Methods of transformers' classes, and vLLM's engines, that read a directory and may be told to run its code.
READERS = ("from_pretrained", "LLM", "EngineArgs")


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in READERS:
            yield node


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_safe(call: ast.Call) -> bool:
    said = {keyword.arg: keyword.value for keyword in call.keywords}.get("trust_remote_code")
    return isinstance(said, ast.Constant) and said.value is False


def python_files() -> Iterator[Path]:
    for folder in ("src", "features", "tests", "experiments", "docs"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_every_reader_of_a_directory_is_told_not_to_trust_it() -> None:
    found = [
        (f"{file.relative_to(ROOT)}:{call.lineno}", is_safe(call))
        for file in python_files()
        if any(f"{name}(" in (text := file.read_text(encoding="utf-8")) for name in READERS)
        for call in calls(ast.parse(text))
    ]
    assert [place for place, safe in found if not safe] == []
    assert len(found) >= 2  # those of kvlab/peers/programs


@pytest.mark.parametrize("text", ["x.from_pretrained(a)", "x.from_pretrained(a, trust_remote_code=b)", "LLM(a)"])
def test_an_unsafe_reader_would_be_found(text: str) -> None:
    assert [is_safe(call) for call in calls(ast.parse(text))] == [False]


def test_nothing_loads_pickles() -> None:
    """torch.load too is one who reads them."""
    loaders = ("torch.load(", "pickle.load(", "joblib.load(", "trust_remote_code=True")
    places = [
        f"{file.relative_to(ROOT)}: {loader}"
        for file in python_files()
        if file != Path(__file__)
        for loader in loaders
        if loader in file.read_text(encoding="utf-8")
    ]
    assert places == []
