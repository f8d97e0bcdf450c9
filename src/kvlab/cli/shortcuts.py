"""What a few words of a command line stand for: a model by its path or published name, and simulated devices."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.lab.settings import as_word, key_of
from kvlab.paths import CONF

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FETCHED = "fetched:"
_EXECUTOR = ("executor", "executor.kind", "executor.device")  # who names one has chosen
# What a published name has beyond a preset's, of the same architecture and types.
_VARIANT = re.compile(r"(instruct|chat|base|it|hf)?(v\d+)?$")
_GROUP_HARDWARE = re.compile(r"\bhardware:\s*['\"]?(\w+)")


def expanded(overrides: Sequence[str], own: Sequence[Path] = ()) -> list[str]:
    """The overrides with what they stand for written out; `own` are folders of a user's choices beside kvlab's.

    `model=` takes a directory with a config.json, that file, a GGUF file or the id of a hub; where devices are
    simulated, the id of a model that a preset describes is that preset. `hardware=` of other devices than `here`
    means simulated ones unless an executor is named. Raises ConfigError for a path without a model.
    """
    is_simulated = _asks_for_devices(overrides)
    keys = {key_of(text) for text in overrides}
    written = [word for text in overrides for word in _written_out(text, is_simulated, own)]
    if is_simulated and not keys & set(_EXECUTOR):
        written.append("executor=simulated")
    return written


def _asks_for_devices(overrides: Sequence[str]) -> bool:
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        named = value.split(",") if key == "hardware" else []
        named += _GROUP_HARDWARE.findall(value) if key == "fleet.groups" else []
        if any(name not in ("here", "null", "") for name in named):
            return True
    return False


def _written_out(text: str, is_simulated: bool, own: Sequence[Path]) -> list[str]:
    key, _, value = text.partition("=")
    if key == "hardware":
        return [f"{key}={_preset(key, value) or value}"]
    if key != "model" or not value or value.startswith(("[", "{", "$")):
        return [text]
    if any((folder / key / f"{value}.yaml").is_file() for folder in (CONF, *own)):
        return [text]
    if value.startswith(_FETCHED):
        return _checkpoint(value, value.removeprefix(_FETCHED))
    path = Path(value).expanduser()
    if value.lower().endswith(".gguf"):
        return _checkpoint(str(path.absolute()), path.stem)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError("model", value, "has no config.json; name a directory with one, or a GGUF file")
        if file.name != "config.json":
            raise ConfigError("model", value, "a model's configuration is called config.json; rename it")
        parent = file.parent.resolve()  # the file itself may be a link, as in a hub's cache
        return _checkpoint(str(parent), parent.name)
    if (preset := _preset(key, value)) and "/" not in value:
        return [f"model={preset}"]
    if not _HUB_ID.fullmatch(value) or value.startswith("."):
        if "/" in value:
            raise ConfigError(key, value, "there is no such directory or file")
        return [text]
    preset = _preset(key, value.partition("/")[2])
    return [f"model={preset}"] if preset and is_simulated else _checkpoint(value, value.partition("/")[2])


def _checkpoint(path: str, name: str) -> list[str]:
    return ["model=checkpoint", as_word("model.path", path), as_word("model.name", name)]


def _preset(group: str, name: str) -> str | None:
    """The choice of a group whose name differs in case and punctuation, or as names of published models do."""
    wanted = _bare(name)
    for file in sorted((CONF / group).glob("*.yaml")):
        bare = _bare(file.stem)
        if wanted == bare or (group == "model" and re.fullmatch(rf"(meta)?{bare}{_VARIANT.pattern}", wanted)):
            return file.stem
    return None


def _bare(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
