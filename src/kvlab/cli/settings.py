"""The settings of a command of its own: a dataclass is their schema, their defaults and their help.

They are written as those of a run, key=value in Hydra's grammar, and may stand anywhere between them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, get_args, get_origin

from kvlab.cli.known import OWN_KEYS, given_twice, meant, schema_keys
from kvlab.cli.mistakes import explained
from kvlab.cli.output import lasting_output
from kvlab.errors import ConfigError, KvlabError, nearest, printable
from kvlab.lab.settings import setting as setting
from kvlab.plugins import asks_for_traceback, load_plugins, told
from kvlab.secrets import redact, redacted_output

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser


T = TypeVar("T")
_EXPECTED = {bool: "must be true or false", int: "must be a whole number", float: "is not a number"}


def read_settings(schema: type[T], arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Take the settings of `schema` out of a command line. Returns them, and the other arguments.

    A list that is given twice has the values of both; of other settings the last one counts. `--key=value` is the
    same as key=value, and `--key` sets a boolean. Raises ConfigError for an option that does not exist, a value of
    another type, and what the schema itself refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    types = _types(schema)
    settings = OmegaConf.structured(schema)
    others = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            key = key.lstrip("-").replace("-", "_")
            if types.get(key) is bool and not equals:
                equals, value = "=", "true"
            if key not in types or not equals:
                known = "".join(f"--{name.replace('_', '-')}, " for name in types if types[name] is bool)
                hint = f"write {named}=...; " if (named := meant(argument)) else ""
                text = f"unknown; {hint}known: {known}--help, and settings as key=value"
                if argument.startswith(("--config-dir", "-cd")):
                    text = "is for kvlab run; every command takes hydra.searchpath=[file://DIRECTORY] for it"
                raise ConfigError("option", argument, text)
        if key not in types or not equals:
            others.append(argument)
            continue
        kind = types[key]
        parsed = _parse(value.strip(), kind)
        if get_origin(kind) is list:
            parsed = [*OmegaConf.select(settings, key), *parsed]
        try:
            OmegaConf.update(settings, key, parsed)
        except OmegaConfBaseException as error:
            inner = get_args(kind)[0] if get_origin(kind) is list else kind
            raise ConfigError(key, value, _EXPECTED.get(inner, str(error).splitlines()[0])) from error
    with explained(arguments):  # an interpolation that does not resolve
        return cast(T, OmegaConf.to_object(settings)), others


def unknown_setting(schema: type, argument: str) -> ConfigError:
    """The error for a key=value that `schema` does not have."""
    key, _, value = argument.partition("=")
    known = list(_types(schema))
    alike = [name for name in known if name.rpartition(".")[2] == key]
    hint = f"did you mean {' or '.join(alike)}? " if alike else nearest(key, known, "did you mean {}? ")
    return ConfigError(key, value, f"unknown; {hint}known: {', '.join(known)}")


def bare_words(key: str) -> Callable[[list[str]], list[str]]:
    """A command line with each word that is no key=value as the value of `key`."""

    def written_out(arguments: list[str]) -> list[str]:
        return [text if "=" in text or text.startswith("-") else f"{key}={text}" for text in arguments]

    return written_out


def refuse_settings(schema: type, names: Sequence[str]) -> None:
    """Raise ConfigError where one of these names of files or runs is a key=value that `schema` does not have."""
    for name in names:
        key, equals, _ = name.partition("=")
        if equals and "/" not in key and not Path(name).exists():
            raise unknown_setting(schema, name)


def refuse_existing(key: str, path: Path) -> None:
    """Raise ConfigError where what `key` names to be written is there: nobody else has what would be lost."""
    if path.exists():
        raise ConfigError(key, path, "is there; name another file, or move that one away")


def help_page(page: str | None, schema: type) -> str:
    """A command's page, with the settings of its schema below it."""
    rows = [
        (f"{field.name}={field.metadata['value']}", field.metadata["help"])
        for field in dataclasses.fields(schema)
        if "help" in field.metadata
    ]
    width = max((len(name) for name, _ in rows), default=0) + 2
    return "\n".join([(page or "").strip(), "", *(f"  {name:<{width}}{text}" for name, text in rows)])


