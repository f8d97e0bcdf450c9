"""Programs for kvlab.peers.programs.host: an engine that answers 0, 1, 2, ..., and some that do not work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any


class Counting:
    def __init__(self, settings: dict[str, Any]) -> None:
        unknown = {*settings["options"]} - {"then", "signal"}
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown.pop()!r}")
        self.settings = settings
        self.then = settings["options"].get("then", "")
        self.jobs: list[dict[str, Any]] = []
        self.served = 0
        facts = {"served in": "a scripted program", "waits": os.environ.get("GOMP_SPINCOUNT", "as it likes")}
        self.ready = {"version": "1.0", "facts": facts, "metrics": {"engine/load_s": 0.5}, "kv_slots": 64}

    def submit(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)

    def abort(self, name: str) -> None:
        self.jobs = [job for job in self.jobs if job["id"] != name]

    def busy(self) -> bool:
        return bool(self.jobs)

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.jobs), "prefix_queries": 10 * self.served, "prefix_hits": 4 * self.served}

    def step(self) -> list[list[Any]]:
        if self.served and self.then == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os.kill(os.getpid(), self.settings["options"].get("signal", signal.SIGSEGV))
        if self.served and self.then == "hang":
            time.sleep(60)
        if self.served and self.then == "raise":
            raise RuntimeError("out of something")
        if self.served and self.then == "wait":  # until the others are aborted
            time.sleep(0.01)
            return []
        job = self.jobs.pop(0)
        self.served += 1
        if self.then == "babble":
            return [["end", job["id"], "length", time.perf_counter(), "no table"]]
        began = time.perf_counter()
        events = [["tokens", job["id"], [token], time.perf_counter()] for token in range(job["max_tokens"])]
        told = {"cached": 2, "scheduled": began}
        return [*events, ["end", job["id"], "length", time.perf_counter(), told]]


def counting(settings: dict[str, Any]) -> Counting:
    print("this is no message")  # libraries print what they like
    return Counting(settings)


def without_its_package(settings: dict[str, Any]) -> Counting:
    raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


def never_ready(settings: dict[str, Any]) -> Counting:
    time.sleep(60)
    return Counting(settings)


def with_a_child(settings: dict[str, Any]) -> Counting:
    """Starts a process that would outlive it, and says which; then it hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    raise RuntimeError(f"{os.getpid()} {child.pid}") if settings["options"].get("says") else never(child.pid)


def never(pid: int) -> RuntimeError:
    print(pid, file=sys.stderr, flush=True)
    time.sleep(60)
    return RuntimeError()
