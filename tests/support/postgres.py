"""A PostgreSQL of the test's own, on a port of loopback and a folder that is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSWORD = "made-for-a-test"


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server; its user is `kvlab`."""

    port: int
    bin: Path
    sockets: Path

    def create(self, database: str) -> str:
        """Make an empty database; return its URI."""
        command: list[Any] = [
            self.bin / "createdb",
            "-h",
            self.sockets,
            "-p",
            str(self.port),
            "-U",
            "kvlab",
            database,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return f"postgresql://kvlab:{PASSWORD}@127.0.0.1:{self.port}/{database}"


def binaries() -> Path | None:
    """Where PostgreSQL's programs are; distributions keep them out of PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True
    )
    wanted = ("initdb", "postgres", "createdb")
    return next((folder for folder in folders if all((folder / name).exists() for name in wanted)), None)


def free_port() -> int:
    """One that nobody listens at, and that the system gives no other socket meanwhile: those are above 32768."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def postgres(bin_: Path) -> Iterator[Postgres]:
    """Start a server that forgets everything. It refuses to be root, so where the tests are, it is someone else."""
    base = Path(tempfile.mkdtemp(prefix="kvlab-pg-"))  # pytest's own folders are closed to other users
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = _unprivileged()
        os.chown(base, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    port, data = free_port(), base / "data"
    password = base / "password"
    password.write_text(PASSWORD)
    password.chmod(0o644)
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(base)}
    init: list[Any] = [bin_ / "initdb", "-D", data, "-U", "kvlab", "--pwfile", password, "--no-sync", "-E", "UTF8"]
    init += ["--auth-local=trust", "--auth-host=scram-sha-256"]
    serve: list[Any] = [
        bin_ / "postgres",
        "-D",
        data,
        "-p",
        str(port),
        "-k",
        base,
        "-c",
        "listen_addresses=127.0.0.1",
    ]
    serve += ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "shared_buffers=16MB"]
    try:
        subprocess.run(init, check=True, capture_output=True, timeout=300, cwd=base, env=environment, **who)
        with (base / "log").open("wb") as log:
            server = subprocess.Popen(serve, stdout=log, stderr=log, cwd=base, env=environment, **who)
        try:
            _wait(server, port, base / "log")
            yield Postgres(port, bin_, base)
        finally:
            server.send_signal(signal.SIGINT)  # SIGTERM would wait until the last client has left
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("no user but root")


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}")
