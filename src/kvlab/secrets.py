"""What no text may show: credentials in addresses, secrets in the environment. Every rule of hiding is here.

    address          https://user:password@host/?token=abc     https://***@host/?token=***
    setting          tags.api_token=abc                        tags.api_token=***
    environment      ${oc.env:NAME}                            ${oc.env:NAME}, as it was written
    its secrets      the value of HF_TOKEN, in any text        ***

A value shorter than six characters is not looked for in other texts: it could be part of any word.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from typing import Any, TextIO, cast
from urllib.parse import quote, unquote

from kvlab.errors import printable

HIDDEN = "***"
_LEAST = 6  # characters

_KEY = r"(?:api|access|private)[-_]?key(?:[-_]?id)?"
_TOKEN = r"(?<!max_)(?<!min_)(?<!new_)(?<!num_)(?<!per_)token"  # as in max_token=5 they are counted
_NAME = rf"(?:passw(?:or)?d|passphrase|pwd|secret|{_TOKEN}|credentials?|signature|{_KEY})"
_SETTING = re.compile(rf"{_NAME}$", re.IGNORECASE)
_PART = re.compile(  # of a query, a command line, YAML, JSON; not what is hidden, empty or from the environment
    rf"((?:{_NAME}|(?<=[?&])(?:key|sig|auth))=[\"']?|(?:^|[{{,]) *[\w.-]*{_NAME}: |{_NAME}[\"']: [\"'])"
    r"(?!\*\*\*|\$\{|null\b|[-:](?:\s|$))([^\s&'\"]+)",
    re.IGNORECASE | re.MULTILINE,
)
_VARIABLE = re.compile(
    r"passw|passphrase|pass$|_pwd$|secret|token(?!s|iz)|credential|_key$|key_id$|_pat$|connection_string",
    re.IGNORECASE,
)
# A password may hold anything, `@` and `/` too. An empty host means a path, and `<user>` is an example of ours.
_CREDENTIALS = re.compile(r"(?<=://)(?![/<])(?:[^\s/:@]*:\S*|[^\s/@]*)@")
_ADDRESS = re.compile(r"(?<=://)(?![/<])(?:[^\n/:@]*:.*|[^\n/@]*)@")  # in a text that is one
_IS_ADDRESS = re.compile(r"[\w+.-]+://")

_taken: set[str] = set()  # names of the environment variables that a configuration refers to


def take_from_environment(name: str) -> None:
    """Note that a configuration refers to an environment variable: its value is shown as `${oc.env:NAME}`."""
    _taken.add(name)


def taken_from_environment() -> frozenset[str]:
    """The variables that were noted so."""
    return frozenset(_taken)


def redact(text: str, *addresses: str) -> str:
    """The text without credentials of URLs, secrets of the environment and those of these addresses."""
    environment = getattr(os.environb, "_data", os.environb)  # what is behind it is read in a tenth of the time
    hidden = _values_of_environment(tuple(environment.items()), frozenset(_taken))
    for address in addresses:
        hidden = hidden | _secrets_of(address) | {address: redact(address)}
    found = [value for value in hidden if len(value) >= _LEAST or value.endswith("@")]
    if found:
        longest_first = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        text = re.sub(longest_first, lambda match: hidden[match[0]], text)
    pattern = _ADDRESS if _IS_ADDRESS.match(text) else _CREDENTIALS
    return _PART.sub(rf"\1{HIDDEN}", pattern.sub(f"{HIDDEN}@", text))


def redacted(key: str, value: Any) -> Any:
    """The value of a setting as it may be shown; of a mapping or a list, each of its values."""
    if isinstance(value, Mapping):
        return {name: redacted(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(key, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if _SETTING.search(key) and value and not value.startswith("${") else redact(value)


def redacted_setting(text: str) -> str:
    """An override, key=value, or any other word of a command line, as it may be shown."""
    key, equals, value = text.partition("=")
    return f"{key}={redacted(key, value)}" if equals and "://" not in key else redact(text)


def without_credentials(address: str) -> str:
    """An address without user and password."""
    return _ADDRESS.sub("", address)


def has_password(address: str) -> bool:
    """Whether an address has a password or a token in it; a user alone is none."""
    found = _ADDRESS.search(address)
    return bool(_PART.search(address)) or (found is not None and ":" in found[0])


@contextmanager
def redacted_output() -> Iterator[None]:
    """Hide secrets in all that is printed meanwhile, in the traceback of an unexpected error too."""
    if isinstance(sys.stdout, _Redacting):
        yield
        return
    out, err = (cast("TextIO", _Redacting(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        except Exception:
            traceback.print_exc()
            sys.exit(1)


class _Redacting:
    """A text stream that hides secrets in what is written to it, and shows control characters as escapes."""

    def __init__(self, stream: TextIO, shown: Callable[[str], str] = printable) -> None:
        self._stream = stream
        self._shown = shown

    @property
    def rich_proxied_file(self) -> _Redacting:
        """What Rich writes to: its control characters are meant; `kvlab.lab.terminal` escapes those of others."""
        return _Redacting(self._stream, str)

    def write(self, text: str) -> int:
        start = "\r" * text.startswith("\r")  # of a progress bar
        self._stream.write(start + self._shown(redact(text[len(start) :])) if text.strip() else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@lru_cache(maxsize=1)  # every line that is printed asks
def _values_of_environment(_as_it_is: tuple[tuple[bytes, bytes], ...], taken: frozenset[str]) -> dict[str, str]:
    """Values of the environment that must not be shown, and what is shown instead. `_as_it_is`: all of it, by which
    this is kept, in bytes, since decoding them takes longer than the rest of `redact`.
    """
    hidden: dict[str, str] = {}
    public = f"{os.path.expanduser('~')}\n{os.environ.get('PWD', '')}"  # paths show HOME and USER anyway
    for name, value in os.environ.items():
        if "://" in value:
            hidden |= _secrets_of(value)
        if name in taken and value not in public:
            hidden[value] = f"${{oc.env:{name}}}"
        elif _VARIABLE.search(name):
            hidden |= dict.fromkeys([value, *value.splitlines()], HIDDEN)
    return hidden


def _secrets_of(address: str) -> dict[str, str]:
    """The password in an address, or the user where that is a token, as errors may quote it: whole, in the parts
    between which it has an `@`, with and without escapes; and the secrets of its query.
    """
    found = [match[2] for match in _PART.finditer(address)]
    credentials = _ADDRESS.search(address)
    if credentials is not None:
        user, colon, password = credentials[0][:-1].partition(":")
        if not colon and address.startswith("http"):
            found.append(user)
        elif password != user:  # as in mlflow:mlflow@localhost, which is none, and would hide ordinary words
            found += [password, *password.split("@")]
    forms = [form for text in found for form in (text, unquote(text), quote(text, safe=""))]
    return dict.fromkeys(forms, HIDDEN) | {f"{form}@": f"{HIDDEN}@" for form in forms if form}
