"""Files of a checkpoint, which strangers wrote: data that is checked before it is believed, and never code."""

import json
import stat
from pathlib import Path
from typing import Any

from kvlab.errors import shown

_LARGEST = 64 << 20  # bytes of a JSON file; the index of a model of 671 billion parameters has 9 million
_DIGITS = 30  # of a whole number


def check_file(file: Path) -> int:
    """The bytes of a regular file, or of one that a link leads to. Raises ValueError, whose text goes on after the
    file's name, if it is not there, and for a folder, FIFO or device: reading those would fail or never end.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ValueError("is not there") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    return status.st_size


def read_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises ValueError as `check_file` does, also for a key that has two values: two
    readers could take it for two different models.
    """
    if (size := check_file(file)) > _LARGEST:
        raise ValueError(f"has {size} bytes, more than the {_LARGEST} that are read")
    try:
        text = file.read_text(encoding="utf-8-sig")
        values = json.loads(text, object_pairs_hook=_unambiguous, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("is no JSON that can be read (nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"is no JSON that can be read ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("holds no JSON object")
    return values


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            raise ValueError(f"the key {shown(key)} has two values")
        values[key] = value
    return values


def _whole_number(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)
