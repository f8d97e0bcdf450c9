"""Every public method says what it does, itself or in the contract that its class inherits."""

from __future__ import annotations

import ast
from pathlib import Path

import kvlab

SOURCE = Path(kvlab.__file__).parent


def name_of(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def unexplained(code: str) -> list[str]:
    """Public methods of public classes that neither have a docstring nor override one that has."""
    classes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]
    bases = {each.name: [name_of(base) for base in each.bases] for each in classes}
    methods = {
        (each.name, found.name): ast.get_docstring(found) is not None
        for each in classes
        for found in each.body
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    def is_explained(kind: str, method: str) -> bool:
        return methods.get((kind, method), False) or any(is_explained(base, method) for base in bases.get(kind, ()))

    public = [(kind, name) for kind, name in methods if name == "__call__" or not name.startswith("_")]
    return [f"{kind}.{method}" for kind, method in public if kind[0] != "_" and not is_explained(kind, method)]


def test_every_public_method_is_explained() -> None:
    files = [file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")]
    assert unexplained("\n".join(files)) == []


def test_an_override_without_an_explained_contract_is_found() -> None:
    first = 'class A:\n  def told(self): "x"\n  def untold(self): 0\n'
    assert unexplained(first + "class B(A):\n  def told(self): 1\n  def untold(self): 1") == [
        "A.untold",
        "B.untold",
    ]
