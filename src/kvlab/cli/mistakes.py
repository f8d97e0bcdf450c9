"""A user's mistakes as Hydra and OmegaConf report them, in a sentence."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import get_origin

from kvlab.cli.known import kind_of
from kvlab.errors import ConfigError, KvlabError, nearest, shown
from kvlab.lab.files import refusal
from kvlab.secrets import redact, redacted

_PARSERS = ("hydra", "omegaconf", "antlr4")
# Where an error was raised and on what, and advice that mostly does not hold here.
_NOT_SAID = re.compile(
    r"\n\s*(full_key|reference_type|object_type|Config search path):.*|\nSee https://hydra\S*.*|\.\nTo append .*"
    r"|^Error (merging|parsing) override .*|^LexerNoViableAltException:.*"
    r"|^\w+ raised while resolving interpolation: ",
    re.DOTALL,
)
SEVERAL = "has several values"  # the reason begins so, of a setting that has one
#: Groups whose choices are files: the setting that takes a plugin's name, for which there is no file.
_OF_PLUGINS = {
    "attention": "attention.backend",
    "engine": "engine.kind",
    "executor": "executor.kind",
    "kv": "kv.backend",
    "scheduler": "scheduler.policy",
}
_OPEN = ("tags", "model.architecture", "engine.options")  # take any keys


@contextmanager
def explained(overrides: Sequence[str] | Callable[[], Sequence[str]]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise about `overrides` into a KvlabError; other errors stay as they are."""
    try:
        yield
    except Exception as error:
        mistaken = mistake(error, overrides() if callable(overrides) else overrides)
        if mistaken is None or mistaken is error:
            raise
        raise mistaken from error


def mistake(error: BaseException, overrides: Sequence[str]) -> KvlabError | None:
    """What is wrong with `overrides`, where it was Hydra or OmegaConf that raised `error`; else None."""
    chain = [error]
    while (cause := chain[-1].__cause__ or _resolving(chain[-1])) is not None:
        chain.append(cause)
    if (own := next((raised for raised in chain if isinstance(raised, KvlabError)), None)) is not None:
        return own
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    if next((name for name in reversed(modules) if name in ("kvlab", *_PARSERS)), "kvlab") == "kvlab":
        return None
    if isinstance(error, FileNotFoundError) and error.filename is None:  # what getcwd raises
        return ConfigError("hydra.run.dir", ".", "the working directory was removed; change to another one")
    if isinstance(error, OSError) and error.filename is not None:
        return ConfigError("hydra.run.dir", error.filename, refusal(error))
    texts = [" ".join(_NOT_SAID.sub("", str(raised)).split()) for raised in chain]
    reason = "; ".join(text for text in dict.fromkeys(texts) if text and "$VALUE" not in text)
    if choice := re.search(r"Could not find '(.+)' Available options in '(.+)': (.+)", reason):
        return _unknown_choice(choice[2], choice[1].removeprefix(f"{choice[2]}/"), choice[3].split())
    keys = {str(getattr(raised, "full_key", "") or "") for raised in chain} - {""}
    written = getattr(error, "override", None)  # of one that cannot be parsed
    name, value = _guilty([written] if written is not None else overrides, keys, f"{error} {reason}")
    if not reason or "OverrideParse" in type(error).__name__:
        text = f"cannot be read{f' ({reason})' if reason else ''}: write key=value, and quotes around a value of "
        text += "other characters than letters and digits, as \"run_name='a, b'\""
    else:
        text = _in_plain_words(reason, name, value, str(error))
    return ConfigError(name, redacted(name, value), shown(redact(text), most=600))


def _in_plain_words(reason: str, name: str, value: str, error: str) -> str:
    """What Hydra or OmegaConf gives as `reason` against a setting, in words of this command line."""
    kind = kind_of(name)
    if "list index out of range" in reason:
        return "is of no group that is written before it; the first is 0"
    if name == "fleet.groups" and ("Dict[str, Any]" in reason or re.fullmatch(r"\w+", value)):
        return "must be a list of groups, as 'fleet.groups=[{count:2,hardware:l40s}]'"
    if "Ambiguous value" in reason and ("[" in value or get_origin(kind) is not list):
        text = f", or write one text, as \"{name}='...'\"" if kind is str else ""
        return f"{SEVERAL}; sweep over them with kvlab run -m{text}"
    if any(text in reason for text in ("is not a ListConfig", "with ListConfig", "Ambiguous value")):
        return f"must be a list, as '{name}=[{redacted(name, value)}]'"
    if "is not Optional" in reason:
        is_list = get_origin(kind) is list
        return (
            "must be a list; [] is one of nothing" if is_list else "must have a value; leave it out for its default"
        )
    if wrong := re.search(r"could not be converted to (Integer|Float)|is not a valid (bool)", reason):
        needed = {"Integer": "a whole number", "Float": "a number"}.get(wrong[1], "true or false")
        inner = re.search(r"Value '(.*?)'.*full_key: (\S+)", error, re.DOTALL)
        is_of_file = inner is not None and name != inner[2] and name in inner[2].split(".")
        return f"{inner[2]}={inner[1]} there must be {needed}" if inner and is_of_file else f"must be {needed}"
    if f"Could not override '{name}'" in reason and name.startswith(_OPEN):
        return f"{reason}; to add it, write +{name}=..."
    return reason


def _unknown_choice(group: str, name: str, known: list[str]) -> ConfigError:
    """A group's option that there is none of, with the nearest that there is."""
    hint = nearest(name.lower(), known, "; did you mean {}?")
    if (key := _OF_PLUGINS.get(group)) is not None:
        hint += f"; one of a plugin is {key}=NAME"
    if group == "model":
        hint = f"; or a directory with a config.json, a GGUF file or the id of a hub{hint}"
    return ConfigError(group, redacted(group, name), f"unknown; known: {', '.join(known)}{hint}")


def _resolving(error: BaseException) -> BaseException | None:
    """What a resolver of kvlab raised: OmegaConf leaves it as the context of its own error."""
    return error.__context__ if type(error).__module__.startswith("omegaconf") else None


def _guilty(overrides: Sequence[str], keys: set[str], said: str) -> tuple[str, str]:
    """Key and value of the override that was meant, as far as that can be told."""
    for override in reversed(overrides):
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        resolved = any(f"${{{name}" in value for name in re.findall("'([^']+)'", said))
        if key in keys or f"'{key}/{value}'" in said or (override and override in said) or resolved:
            return key, value
    if len(overrides) == 1:
        key, _, value = overrides[0].partition("=")
        return key, value
    return next(iter(keys), "settings"), "..."
