"""Tracking servers: one that serves, and what each way of not answering costs."""

import contextlib
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvlab.errors import TrackingError
from kvlab.lab.tracking import MlflowTracker, RunStatus, access
from tests.support.tracking import start

SLACK_S = 6.0  # a busy machine's share of a deadline


@contextlib.contextmanager
def listening(*, backlog):
    """A port that takes connections and never answers; without `backlog`, one that refuses them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if backlog:
            taken.listen(backlog)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def fails_in_time(tmp_path, uri, match, timeout_s=10.0):
    """Where there is something to be told, at once; else when the time is over."""
    access.import_client(1.0)  # which takes seconds, once
    began = time.monotonic()
    with pytest.raises(TrackingError, match=match) as raised:
        start(tmp_path, uri=uri, timeout_s=timeout_s)
    assert time.monotonic() - began < 1.0 + SLACK_S
    return str(raised.value)


def test_a_server_that_refuses(tmp_path):
    with listening(backlog=0) as uri:
        assert f"tracking.uri={uri}: " in fails_in_time(tmp_path, uri, "Connection refused")


def test_a_server_that_never_answers(tmp_path):
    with listening(backlog=5) as uri:
        fails_in_time(tmp_path, uri, r"no answer within 1 s \(tracking\.timeout_s\)", timeout_s=1.0)


def test_a_host_that_cannot_be_found(tmp_path, monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message = fails_in_time(tmp_path, "http://user:secret@tracking.invalid", "Name or service not known")
    assert "secret" not in message
    assert "tracking.uri=http://***@tracking.invalid: " in message


def test_a_name_server_that_never_answers(tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(30))
    try:
        fails_in_time(tmp_path, "http://tracking.invalid", "no answer within 1 s", timeout_s=1.0)
    finally:
        over.set()


class Server(ThreadingHTTPServer):
    """As much of a tracking server as a run asks for; `faults` say how it misbehaves (a number: this status)."""

    daemon_threads = True

    def __init__(self, *faults: str | int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = set(faults)
        self.over = threading.Event()
        self.batches: list[dict[str, Any]] = []
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any = None) -> None:
        path = self.path.partition("?")[0]
        server: Any = self.server
        if "hang" in server.faults and path != "/health":
            server.over.wait(30)
        status = 200
        reply: Any = {}
        refused = server.faults & {401, 403}
        if refused:
            status, reply = refused.pop(), "refused"
        elif "not mlflow" in server.faults or (path == "/health" and "no health" in server.faults):
            status, reply = 404, "no such page"
        elif path.endswith("experiments/get-by-name"):
            if "race" in server.faults:
                status, reply = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
            else:
                reply = {"experiment": {"experiment_id": "7", "name": "kvlab", "lifecycle_stage": "active"}}
        elif path.endswith("experiments/create"):
            server.faults.discard("race")
            status, reply = 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "exists"}
        elif path.endswith("runs/create"):
            info = {"run_id": "abc", "run_uuid": "abc", "experiment_id": "7", "status": "RUNNING"}
            reply = {"run": {"info": info | {"start_time": body["start_time"]}, "data": {}}}
        elif path.endswith("runs/log-batch"):
            server.batches.append(body)
        text = json.dumps(reply).encode()
        with contextlib.suppress(OSError):  # the client may have gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)


@pytest.mark.parametrize("fault", ["none", "race", "no health"])
def test_a_server_is_used_and_shown_without_its_password(tmp_path, capfd, fault):
    with Server(fault) as server:
        tracker = start(tmp_path, uri=server.uri.replace("://", "://user:secret@") + "/", params={"a": 1})
        assert isinstance(tracker, MlflowTracker)
        assert tracker.where() == f"{server.uri}/#/experiments/7/runs/abc?workflowType=machine_learning"
        tracker.log_metrics({"x": 2.0})
        tracker.finish(RunStatus.FINISHED)
    kinds = ["params", "metrics", "tags"]
    assert [list(batch) for batch in server.batches] == [["run_id", kind] for kind in kinds]
    assert capfd.readouterr() == ("", "")  # MLflow would print the URL at the end


def test_a_server_that_hangs_once_it_is_asked_for_something(tmp_path):
    with Server("hang") as server:
        fails_in_time(tmp_path, server.uri, "no answer within 1 s", timeout_s=1.0)


def test_a_server_that_hangs_or_dies_in_the_middle_of_a_run(tmp_path, capfd, caplog):
    (tmp_path / "summary.json").touch()
    with Server() as server:
        tracker = start(tmp_path, uri=server.uri, timeout_s=1.0)
        server.faults.add("hang")
        began = time.monotonic()
        with pytest.raises(TrackingError, match="no answer within 1 s"):
            tracker.log_metrics({"x": 1.0})
        assert 1.0 <= time.monotonic() - began < 1.0 + SLACK_S  # a second of its own
        server.stop()
        for call in (
            lambda: tracker.log_metrics({"x": 1.0}),
            lambda: tracker.log_series({"x": [(0, 0.0, 1.0)]}),
            lambda: tracker.log_artifacts(tmp_path),
            lambda: tracker.finish(RunStatus.FINISHED),
        ):
            with pytest.raises(TrackingError, match=re.escape(server.uri)):
                call()
        assert time.monotonic() - began < 2 * (1.0 + SLACK_S)
    assert capfd.readouterr() == ("", "")  # the exception says it all
    assert caplog.text == ""


def test_a_server_that_is_something_else(tmp_path):
    with Server("not mlflow") as server:
        fails_in_time(tmp_path, server.uri, "404 .* tracking=off")


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_asks_for_an_account(tmp_path, status):
    with Server(status) as server:
        message = fails_in_time(tmp_path, server.uri.replace("://", "://user:secret@"), str(status))
        shown = server.uri.replace("://", "://***@")
        assert message.startswith(f"tracking.uri={shown}: ")
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in message
    assert "secret" not in message
