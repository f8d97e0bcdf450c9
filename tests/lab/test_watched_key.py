"""kvlab watch of a server with a key."""

from __future__ import annotations

import pytest

from kvlab.cli import watch
from tests.support.commands import call
from tests.support.endpoint import endpoint


@pytest.mark.parametrize(("key", "is_told"), [("null", False), ("sesame", True)])
def test_metrics_are_read_with_the_key_of_the_server(key: str, is_told: bool) -> None:
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    with endpoint(key="sesame") as server, zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        events = f"events=tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
        ended = call(watch.main, events, f"url={server.url}", "seconds=0.5", f"api_key={key}")
    assert ended.code == 0
    said = " ".join(ended.output.split())
    assert ("gives no /metrics (401 x; api_key= gives its key)" not in said) is is_told
