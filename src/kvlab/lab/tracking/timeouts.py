"""Waiting for a server no longer than was agreed."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

from kvlab.lab.settings import without_password


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what `function` returns; TimeoutError after `seconds`, wherever it hangs (resolving a name too)."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)


def probe(uri: str, timeout_s: float) -> None:
    """See that something at `uri` speaks HTTP; raises OSError if not. Any status will do."""
    try:
        urllib.request.urlopen(f"{without_password(uri).rstrip('/')}/health", timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return  # MLflow has settings of its own for certificates
        raise error.reason if isinstance(error.reason, OSError) else error from None
