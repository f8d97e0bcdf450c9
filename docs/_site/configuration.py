"""Writes docs/reference/configuration.md from the schema and conf/: python docs/_site/configuration.py.

A setting's description is the comment behind its field in src/kvlab/config/.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from kvlab.config import RunConfig
from kvlab.config.effects import CONDITIONS, Condition
from kvlab.registry import KEYS, registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/configuration.md"
GROUPS = {
    "model": "The decoder, and where its weights come from.",
    "kv": "The KV cache: its layout and its size.",
    "scheduler": "Which sequences run in a step, and which are preempted.",
    "attention": "How attention over the cache is computed.",
    "executor": "Where and how the model runs.",
    "hardware": "The device that `executor=simulated` simulates; no choice unless one is given.",
    "framework": "The serving framework that the simulated device stands for.",
    "engine": "Which engine serves the requests.",
    "workload": "The requests.",
    "fleet": "Several replicas of the engine behind a router. There are no files of it.",
    "slo": "Service levels: the limits that goodput and attainment count by. There are no files of them.",
    "tracking": "Where runs are recorded.",
    "debug": "Costly checks and injected faults; no choice unless one is given.",
}
HEAD = """# Configuration reference

Every setting of `kvlab run`, written as `key=value`. `group=choice` takes the values of a file of `conf/`; a
dotted key changes one value of it. `null` is no value. `python docs/_site/configuration.py` writes this page from
the schema (`src/kvlab/config/`), and a test checks that it is up to date.
"""
EFFECTS = """## Settings that only some choices read

Given to another choice, each has no effect, and a run says so in a line.
"""


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
        kind = next(filter(is_dataclass, get_args(kind)), kind)  # a group that may be absent
        if is_dataclass(kind) and isinstance(kind, type):
            yield from settings(kind, f"{key}.")
            continue
        default: Any = field.default if field.default_factory is MISSING else field.default_factory()
        choices = registry(key).names() if key in KEYS else ()
        text = inspect.formatannotation(kind).replace("typing.", "")
        yield Setting(key, text, default, _comments(schema)[field.name], choices)


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


def page() -> str:
    """The page's text."""
    by_group: dict[str, list[Setting]] = {}
    for setting in settings():
        group = setting.key.partition(".")[0] if "." in setting.key else ""
        by_group.setdefault(group, []).append(setting)
    parts = [HEAD, _choices(ROOT / "conf", "Named combinations", ("experiment", "sweep"))]
    parts.append("## Run\n\n" + _table(by_group.pop("")))
    for group, known in by_group.items():
        folder = ROOT / "conf" / group
        files = [_files(folder)] if folder.is_dir() else []
        parts.append("\n\n".join([f"## {group}", GROUPS[group], *files, _table(known)]))
    rows = [
        f"| {', '.join(map(_key, several))} | {_cell(by)} |"
        for by, several in groupby(CONDITIONS, lambda condition: condition.by)
    ]
    parts.append("\n".join([EFFECTS, "| setting | is read by |", "|---|---|", *rows]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _key(condition: Condition) -> str:
    names = ", ".join(f"`{name}`" for name in condition.but)
    return f"`{condition.key}`" + (f" (but {names})" if names else "")


def _choices(conf: Path, title: str, groups: tuple[str, ...]) -> str:
    return f"## {title}\n\n" + "\n\n".join(f"{_files(conf / group)}" for group in groups)


def _files(folder: Path) -> str:
    rows = [f"| `{folder.name}=` | what it is |", "|---|---|"]
    for path in sorted(folder.glob("*.yaml")):
        comments = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
        comment = next(line for line in comments if "@package" not in line).removeprefix("# ")
        # An experiment's comment begins with its command, which the table's heading says already.
        comment = comment.partition("     ")[2] or comment
        rows.append(f"| `{path.stem}` | {_cell(comment.strip())} |")
    return "\n".join(rows)


def _table(known: list[Setting]) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{setting.key}` | {_type(setting.type)} | {_default(setting.default)} | {_cell(_meaning(setting))} |"
        for setting in known
    ]
    return "\n".join(rows)


def _meaning(setting: Setting) -> str:
    if not setting.choices:
        return setting.description
    return f"{setting.description}{'. ' * bool(setting.description)}Known: {', '.join(setting.choices)}"


def _type(written: str) -> str:
    return written.replace("None", "null").replace(" | ", " or ")


def _default(value: object) -> str:
    texts = {None: "`null`", True: "`true`", False: "`false`", "???": ""}
    return texts.get(value, f"`{value}`") if isinstance(value, str | bool | None) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
