"""`kvlab serve` for the experiments on it: in a process of its own, with every request's record written to a file.

python -m experiments.serving RECORDS.jsonl [settings of kvlab serve]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from kvlab.cli.compose import compose_one
from kvlab.cli.serve import ServeSettings
from kvlab.cli.settings import read_settings
from kvlab.core import RequestRecord
from kvlab.server.app import build_app
from kvlab.server.build import build_serving
from kvlab.server.lifecycle import listen, serve
from kvlab.server.metrics import ServerMetrics

SOURCE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered in full, as the server's engine saw it."""

    arrival_s: float
    ttft_ms: float
    tpot_ms: float | None  # None for one token
    e2el_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Recording(ServerMetrics):
    """Writes such requests down, too."""

    def __init__(self, model: str, path: Path) -> None:
        super().__init__(model)
        self._file = path.open("w", buffering=1)

    def finish(self, record: RequestRecord) -> None:
        super().finish(record)
        if record.completed:
            names = [each.name for each in fields(Served)]
            known = {name: getattr(record, name, None) for name in names}
            self._file.write(json.dumps(known | {"output_tokens": len(record.output_token_ids)}) + "\n")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that runs."""

    url: str
    pid: int
    records: Path

    def served(self, last: int) -> list[Served]:
        """The newest of the requests that were answered in full, in order of arrival."""
        found = [Served(**json.loads(line)) for line in self.records.read_text().splitlines()]
        return sorted(found, key=lambda each: each.arrival_s)[-last:]


@contextmanager
def server_process(folder: Path, settings: list[str]) -> Iterator[ServerProcess]:
    """A server with these settings on a port that is free; it has drained when the block is left.

    RuntimeError if it does not come up, with what it said.
    """
    records, log = folder / "served.jsonl", folder / "server.log"
    command = [sys.executable, "-m", "experiments.serving", str(records), "server.port=0", *settings]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=SOURCE, stdout=output, stderr=subprocess.STDOUT)
    try:
        while " at http" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2_000:]}")
            time.sleep(0.05)
        yield ServerProcess(log.read_text().split(" at ")[1].strip(), process.pid, records)
        process.terminate()
        if process.wait(60):
            raise RuntimeError(f"the server ended with status {process.returncode}: {log.read_text()[-2_000:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> None:
    path, *arguments = sys.argv[1:]
    settings, overrides = read_settings(ServeSettings, arguments)
    config = compose_one(overrides, "a server")
    listening = listen(settings.server)
    serving = build_serving(config, settings.server, Recording(config.model.name, Path(path)))
    listening.listen()
    print(f"{config.model.name} at http://{settings.server.host}:{listening.getsockname()[1]}", flush=True)
    serve(build_app(serving), serving, listening)


if __name__ == "__main__":
    main()
