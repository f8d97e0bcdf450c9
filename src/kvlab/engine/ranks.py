"""Ranks: processes that compute a model together. This one is rank 0, and has ledger, scheduler and sampler.

Rank 0 tells the others each call of the model and each copy of blocks as plain data, then makes the call itself.
Within it they exchange through `torch.distributed`: gloo, or NCCL on GPUs; on CPUs through memory that they share,
all but large tensors that rank 0 gathers. A rank that ends or does not answer ends them all.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from kvlab.config import EngineConfig
from kvlab.confined import end_module, start_module
from kvlab.engine.shared_memory import MOST_BYTES, SharedMemory, is_ordered
from kvlab.errors import CapacityError, EngineStoppedError, KvlabError, shown
from kvlab.kv.sizing import PoolSize
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.decoder import Model
from kvlab.models.ops.base import TopK
from kvlab.models.split import Ranks

LIMIT_S = 120.0  # that a rank waits for the others
_LAST_WORDS_S = 2.0  # for a rank to end, or to say why it does
READY = "ready"

T = TypeVar("T")


class Assignment(NamedTuple):
    """What a rank has to know of the engine that it is a part of."""

    config: EngineConfig
    pool: PoolSize
    rank: int
    meeting: str  # the file through which the ranks find each other
    limit_s: float


class RankGroup(Ranks):
    """The exchange among the ranks of an engine; it begins with `meet`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._memory: SharedMemory | None = None

    def meet(self, meeting: str, device: str, limit_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the others; `meeting` is a file that is not there yet. `check` raises if one has ended."""
        kinds: Any = distributed
        has_memory, shared = device == "cpu" and is_ordered(), f"{meeting}-shared"
        if has_memory and self.rank == 0:
            SharedMemory.make(shared, self.size)
        store = kinds.FileStore(meeting, self.size)
        if device == "cuda":
            options, kind = kinds.ProcessGroupNCCL.Options(), kinds.ProcessGroupNCCL
        else:
            options, kind = kinds.ProcessGroupGloo._Options(), kinds.ProcessGroupGloo
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=limit_s)
        self._group = kind(store, self.rank, self.size, options)
        self._group.barrier().wait()
        if has_memory:
            self._memory = SharedMemory(shared, self.rank, self.size, limit_s, check)
        self._group.barrier().wait()  # before it the others may still read the files

    def add(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._memory is None:
            self._group.allreduce([x]).wait()
            return x
        for piece in torch.split(x.view(-1), MOST_BYTES // x.element_size()):
            torch.sum(self._memory.exchange(piece), dim=0, out=piece)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self._memory is not None and x.nbytes <= MOST_BYTES:
            every = self._memory.exchange(x)
            return list(every.clone()) if self.rank == 0 else [x]
        options = distributed.GatherOptions()
        options.rootRank = 0
        everyone = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([everyone] if everyone else [], [x.contiguous()], options).wait()
        return everyone or [x]


class _Other(NamedTuple):
    """A rank beside rank 0."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ending: weakref.finalize[[subprocess.Popen[bytes], Connection, int], RankProcesses]


class RankProcesses:
    """The processes of an engine's other ranks, and what rank 0 tells them. They end with this object."""

    def __init__(self, config: EngineConfig, pool: PoolSize, device: str) -> None:
        """Start them: they load their parts of the weights while rank 0 loads its own."""
        self.group = RankGroup(0, config.executor.tensor_parallel)
        self._device, self._key = device, f"executor.tensor_parallel={self.group.size}"
        self._folder = tempfile.TemporaryDirectory(prefix="kvlab-ranks-")
        self._meeting = str(Path(self._folder.name, "meeting"))
        self._failure: EngineStoppedError | CapacityError | None = None
        self._others: list[_Other] = []
        for rank in range(1, self.group.size):
            process, connection = start_module("kvlab.engine.rank", str(os.getpid()))
            ending = weakref.finalize(self, end_module, process, connection, os.getpid())
            self._others.append(_Other(process, connection, ending))
            _limit_sending(connection, LIMIT_S)
            self.tell(Assignment(config, pool, rank, self._meeting, LIMIT_S), rank)

    def meet(self) -> None:
        """Wait until all are loaded, and join them. Raises CapacityError or EngineStoppedError."""
        for rank, other in enumerate(self._others, 1):
            try:
                said = other.connection.recv()
            except (EOFError, OSError) as error:
                raise self.lost(error) from error
            if said != READY:
                raise self._stopped(rank, said)
        self.tell(None)
        self.together(lambda: self.group.meet(self._meeting, self._device, LIMIT_S, self._check))
        self._folder.cleanup()

    def tell(self, message: object, only: int | None = None) -> None:
        """Send a message to all other ranks, or to one. Raises EngineStoppedError where one has ended."""
        if self._failure is not None:
            raise self._failure
        for rank, other in enumerate(self._others, 1):
            if only in (None, rank):
                try:
                    other.connection.send(message)
                except OSError as error:
                    raise self.lost(error) from error

    def together(self, compute: Callable[[], T]) -> T:
        """What rank 0 does of what it has told the others. Whatever it raises ends them: they wait for it."""
        try:
            return compute()
        except Exception as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> EngineStoppedError | CapacityError:
        """Why no more can be computed: the rank that ended, or else the error. All ranks are ended."""
        for rank, other in enumerate(self._others, 1):
            with suppress(OSError, EOFError):
                if other.connection.poll(_LAST_WORDS_S) and (said := other.connection.recv()) != READY:
                    return self._stopped(rank, said)
            with suppress(subprocess.TimeoutExpired):
                return self._stopped(rank, ("", _ending(other.process.wait(_LAST_WORDS_S))))
        text = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
        return self._stopped(None, ("", shown(text.splitlines()[0] if text else type(error).__name__)))

    def _check(self) -> None:
        """Raise ConnectionError if a rank has ended."""
        if any(other.process.poll() is not None for other in self._others):
            raise ConnectionError("a rank has ended")

    def close(self) -> None:
        """End the processes."""
        for other in self._others:
            other.ending()

    def _stopped(self, rank: int | None, said: tuple[str, str]) -> EngineStoppedError | CapacityError:
        name, text = said
        who = "the ranks lost each other" if rank is None else f"rank {rank} of {self.group.size} ended"
        kind = CapacityError if name == CapacityError.__name__ else EngineStoppedError
        self._failure = kind(f"{self._key}: {who} ({text}), so that nothing more can be computed; start again")
        self.close()
        return self._failure


class RankedModel(Model):
    """The model on all ranks: `own` is the part of rank 0."""

    def __init__(self, own: Model, processes: RankProcesses) -> None:
        self._own, self._processes = own, processes

    def forward(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        self._tell("forward", token_ids, view, rows)
        return self._processes.together(lambda: self._own.forward(token_ids, view, rows))

    def forward_top1(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> TopK:
        self._tell("forward_top1", token_ids, view, rows)
        return self._processes.together(lambda: self._own.forward_top1(token_ids, view, rows))

    def hidden(self, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> torch.Tensor:
        self._tell("hidden", token_ids, view, rows)
        return self._processes.together(lambda: self._own.hidden(token_ids, view, rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._processes.tell(("logits", hidden.float().cpu().numpy()))
        return self._processes.together(lambda: self._own.logits(hidden))

    def _tell(self, call: str, token_ids: torch.Tensor, view: CacheView, rows: torch.Tensor) -> None:
        self._processes.tell((call, token_ids.cpu().numpy(), view.plain(), rows.cpu().numpy()))


class RankedStorage(KVStorage):
    """Rank 0's part of the cache, with the blocks of all ranks: a copy of blocks is made on each."""

    def __init__(self, processes: RankProcesses, *size: Any) -> None:
        super().__init__(*size)
        self._processes = processes

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of all ranks."""
        return self._processes.group.size * super().num_bytes

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        self._processes.tell(("copy_blocks", source, target))
        super().copy_blocks(source, target)


def _limit_sending(connection: Connection, seconds: float) -> None:
    """Let a message that nobody takes be an error after so long."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        whole = int(seconds)
        end.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int(1e6 * (seconds - whole)))
        )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{memory}"
    return f"killed by signal {-code}"