def command(
    page: str | None,
    schema: type[object],
    *,
    bare: bool = True,
    alone: bool = False,
    plugins: bool = False,
    written_out: Callable[[list[str]], list[str]] = list,
) -> Callable[[Callable[..., int]], Callable[[], None]]:
    """Make a function the `main` of a command. It is called with the settings of `schema` and the other arguments
    of the command line, `written_out` first, without these where settings come `alone`; it returns the exit code.
    With `plugins` those that the command line names are imported first: the schema has names of theirs.

    Prints the help page where it is asked for. Without arguments a command that is not `bare` prints the page and
    ends with 2, as a KvlabError does after its sentence.
    """

    def made(answer: Callable[..., int]) -> Callable[[], None]:
        @lasting_output()
        @redacted_output()
        @wraps(answer)
        def main() -> None:
            arguments = sys.argv[1:]
            if {"-h", "--help"} & set(arguments) or not (arguments or bare):
                print(help_page(page, schema))
                sys.exit(0 if arguments else 2)
            own = OWN_KEYS.set(tuple(_types(schema)))
            try:
                lists = (key for key, kind in _types(schema).items() if get_origin(kind) is list)
                warn_of_repeats(arguments, _types(schema), lists)
                if plugins:
                    load_plugins(chain.from_iterable(map(_plugins, arguments)))
                settings, others = read_settings(schema, written_out(arguments))
                if alone and others:
                    raise unknown_setting(schema, others[0])
                code = answer(settings) if alone else answer(settings, others)
            except KvlabError as error:
                fail(str(error))
            except KeyboardInterrupt:
                sys.exit(130)
            except Exception as error:
                text = told(error)
                if text is None and isinstance(error, OSError):  # a disk that is full, a directory that is gone
                    where = f"{error.filename}: " if error.filename else ""
                    fail(f"{where}{error.strerror or error}")
                if text is None or asks_for_traceback():
                    raise
                fail(text)
            finally:
                OWN_KEYS.reset(own)
            if code:
                sys.exit(code)

        return main

    return made


def warn_of_repeats(words: Iterable[str], own: Iterable[str] = (), lists: Iterable[str] = ()) -> None:
    """Say on stderr which settings a command line gives several values, of which the last one counts."""
    for text in given_twice(words, own, lists):
        print(f"warning: {printable(redact(text))}", file=sys.stderr)


def fail(message: str) -> NoReturn:
    """End the process with code 2 and a sentence on stderr."""
    print(f"error: {printable(redact(message))}", file=sys.stderr)
    sys.exit(2)


def _plugins(argument: str) -> list[str]:
    """The modules that an argument names as plugins."""
    key, _, value = argument.partition("=")
    return [str(name) for name in _parse(value.strip(), list[str])] if key == "plugins" else []


def _types(schema: type) -> dict[str, Any]:
    """The type of each key that has a value of its own."""
    return {key: kind for key, kind in schema_keys(schema) if not dataclasses.is_dataclass(kind)}


def _parse(text: str, kind: Any) -> Any:
    """The value of a text in Hydra's grammar: quotes are taken off, a list may be written a,b or [a,b].

    What is no such value, as a condition `a < 5%`, is taken as it is; of a list in brackets, as [http://[::1]:8000],
    each part. A list that is null is empty.
    """
    from hydra.errors import HydraException

    is_list = get_origin(kind) is list
    if is_list and text == "null":
        return []
    if kind is float:
        return text.rstrip("% ")
    if kind is str and not text.startswith(("'", '"')):
        return None if text == "null" else text
    try:
        written = f"[{text}]" if is_list and not text.startswith("[") else text
        return _parser().parse_override(f"key={written}").value()
    except HydraException:
        if is_list and text.startswith("[") and text.endswith("]"):
            return [part.strip() for part in text[1:-1].split(",")]
        return [text] if is_list else text


def parsed(text: str) -> Any:
    """The value of a text in Hydra's grammar; what is no such value as it is."""
    return _parse(text, dict)


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()
