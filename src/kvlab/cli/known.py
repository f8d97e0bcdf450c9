"""Which settings there are, and what others call them."""

import dataclasses
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from kvlab.secrets import redacted_setting

#: The settings of the command that runs, beside those of a run: what a key that is neither may have meant.
OWN_KEYS: ContextVar[tuple[str, ...]] = ContextVar("OWN_KEYS", default=())


@cache
def aliases() -> dict[str, str]:
    """What vLLM and SGLang call settings, and common short names: the setting of each."""
    import yaml  # so that --help answers at once

    names_of = yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_text(encoding="utf-8"))
    return {name: setting for setting, names in names_of.items() for name in names}


def schema_keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a schema and its type, `X | None` counting as X; behind a dataclass its own keys, with dots."""
    for name, hint in get_type_hints(schema).items():
        kinds = get_args(hint)
        kind = next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else hint
        yield f"{prefix}{name}", kind
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(kind, f"{prefix}{name}.")


@cache
def known_keys() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The dotted keys of a run's settings, those of groups of them, and beginnings of keys that are open."""
    from kvlab.config import RunConfig  # so that --help answers at once

    settings, sections, is_open = list[str](), list[str](), list[str]()
    for key, kind in schema_keys(RunConfig):
        if get_origin(kind) is dict:
            is_open.append(f"{key}.")
        (sections if dataclasses.is_dataclass(kind) else settings).append(key)
    return tuple(settings), tuple(sections), tuple(is_open)


def kind_of(key: str) -> Any:
    """The type of a run's setting; None: it is none."""
    from kvlab.config import RunConfig

    return dict(schema_keys(RunConfig)).get(key)


def given_twice(words: Iterable[str], own: Iterable[str] = (), lists: Iterable[str] = ()) -> list[str]:
    """A sentence for each setting of a run, or of its command's `own`, that a command line gives several values, of
    which the last one counts; of the command's `lists` all do.
    """
    settings, sections, is_open = known_keys()
    known, given = {*settings, *sections, *own}.difference(lists), dict[str, list[str]]()
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.lstrip("-").replace("-", "_") if word.startswith("-") else key.lstrip("+~")
        if (equals or word.startswith("~")) and (key in known or key.startswith((*is_open, "hydra"))):
            given.setdefault(key, []).append(word)
    return [
        f"{key} is given {len(each)} times, and {redacted_setting(each[-1])} counts"
        for key, each in given.items()
        if len(set(each)) > 1
    ]


def meant(option: str) -> str | None:
    """The setting that an option stands for, as those of vLLM's and SGLang's servers; None: not known."""
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    settings, sections, _ = known_keys()
    if name in aliases() or name in (*settings, *sections):
        return aliases().get(name, name)
    return next((key for key in (*OWN_KEYS.get(), *settings) if key.rpartition(".")[2] == name), None)
