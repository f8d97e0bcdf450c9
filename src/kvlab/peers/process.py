"""An engine in a process of its own, which a run starts and ends."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kvlab.config import RunConfig, format_bytes
from kvlab.core import FinishReason, Request, SamplingParams
from kvlab.core.request import PICKING
from kvlab.engine.protocol import EngineReport, EngineSeries
from kvlab.errors import PeerError, RequestRefusedError, shown
from kvlab.kernels.openmp import without_brief_waiting
from kvlab.peers.engines.base import Assignment, EngineKind
from kvlab.peers.install import environment
from kvlab.peers.process_settings import Program, check_settings, interpreter, worker_settings
from kvlab.peers.remote import Exchange, RemoteEngine

_PROGRAMS = Path(__file__).parent / "programs"
_LOG = "engine.log"  # in the run's directory: what the process prints
_SHAPES = "shapes"  # beside the engines' environments: configurations of architectures that have no checkpoint
_LONGEST_LINE = 2**26  # bytes of a message: a hundred for each token of a step
_LAST_S = 5.0  # for a process that was killed to be gone
_HINTS = {
    signal.SIGILL: ", an instruction that the processor or the system refuses",
    signal.SIGKILL: ", as the system does when memory runs out",
}


class ProcessEngine(RemoteEngine):
    """Lines of JSON over the process's standard input and output; programs/host.py is the other end."""

    def __init__(self, program: Program, assignment: Assignment, written: Path | None = None) -> None:
        """`written`: the model's file, where the program reads no checkpoint."""
        config = assignment.config
        super().__init__(is_open=config.workload.concurrency is None)
        self._program, self._settings, self._model = program, config.engine, assignment.model
        self._log = assignment.directory / _LOG
        self._python = interpreter(config.engine.python, program)
        self._heard = self.clock.now()
        self._times: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = self.clock.loop.create_future()
        self._process: asyncio.subprocess.Process | None = None
        try:
            settings = worker_settings(assignment, written) | {"folder": str(environment(_SHAPES))}
            self.clock.run(self._begin(settings), assignment.should_stop)
            self._told = self._ready.result()
            self._check_version()
        except BaseException:
            self.close()
            raise

    def report(self) -> EngineReport:
        report, told = super().report(), self._told
        metrics = {**report.metrics, **told["metrics"]}
        slots = told.get("kv_slots")
        facts = {"version": told["version"], **told["facts"]}
        if slots is not None:
            size = slots * self._bytes_per_token
            metrics |= {"capacity/token_slots": slots, "capacity/kv_bytes": size}
            facts["KV cache"] = f"{format_bytes(size)}, {slots} tokens"
        facts["python"] = self._python
        known = {"scheduled_s", "queue_ms"} if self._program.counts else set()
        return replace(report, facts=facts, metrics=metrics, unreported=report.unreported - known)

    def step(self) -> None:
        """See RemoteEngine. Raises PeerError for a process that has said nothing for too long, too."""
        super().step()
        if self._open and self.clock.now() - max(self._heard, 0.0) > self._settings.timeout_s:
            raise self._error(f"said nothing for engine.timeout_s={self._settings.timeout_s:g} seconds")

    def _series(self) -> EngineSeries:
        columns = {name: values for name, values in self._columns.items() if len(values) == len(self._times)}
        return EngineSeries([self.clock.at(when) for when in self._times], columns)

    def _check(self, request: Request) -> None:
        plain, asked = SamplingParams(request.sampling.max_tokens), request.sampling
        fields = ("n", "stop", "logit_bias", "logprobs", "min_tokens") + (
            tuple(name for name in PICKING if name != "seed") if self._program.greedy_only else ()
        )
        for name in fields:
            if getattr(asked, name) != getattr(plain, name):
                text = f"request {request.request_id}: engine={self._program.name} does not support {name}"
                raise RequestRefusedError(text, name)

    def _send(self, exchange: Exchange) -> None:
        request, sampling = exchange.request, exchange.request.sampling
        asked = {name: getattr(sampling, name) for name in PICKING if getattr(sampling, name) is not None}
        job = {
            "id": request.request_id,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.expected_tokens,
            "eos": [*({*self._model.eos_token_ids} - {*sampling.stop_token_ids}), *sampling.stop_token_ids],
            "ignore_eos": sampling.ignore_eos and not sampling.stop_token_ids,
            "sampling": asked,
        }
        self._write(["submit", job])
        self._was_sent(request, self.clock.now())
        self._heard = self.clock.now()

    def _cancel(self, exchange: Exchange) -> None:
        self._write(["abort", self._id(exchange)])

    async def _shut(self) -> None:
        """Kill the process and those that it has started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _LAST_S)

    async def _begin(self, settings: dict[str, Any]) -> None:
        """Start the process, hand over the settings, and wait until the engine is ready. Raises PeerError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [self._python, str(_PROGRAMS / "host.py"), str(_PROGRAMS / self._program.file)]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    self._program.kind,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    limit=_LONGEST_LINE,
                    env=without_brief_waiting(os.environ | offline),
                    start_new_session=True,  # Ctrl-C is for the run, which then ends the engine
                )
        except OSError as error:
            text = os.strerror(error.errno or 0)
            raise PeerError(f"engine={self._program.name}: {self._python}: {text}") from error
        self._reading = asyncio.create_task(self._read(self._process))
        self._write(settings)
        self._bytes_per_token = settings["kv_bytes_per_token"]
        try:
            await asyncio.wait_for(self._ready, self._settings.start_timeout_s)
        except TimeoutError as error:
            text = f"was not ready within engine.start_timeout_s={self._settings.start_timeout_s:g} seconds"
            raise self._error(text) from error

    def _write(self, message: object) -> None:
        if self._failure is None and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Take the process's lines, to its end or to one that is no message."""
        text = ""
        try:
            while not text and (line := await process.stdout.readline() if process.stdout else b"").endswith(b"\n"):
                self._heard = self.clock.now()
                try:
                    self._take(json.loads(line))
                except Exception:  # of any kind: a line may hold anything
                    text = f"wrote what is no message: {shown(line[:-1].decode(errors='replace'))}"
        except ValueError:
            text = f"wrote a line of more than {_LONGEST_LINE} bytes"
        self._lost(self._error(text or f"ended ({await _ending(process)}){self._last_words()}"))

    def _take(self, message: list[Any]) -> None:
        if message and message[0] == "ready":
            if not self._ready.done():
                self._ready.set_result(message[1])
        elif message and message[0] == "error":
            self._lost(self._explained(str(message[1]), message[2]))
        else:
            for event in message:
                self._event(event)

    def _event(self, event: list[Any]) -> None:
        if event[0] == "stats":
            self._times.append(event[1])
            for name, value in event[2].items():
                self._columns.setdefault(name, []).append(float(value))
            return
        exchange = self._open.get(event[1])
        if exchange is None:  # the warm-up's, or one that was aborted
            return
        when = self.clock.at(event[3])
        if event[0] == "tokens":
            self._add(exchange, 0, event[2], when)
            return
        told: Mapping[str, Any] = event[4]
        error = told.get("error")
        reason = FinishReason.FAILED if error else FinishReason(event[2]) if event[2] != "abort" else None
        exchange.samples[0].end(reason or FinishReason.ABORTED, when, error)
        exchange.cached_tokens = told.get("cached")
        if told.get("scheduled"):
            exchange.scheduled_s = self.clock.at(told["scheduled"])
        self._finish(exchange)

    def _lost(self, error: PeerError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            self._break(error)

    def _explained(self, text: str, missing: str | None) -> PeerError:
        """Why the program could not start or go on."""
        program = self._program
        if missing is not None and missing.partition(".")[0] == program.package:
            return PeerError(
                f"engine={program.name}: {self._python} has no {program.package}; give the interpreter of an "
                f"environment that has it as engine.python (kvlab peers install {program.name} makes one)"
            )
        return self._error(f"failed: {shown(text, most=400)} (its log: {self._log})")

    def _check_version(self) -> None:
        wanted, version = self._settings.version, self._told["version"]
        if wanted is not None and wanted != version:
            text = f"is version {version} in {self._python}, and engine.version={wanted} asks for another"
            raise self._error(text)

    def _error(self, text: str) -> PeerError:
        return PeerError(f"engine={self._program.name}: the engine {text}")

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return f"; its log ends: {shown(lines[-1])} ({self._log})" if lines else ""
        return ""


class ProcessKind(EngineKind):
    """A kind of engines that run as a `program` in a process of their own."""

    program: ClassVar[Program]

    @classmethod
    def check(cls, config: RunConfig) -> None:
        check_settings(config, cls.program)

    @classmethod
    def start(cls, assignment: Assignment) -> ProcessEngine:
        return ProcessEngine(cls.program, assignment)


async def _ending(process: asyncio.subprocess.Process) -> str:
    """How a process ended."""
    try:
        code = await asyncio.wait_for(process.wait(), _LAST_S)
    except TimeoutError:
        return "it closed its output"
    return f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        meant = signal.Signals(number)
        return meant.name + _HINTS.get(meant, "")
    return f"signal {number}"  # a real-time one has no name
