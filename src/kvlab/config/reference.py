"""Every setting of a run with its type, default and description, read from the schema itself.

A description is the comment behind a field. docs/_site/configuration.py makes the configuration reference of these.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from kvlab.config.run import RunConfig
from kvlab.registry import KEYS, registry


class Setting(NamedTuple):
    """One setting as it is written on a command line."""

    key: str  # kv.block_size
    type: str  # int | None
    default: object
    description: str
    choices: tuple[str, ...]  # implementations known by name; empty: the setting takes no such name


def settings(schema: type = RunConfig, prefix: str = "") -> Iterator[Setting]:
    """Every setting below `schema`, in the order of its fields; implementations of loaded plugins included."""
    types = get_type_hints(schema)
    for field in fields(schema):
        key, kind = f"{prefix}{field.name}", types[field.name]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from settings(kind, f"{key}.")
            continue
        default: Any = field.default if field.default_factory is MISSING else field.default_factory()
        choices = registry(key).names() if key in KEYS else ()
        yield Setting(key, str(field.type), default, _comments(schema)[field.name], choices)


@cache
def _comments(schema: type) -> dict[str, str]:
    """The comment behind each field of a dataclass and of those it inherits from; empty where there is none."""
    found: dict[str, str] = {}
    for owner in reversed([base for base in schema.__mro__ if is_dataclass(base)]):
        source = inspect.getsource(owner)
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :].decode()
                found[node.target.id] = rest.strip().removeprefix("#").strip()
    return found
