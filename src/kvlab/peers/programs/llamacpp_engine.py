"""llama.cpp as an engine: continuous batching over its batched decode, as llama-server does it. Run by host.py.

Every step is one `llama_decode`: the next token of each sequence that generates, then parts of prompts up to
`n_batch` tokens. What llama-server adds, HTTP and its samplers, is left out: the largest logit is taken.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]
Event = list[Any]

_PAD = 256  # llama.cpp's caches hold whole multiples of it
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # enum ggml_type
# Its flash attention rounds K and V to float16 where the cache holds float32.
_AUTO, _NONE = -1, 0


class Row(NamedTuple):
    """A token of a batch."""

    token: int
    position: int
    slot: int  # its sequence
    is_sampled: bool  # whether the token behind it is wanted


def context_options(settings: Json) -> Json:
    """Fields of llama_context_params. The cells of the cache are those that kvlab's pool would have, shared by all
    sequences (`kv_unified`), or divided among as many of the longest length as there is room for.

    Raises TypeError and ValueError.
    """
    slots = settings["kv_bytes"] // settings["kv_bytes_per_token"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = settings["threads"] or cores
    options = {name: value for name, value in settings["options"].items() if name != "weights"}
    given = {
        "n_ctx": -(-slots // _PAD) * _PAD,
        "n_seq_max": settings["max_batch_size"],
        "n_batch": settings["max_batched_tokens"],
        "n_ubatch": min(512, settings["max_batched_tokens"]),
        "n_threads": threads,
        "n_threads_batch": threads,
        "type_k": _TYPES[settings["dtype"]],
        "type_v": _TYPES[settings["dtype"]],
        "kv_unified": True,
        "flash_attn_type": _NONE if settings["dtype"] == "float32" else _AUTO,
    } | options
    if not given["kv_unified"]:
        each = -(-settings["max_seq_len"] // _PAD) * _PAD
        if slots < each:
            raise ValueError(f"kv.memory holds {slots} tokens, and a sequence of its own takes {each}")
        given["n_seq_max"] = min(given["n_seq_max"], slots // each)
        given["n_ctx"] = given["n_seq_max"] * each
    return given


class Batcher:
    """Requests, and the batches that serve them. One is admitted when a slot and the cells for its whole length are
    free: llama.cpp takes no sequence back. `decode` computes a batch and gives the tokens behind its sampled rows.
    """

    def __init__(self, cells: int, slots: int, most: int, decode: Callable[[Sequence[Row]], list[int]]) -> None:
        self.cells, self.most, self.decode = cells, most, decode
        self.used = 0
        self.free = list(range(slots))[::-1]
        self.waiting: deque[Json] = deque()
        self.running: list[Json] = []

    def submit(self, job: Json) -> None:
        """Queue a request."""
        self.waiting.append(job)

    def drop(self, name: str) -> int | None:
        """Forget a request; the slot it had, if it ran."""
        self.waiting = deque(job for job in self.waiting if job["id"] != name)
        for job in self.running:
            if job["id"] == name:
                self.running.remove(job)
                self.used -= length(job)
                self.free.append(job["slot"])
                return int(job["slot"])
        return None

    def step(self) -> list[Event]:
        """Admit what has room, in order, compute a batch, and tell of its tokens."""
        while self.waiting and self.free and self.used + length(self.waiting[0]) <= self.cells:
            job = self.waiting.popleft()
            self.used += length(job)
            job |= {"slot": self.free.pop(), "done": 0, "tokens": [], "since": time.perf_counter()}
            self.running.append(job)
        if not self.running:
            job, text = self.waiting.popleft(), f"kv.memory holds {self.cells} tokens, fewer than the request needs"
            return [["end", job["id"], "failed", time.perf_counter(), {"error": text}]]
        rows: list[Row] = []
        sampled: list[Json] = []
        for job in sorted(self.running, key=lambda job: not job["tokens"]):  # those that generate first
            ahead = (job["prompt"] + job["tokens"])[job["done"] :][: self.most - len(rows)]
            last = len(job["prompt"]) + len(job["tokens"]) - 1
            for position, token in enumerate(ahead, start=job["done"]):
                rows.append(Row(token, position, job["slot"], position == last))
            job["done"] += len(ahead)
            if ahead and job["done"] > last:
                sampled.append(job)
        found = self.decode(rows)
        now, events = time.perf_counter(), list[Event]()
        for job, token in zip(sampled, found, strict=True):
            job["tokens"].append(token)
            events.append(["tokens", job["id"], [token], now])
            is_stop = token in job["eos"] and not job["ignore_eos"]
            if is_stop or len(job["tokens"]) == job["max_tokens"]:
                told = {"cached": 0, "scheduled": job["since"]}
                events.append(["end", job["id"], "stop" if is_stop else "length", now, told])
        return events


def length(job: Json) -> int:
    """Cells of a request at its end; the last token is never put into the cache."""
    return len(job["prompt"]) + int(job["max_tokens"]) - 1


class LlamaCpp:
    """llama.cpp, on a processor."""

    def __init__(self, settings: Json) -> None:
        import llama_cpp
        import numpy

        self.api, self.numpy = llama_cpp, numpy
        began, options = time.perf_counter(), context_options(settings)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            settings["model"]["file"].encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError("llama.cpp cannot load the model")
        parameters = llama_cpp.llama_context_default_params()
        for name, value in options.items():
            if not hasattr(parameters, name):
                raise TypeError(f"llama_context_params has no {name}")
            setattr(parameters, name, value)
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(options["n_batch"], 0, 1)
        slots = min(options["n_ctx"], settings["kv_bytes"] // settings["kv_bytes_per_token"])
        self.batcher = Batcher(slots, options["n_seq_max"], options["n_batch"], self.decode)
        facts = {"weights": settings["options"].get("weights", settings["dtype"])}
        facts |= {name: str(value) for name, value in options.items()}
        facts["system"] = llama_cpp.llama_print_system_info().decode()
        version = llama_cpp.__version__
        self.ready = {"version": version, "facts": facts, "kv_slots": slots}
        self.submit({"id": "", "prompt": [1, 2, 3], "max_tokens": 4, "eos": [], "ignore_eos": True})
        while self.busy():
            self.step()
        self.ready["metrics"] = {"engine/load_s": time.perf_counter() - began}

    def submit(self, job: Json) -> None:
        """Queue a request of token ids."""
        self.batcher.submit(job)

    def abort(self, name: str) -> None:
        """Forget a request, and what the cache has of it."""
        slot = self.batcher.drop(name)
        if slot is not None:
            self.api.llama_memory_seq_rm(self.memory, slot, -1, -1)

    def busy(self) -> bool:
        """Whether a request is not done."""
        return bool(self.batcher.waiting or self.batcher.running)

    def step(self) -> list[Event]:
        """One batch."""
        events = self.batcher.step()
        for event in events:
            if event[0] == "end":
                self.abort(event[1])
        return events

    def stats(self) -> Json:
        """What runs, and the cells that are reserved for it."""
        batcher = self.batcher
        usage = batcher.used / batcher.cells
        return {"running": len(batcher.running), "waiting": len(batcher.waiting), "kv_usage": usage}

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """The tokens of the largest logits. Raises RuntimeError."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = row.token, row.position, row.is_sampled
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row.slot
        if (code := self.api.llama_decode(self.context, batch)) != 0:
            raise RuntimeError(f"llama_decode failed with {code}")
        if not (wanted := sum(row.is_sampled for row in rows)):
            return []
        logits = self.api.llama_get_logits(self.context)
        found = self.numpy.ctypeslib.as_array(logits, (wanted, self.vocabulary)).argmax(axis=1)
        return [int(token) for token in found]
