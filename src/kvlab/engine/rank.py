"""The process of a rank other than 0: it does what rank 0 tells it, on its part of the model and of the cache."""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvlab.engine.executors.torch import TorchExecution, build_decoder, build_storage
from kvlab.engine.ranks import READY, Assignment, RankGroup
from kvlab.kv.storage import KVStorage
from kvlab.models.decoder import Model

_LOOK_S = 0.5  # how often a rank looks whether rank 0 is there


def _compute(connection: Connection) -> None:
    """Load, then do as told until rank 0 ends."""
    assignment: Assignment = connection.recv()
    config, pool, rank, meeting, limit_s = assignment
    plan, group = TorchExecution.plan(config), RankGroup(rank, config.executor.tensor_parallel)
    torch.set_num_threads(plan.computed_by.threads)
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    model, storage = build_decoder(plan, ranks=group), build_storage(plan, pool)
    connection.send(READY)
    connection.recv()  # all are loaded
    group.meet(meeting, plan.device, limit_s)
    while True:
        name, *arguments = connection.recv()
        _do(name, arguments, model, storage, getattr(torch, config.executor.dtype))


def _do(name: str, arguments: list[Any], model: Model, storage: KVStorage, dtype: torch.dtype) -> None:
    if name == "copy_blocks":
        storage.copy_blocks(*arguments)
    elif name == "logits":
        model.logits(torch.from_numpy(arguments[0]).to(storage.device, dtype))
    else:
        token_ids, view, rows = arguments
        tokens, rows = (torch.from_numpy(values).to(storage.device) for values in (token_ids, rows))
        getattr(model, name)(tokens, view.of(storage), rows)


def _end_with(parent: int) -> None:
    """End this process when the one that started it has: it may be waiting for it then."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def main() -> None:
    """Work, and say why where that ends."""
    descriptor, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            _compute(connection)
        except EOFError:  # rank 0 has ended
            return
        except Exception as error:
            connection.send((type(error).__name__, f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from error


if __name__ == "__main__":
    main()
