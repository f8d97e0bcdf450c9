"""kvlab ui: MLflow's page on the store that runs go to, in the browser at http://127.0.0.1:5000."""

import argparse
import os
import shlex
import socket
import sys
from pathlib import Path

from kvlab.cli.output import lasting_output
from kvlab.cli.settings import fail
from kvlab.config import TrackingConfig
from kvlab.errors import KvlabError
from kvlab.secrets import redact, redacted_output, without_credentials


@lasting_output()
@redacted_output()
def main() -> None:
    """Start the page; for a store that has none to start, say where it is or how to fill it."""
    parser = argparse.ArgumentParser(prog="kvlab ui", description=__doc__)
    parser.add_argument("uri", nargs="?", help="the store; else MLFLOW_TRACKING_URI, else mlflow.db in this folder")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    # Imported this late so that --help answers at once.
    from kvlab.lab.tracking.uri import is_server, is_sqlite, resolve_uri, sqlite_path

    given = options.uri.removeprefix("tracking.uri=") if options.uri else None
    uri = resolve_uri(TrackingConfig(uri=given), Path())
    if is_server(uri):
        print(f"runs go to a tracking server, which has a page of its own: {redact(without_credentials(uri))}")
        return
    if "://" not in uri:
        fail(f"{uri}: is no address of a store; give one as sqlite:///mlflow.db")
    try:
        if is_sqlite(uri) and not sqlite_path(uri).exists():
            fail(f"nothing is tracked in {sqlite_path(uri)} yet: start a run with kvlab run, then come again")
    except (KvlabError, ValueError) as error:
        fail(f"{redact(uri)}: {error}")
    _check_port(options.port)
    # Not on the command line, where everybody on the machine could read a database's password.
    environment = os.environ | {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(options.port)]
    page = f"http://127.0.0.1:{options.port}/#/experiments?workflowType=machine_learning"
    print(f"{redact(uri)}\n{page}\nCtrl-C ends it", flush=True)
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        fail(f"{shlex.join(command)}: {error}")


def _check_port(port: int) -> None:
    """End with a sentence where nothing can listen on a port, of which MLflow would write a log and end well."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "a port is from 0 to 65535"
            other = 5001 + (port == 5001)
            fail(f"--port={port}: cannot be listened on ({reason}); give another one, as --port {other}")
