"""Settings: fields with help, and how settings are recorded: dotted keys, no secrets, what is measured."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.peers.engines import is_peer
from kvlab.secrets import redact, redacted, redacted_setting

if TYPE_CHECKING:
    from kvlab.config import RunConfig

# Settings that name a run, or decide where it is recorded and how it is shown; no measurement depends on them.
_NOT_MEASURED = frozenset(
    {"tracking", "tags", "run_name", "optimize", "repeats", "resume", "figures", "dry_run", "verbose"}
)
_NOT_NAMED = {"hydra", "tracking", "tags", "server"}  # groups of which a name says nothing
_MOST_NAMED = 4  # settings
_PLAIN = re.compile(r"[\w./:@%+~*-]*")  # a value that means itself without quotes, in Hydra's grammar
_PLAIN_WITHIN = re.compile(r"[\w./:@%-]+", re.ASCII)  # the same within a list, unless it is another kind of value


def setting(default: Any, text: str, value: str = "") -> Any:
    """A field of a schema: its default, what the help page says of it, and what stands for its value there."""
    metadata = {"help": text, "value": value}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys; an empty mapping has none."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif value != {}:
            flat[f"{prefix}{key}"] = value
    return flat


def as_word(key: str, value: object) -> str:
    """A setting as it is typed on a command line, without the quotes that a shell needs."""
    if not isinstance(value, str):
        return f"{key}={_as_text(value)}"
    return f"{key}={value if _PLAIN.fullmatch(value) else _quoted(value)}"


def _as_text(value: object) -> str:
    """In Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_as_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_text, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN_WITHIN.fullmatch(value) and not _is_other(value) else _quoted(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_other(text: str) -> bool:
    """Whether it would be a number, true, false or null."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "null")
    return True


def _quoted(text: str) -> str:
    """In double quotes, as a shell has the word in single ones."""
    return '"' + text.replace('"', '\\"') + '"'


def key_of(word: str) -> str:
    """The key of a word of a command line, whether it sets or adds it."""
    return word.partition("=")[0].lstrip("+")


def run_command(words: Iterable[str]) -> str:
    """The run of words of a command line as a user types it, without secrets."""
    return " ".join(["kvlab run", *(shlex.quote(redacted_setting(word)) for word in words)])


def measured(settings: Mapping[str, object], *, any_repeat: bool) -> dict[str, object]:
    """The flat settings that a measurement depends on, but for empty lists, and for `repeat` with `any_repeat`."""
    left_out = _NOT_MEASURED | {"repeat"} if any_repeat else _NOT_MEASURED
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in left_out and value != []}


def as_recorded(config: Mapping[str, Any], written: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The settings without secrets. `written`: the text of those that came from the environment, by dotted key."""
    return {
        key: as_recorded(value, written, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else written.get(prefix + key, redacted(key, value))
        for key, value in config.items()
    }


@dataclass(frozen=True, slots=True)
class Composition:
    """A checked configuration, what was chosen in each group, and how it is recorded: as text without secrets, and
    by dotted key what is `written` of settings that came from the environment. Both take as long to make as the
    rest, and are made when they are asked for.
    """

    config: RunConfig
    choices: dict[str, str]
    yaml: Callable[[], str]
    written: Callable[[], dict[str, str]]  # with the ${oc.env:NAME} that is in it

    @property
    def name(self) -> str:
        """The run's name, made up where it was given none."""
        return self.written().get("run_name") or redact(self.config.run_name or run_title(self.config))

    def name_after(self, overrides: Iterable[str]) -> str:
        """The same, a made up name with those of the command line's `overrides` that set a single value: they tell
        runs apart.
        """
        if self.config.run_name:
            return self.name
        pairs = [override.partition("=") for override in overrides]
        given = [(key, value) for key, _, value in pairs if "." in key and key.partition(".")[0] not in _NOT_NAMED]
        texts = [f"{key.rpartition('.')[2]}={redacted(key, value)}" for key, value in given]
        shown = ["...", *texts[-_MOST_NAMED:]] if len(texts) > _MOST_NAMED else texts
        return redact(" ".join([self.name, *shown]))


def run_title(config: RunConfig) -> str:
    """The name of a run that was given none."""
    kind = config.engine.kind
    return f"{config.model.name} {kind if is_peer(kind) else config.kv.backend} {config.workload.name}"
