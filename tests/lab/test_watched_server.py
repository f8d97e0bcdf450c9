"""A watched server that begins again: what it had is gone, and what it stores then is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="pip install 'kvlab[events]'")
pytest.importorskip("zmq", reason="pip install 'kvlab[events]'")

import msgspec
import zmq

from kvlab.lab.terminal import Terminal
from kvlab.lab.watch.view import ServerPool, show
from kvlab.peers.kv_events import EventListener


def batch(when: float, *names: int) -> list[Any]:
    stored = {"type": "BlockStored", "parent_block_hash": None, "block_size": 4, "token_ids": [1] * 4 * len(names)}
    return [when, [stored | {"block_hashes": list(names)}]]


def test_a_server_that_begins_again_has_what_it_stored_since(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ServerPool()
    for number in range(3):
        pool.take(number, batch(10.0 + number, number, number + 100))
    pool.take(1, batch(11.0, 1, 101))  # sent again: it is no new batch
    assert (pool.batches, pool.restarts, len(pool.now)) == (3, 0, 6)
    pool.take(0, batch(20.0, 2))
    pool.take(1, batch(21.0, 3))
    assert (pool.batches, pool.restarts, pool.missed, pool.removed) == (5, 1, 0, 0)
    assert pool.now.keys() == {2, 3}
    assert not pool.again_s  # what it computed again it had lost, not evicted
    pool.take(4, batch(22.0, 4))
    assert (pool.gaps, pool.missed) == (1, 2)
    removed = {"type": "BlockRemoved", "block_hashes": [4]}
    pool.take(5, [23.0, [removed]])
    pool.take(1, batch(30.0, 4))  # of which the first was not heard
    assert (pool.restarts, pool.gaps, pool.missed, pool.again_s) == (2, 2, 3, [])
    show(pool, None, Terminal(width=200))
    assert "the server began again 2 times: what it had then is gone, and is not counted as evicted" in (
        capsys.readouterr().out
    )


def test_what_was_sent_before_anybody_watched_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for first, is_said in ((0, False), (338, True)):
        pool = ServerPool()
        pool.take(first, batch(10.0, 1))
        show(pool, None, Terminal(width=200))
        said = "338 batches were sent before: what is there from then is not known" in capsys.readouterr().out
        assert (said, pool.missed) == (is_said, 0)


class Server:
    """Publishes batches of events at an address."""

    def __init__(self, context: zmq.Context[Any], address: str = "tcp://127.0.0.1:0") -> None:
        self.socket = context.socket(zmq.XPUB)
        for _ in range(500):  # until another one has let the address go
            with suppress(zmq.ZMQError):
                self.socket.bind(address)
                break
            time.sleep(0.01)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, listener: EventListener, number: int, *names: int) -> None:
        """Once somebody listens, who has to hear for that."""
        for _ in range(500):
            if self.socket.poll(0):
                break
            listener.hear(0.01)
        self.socket.send_multipart(
            [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch(10.0 + number, *names))]
        )
        listener.hear(5)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    made.linger = 0
    yield made
    made.destroy()


@pytest.mark.parametrize(("number", "restarts", "now"), [(5, 1, {7}), (1, 0, {1, 2, 7})])
def test_one_whose_first_batches_were_not_heard_is_known_by_its_connection(
    number: int, restarts: int, now: set[int], context: zmq.Context[Any]
) -> None:
    """Its numbers do not go back, and do not go on either. Where they do, the connection alone was lost."""
    pool, server = ServerPool(), Server(context)
    listener = EventListener(pool, server.address)
    server.send(listener, 0, 1, 2)
    server.socket.close()
    Server(context, server.address).send(listener, number, 7)
    listener.close()
    assert (pool.batches, pool.restarts, set(pool.now)) == (2, restarts, now)
