"""What a user writes on the command line, before Hydra reads it: keys are checked, short forms written out."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from kvlab.cli.foreign import foreign, translated
from kvlab.cli.known import OWN_KEYS, aliases, known_keys, meant
from kvlab.cli.shortcuts import expanded
from kvlab.errors import ConfigError
from kvlab.paths import CONF
from kvlab.secrets import redacted

_GROUPS = ("sweep", "experiment")  # choices that are no settings
_OF_A_GROUP = r"fleet\.groups\.\d+\.\w.*"  # that is written before it
_LENGTHS = ("workload.prompt_len", "workload.output_len")
_PIPELINES = ("pipeline_parallel", "pipeline_parallel_size", "pp_size", "pp")
_OF_COMMANDS = {  # settings of one command that are given to another
    "port": "is a setting of kvlab serve: server.port",
    "host": "is a setting of kvlab serve: server.host",
    "memory": "is a setting of kvlab capacity and kvlab tune; a run's cache has kv.memory",
    "devices": "is a setting of kvlab advise; a replica has executor.tensor_parallel devices",
}


def written_out(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them, behind its flags: `workload.prompt_len=8000` is of exactly 8,000 tokens,
    and choices in `conf/` of the working directory are found. Raises ConfigError for a key that there is not.
    """
    if option := foreign(overrides):
        raise ConfigError("option", option.partition("=")[0], f"is no option; {translated(overrides)}")
    for text, before in zip(overrides, ("", *overrides), strict=False):
        if re.match(r"[\w./]", text) and "=" not in text and not before.startswith("-"):
            written = f"{text}=..." if meant(text) == text else f"model={text}"
            if text.endswith(".jsonl"):  # what `kvlab import` and `kvlab record` write
                written = f"workload=recorded workload.path={text}"
            raise ConfigError("settings", text, f"is no setting; write key=value, as {written}")
    texts = [_written_out(text) for text in overrides]
    try:
        folder = Path("conf").absolute()
    except OSError:  # the working directory was removed, which is said later
        return texts
    texts = expanded(texts, [folder])
    # A flag between overrides, as -m, makes Hydra's parser take those behind it for unknown arguments.
    texts.sort(key=lambda text: text.startswith("~") or ("=" in text and not text.startswith("-")))
    is_named = any("searchpath" in text or "config-dir" in text for text in texts)
    if folder.is_dir() and folder != CONF and not is_named and not {"-cd"} & set(texts):
        quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
        texts.append(f"hydra.searchpath=['file://{quoted}']")
    return texts


def _written_out(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key) or key.startswith("hydra"):
        return text
    if key in _LENGTHS and re.fullmatch(r"\d+(,\d+)*", value):
        return f"{key}=" + ",".join(f"{{min: {length}, max: {length}}}" for length in value.split(","))
    if re.fullmatch(_OF_A_GROUP, key):
        return f"++{text}"  # also of a group that was written without it
    check_key(key, value)
    return text


def check_key(key: str, value: str) -> None:
    """Raise ConfigError for a key that is no setting, or has settings of its own."""
    settings, sections, is_open = known_keys()
    if key in settings or key in _GROUPS or key.startswith(is_open):
        return
    if key in sections:
        if "." in key and not value.startswith(("{", "$", "[")):
            text = "has settings of its own: " + ", ".join(name for name in settings if name.startswith(f"{key}."))
            if key in _LENGTHS:
                text = f"must be a whole number of tokens from 1 on, as {key}=2000; or it {text}"
            raise ConfigError(key, redacted(key, value), text)
        return
    if key in _OF_COMMANDS:
        text = f"unknown to this command; it {_OF_COMMANDS[key]}"
    elif key.rpartition(".")[2] in _PIPELINES:
        text = "unknown: layers are not divided into stages; a model is divided by executor.tensor_parallel"
    elif near := _near(key):
        text = f"unknown; did you mean {' or '.join(dict.fromkeys(near))}?"
    else:
        group = key.partition(".")[0]
        known = [name for name in settings if name.startswith(f"{group}.")] if "." in key else []
        known = known or [name.partition(".")[0] for name in (*OWN_KEYS.get(), *settings)]
        text = f"unknown; known: {', '.join(dict.fromkeys(known))}"
    raise ConfigError(key, redacted(key, value), text)


def _near(key: str) -> list[str]:
    """Settings that an unknown key may have meant: what others call so, what ends so, what is spelled nearly so."""
    settings, sections, _ = known_keys()
    group, _, last = key.rpartition(".")
    near = [aliases()[last]] if last in aliases() else []
    near += [name for name in settings if name.rpartition(".")[2] == last]
    if not near and len(last) > 3:
        longer = [name for name in (*settings, *sections) if name.rpartition(".")[2].startswith(f"{last}_")]
        near = [name for name in longer if name.rpartition(".")[0] == group] or longer[:2]
    near = near or get_close_matches(key, OWN_KEYS.get(), n=1, cutoff=0.75)
    near = near or get_close_matches(key, [*settings, *sections], n=1)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in settings}
        near = [leaves[leaf] for leaf in get_close_matches(last, leaves, n=1)]
    return near
