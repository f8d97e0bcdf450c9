"""kvlab watch of a server with a key."""

from __future__ import annotations

import pytest

from kvlab.cli import watch
from tests.support.commands import call
from tests.support.endpoint import endpoint


@pytest.mark.parametrize(("key", "is_told"), [("null", False), ("sesame", True)])
def test_metrics_are_read_with_the_key_of_the_server(key: str, is_told: bool) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    with endpoint(key="sesame") as server:
        ended = call(watch.main, "events=tcp://127.0.0.1:9", f"url={server.url}", "seconds=0.1", f"api_key={key}")
    assert ("gives no /metrics" not in ended.output) is is_told
