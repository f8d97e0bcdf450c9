"""The process of an engine: reads requests from its standard input and writes what comes of them to its output.

    python host.py PROGRAM.py CLASS

Lines of JSON. In: first the settings, then `["submit", {...}]` and `["abort", id]`. Out: `["ready", {...}]` or
`["error", text, missing module]`, then lists of events: `["tokens", id, [token ids], seconds]`,
`["end", id, reason, seconds, {...}]` and `["stats", seconds, {...}]`; seconds are those of time.perf_counter, which
all processes of a machine share on Linux. The end of the input ends the process and those that it has started,
whatever they do.
"""

import ctypes
import importlib.util
import io
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, Protocol, TextIO

Event = list[Any]
Json = dict[str, Any]

_STATS_S = 0.25


class Program(Protocol):
    """An engine in this process. `ready` is what it is: facts, metrics, the bytes of its cache."""

    ready: Json

    def submit(self, job: Json) -> None:
        """Take a request: id, prompt, max_tokens, eos (tokens that end it), sampling."""

    def abort(self, name: str) -> None:
        """Forget a request."""

    def busy(self) -> bool:
        """Whether `step` has something to do."""

    def step(self) -> list[Event]:
        """Do some work; what came of it."""

    def stats(self) -> Json:
        """What there is to say of the engine now, as columns of a series."""


def read(inbox: queue.SimpleQueue[Any]) -> None:
    """Hand on the lines of the input; at its end, end every process of this group."""
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until the input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: where this process hangs in native code
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # at once: this process may be killed
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read, args=(inbox,), daemon=True).start()
    try:
        program = load(sys.argv[1], sys.argv[2], inbox.get())
    except BaseException as error:
        traceback.print_exc()
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        lines = str(error).strip().splitlines() or [""]
        send(out, ["error", f"{type(error).__name__}: {lines[0]}", missing])
        os._exit(1)
    send(out, ["ready", program.ready])
    try:
        serve(program, inbox, out)
    except BaseException as error:
        traceback.print_exc()
        send(out, ["error", f"{type(error).__name__}: {error}", None])
        os._exit(1)


def load(file: str, kind: str, settings: Json) -> Program:
    """A file's program, made of the settings."""
    spec = importlib.util.spec_from_file_location("program", file)
    if spec is None or spec.loader is None:
        raise ImportError(file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program: Program = getattr(module, kind)(settings)
    return program


def serve(program: Program, inbox: queue.SimpleQueue[Any], out: TextIO) -> None:
    """Take what comes, step while there is work."""
    due = 0.0
    while True:
        while not program.busy() or not inbox.empty():
            take(program, inbox.get())
        events = program.step()
        now = time.perf_counter()
        if now >= due or not program.busy():
            events.append(["stats", now, program.stats()])
            due = now + _STATS_S
        if events:
            send(out, events)


def take(program: Program, message: list[Any]) -> None:
    """Do what a message asks."""
    kind, argument = message
    if kind == "submit":
        program.submit(argument)
    else:
        program.abort(argument)


def send(out: TextIO, message: list[Any]) -> None:
    """Write a line."""
    out.write(json.dumps(message, separators=(",", ":")) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
