"""TensorRT-LLM's Python scheduler without a model, and without TensorRT-LLM's compiled parts, which need CUDA.

`PyCapacityScheduler` and `PyMicroBatchScheduler` are TensorRT-LLM's own, from a checkout of its repository. What
they import is stood in for: the state of a request (`Request`), and the block manager, of which `block_manager.py`
is a reading. So are the executor's two loops (`Executor`, of `py_executor.py`), of which is here what decides. A
trace has the settings and, for each request, its arrival in steps, its prompt and the tokens that it will produce.
A step takes one unit of time.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from experiments.decisions_vs_tensorrt_llm.block_manager import KVCacheManager, PrefixReuseSummary

SCHEDULER = "tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py"


class State(enum.Enum):
    """LlmRequestState; only the order counts."""

    ENCODER_INIT = 1
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class Policy(enum.StrEnum):
    """CapacitySchedulerPolicy."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


def scheduler_of(checkout: Path) -> Any:
    """TensorRT-LLM's module of schedulers, with stand-ins for what it imports."""
    bindings = MagicMock()
    bindings.internal.batch_manager.PrefixReuseSummary = PrefixReuseSummary
    names = {
        "tensorrt_llm": MagicMock(),
        "tensorrt_llm.bindings": bindings,
        "tensorrt_llm.llmapi": MagicMock(),
        "tensorrt_llm.llmapi.llm_args": MagicMock(CapacitySchedulerPolicy=Policy),
        "tensorrt_llm.logger": MagicMock(),
        "tensorrt_llm._torch.pyexecutor.llm_request": MagicMock(LlmRequest=Request, LlmRequestState=State),
    }
    if importlib.util.find_spec("strenum") is None:
        names["strenum"] = MagicMock(StrEnum=enum.StrEnum)
    sys.modules.update(names)
    for package in ("tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    name = "tensorrt_llm._torch.pyexecutor.scheduler"
    sys.modules[name] = ModuleType(name)
    spec = importlib.util.spec_from_file_location(f"{name}.scheduler", checkout / SCHEDULER)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{checkout / SCHEDULER} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Request:
    """What the scheduler reads and writes of an LlmRequest (`llmRequest.h`), for one beam and no draft tokens."""

    is_disagg_generation_init_state = is_encoder_init_state = False
    num_draft_tokens = 0
    py_encoder_output_ready_event = lora_task_id = None

    def __init__(self, number: int, job: dict[str, Any]) -> None:
        self.request_id = self.py_request_id = number
        self.job, self.tokens, self.answer = job, list(job["prompt"]), deque(job["output"])
        self.max_new_tokens = job["max_tokens"]
        self.estimated_reusable_tokens = 0
        self.is_new, self.hits = True, 0
        self._begin()

    def _begin(self) -> None:
        self.prompt_len = self.context_chunk_size = len(self.tokens)
        self.context_current_position = self.prepopulated_prompt_len = 0
        self.state = State.CONTEXT_INIT

    @property
    def state_value(self) -> int:
        return self.state.value

    @property
    def is_context_init_state(self) -> bool:
        return self.state is State.CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        return self.state in (State.GENERATION_IN_PROGRESS, State.GENERATION_TO_COMPLETE)

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_chunk_size == self.context_remaining_length

    def has_draft_tokens(self) -> bool:
        return False

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)

    def get_unique_tokens(self, beam: int) -> list[int]:
        return self.tokens

    def get_beam_width_by_iter(self, for_next_iteration: bool) -> int:
        return 1

    def set_prepopulated_prompt_len(self, tokens: int, block_size: int) -> None:
        """So many tokens need not be computed; a chunk that is not the last ends at the end of a block."""
        self.prepopulated_prompt_len = tokens
        if tokens:
            chunk = self.context_chunk_size
            if tokens + chunk < self.prompt_len:
                chunk = (tokens + chunk) // block_size * block_size - tokens
            self.context_current_position = tokens
            self.context_chunk_size = min(chunk, self.context_remaining_length)

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0

    def add_token(self) -> None:
        """A token has come, which may be the last."""
        token = self.answer.popleft()
        self.tokens.append(token)
        is_stop = not self.job["ignore_eos"] and token in self.job["stop"]
        if is_stop or len(self.tokens) - self.prompt_len >= self.max_new_tokens:
            self.state = State.GENERATION_COMPLETE

    def will_complete_next_iteration(self) -> bool:
        return len(self.tokens) - self.prompt_len + 1 >= self.max_new_tokens

    def pause(self) -> None:
        """What it produced belongs to its prompt now."""
        self.max_new_tokens -= len(self.tokens) - self.prompt_len
        self._begin()


class Executor:
    """PyExecutor's loops: what they do with what is scheduled, and with what a step has computed."""

    def __init__(self, trace: dict[str, Any], module: Any) -> None:
        self.trace, self.size, self.blocks = trace, trace["block_size"], trace["num_blocks"]
        self.overlap, self.most = trace["overlap"], trace["max_batch_size"]
        self.manager = KVCacheManager(
            self.blocks, self.size, trace["max_seq_len"], reuse=trace["reuse"], partial=trace["partial_reuse"]
        )
        chunks = None
        if trace["chunked"]:
            policy = module.ChunkingPolicy[trace["chunking"]]
            chunks = module.ContextChunkingConfig(policy, self.size)
        self.scheduler = module.SimpleScheduler(
            module.PyCapacityScheduler(self.most, self.manager, scheduler_policy=Policy(trace["policy"])),
            module.PyMicroBatchScheduler(self.most, trace["max_num_tokens"], chunks),
        )
        jobs = sorted(trace["requests"], key=lambda each: each["arrival"])
        self.waiting = deque(Request(number, job) for number, job in enumerate(jobs))
        self.active: list[Request] = []
        self.rows: list[dict[str, Any]] = []
        self.now = self.free_at = 0.0

    def fetch(self) -> None:
        """Take what has come, while fewer than `max_batch_size` are active."""
        if not self.active and self.waiting:
            self.now = max(self.now, self.waiting[0].job["arrival"])
        while self.waiting and self.waiting[0].job["arrival"] <= self.now and len(self.active) < self.most:
            self.active.append(self.waiting.popleft())

    def prepare(self) -> tuple[list[Request], list[Request]]:
        """Decide the next step, and give it its blocks; what was decided is noted."""
        before = self.manager.evicted
        output = self.scheduler.schedule_request(self.active, set())
        for req in output.paused_requests:
            req.pause()
            self.manager.remove_sequence(req)
        contexts, decoding = output.context_requests, output.generation_requests
        first = [req for req in contexts if req.is_first_context_chunk]
        self.manager.add_sequence_batch(first)
        for req in decoding:
            self.manager.add_token(req.py_request_id)
        if contexts or decoding:
            self._note(contexts, decoding, first, output.paused_requests, self.manager.evicted - before)
        return contexts, decoding

    def _note(self, contexts: Any, decoding: Any, first: Any, paused: Any, evicted: int) -> None:
        begin = max(self.now, self.free_at)
        self.free_at = begin + 1
        new = [req for req in first if req.is_new]
        tokens = {req.job["id"]: req.context_chunk_size for req in contexts}
        tokens |= {req.job["id"]: 1 for req in decoding}
        computed = sum(tokens.values())
        if computed > self.trace["max_num_tokens"]:
            raise RuntimeError(f"a step of {computed} tokens: fit_token_budget would make it smaller")
        self.rows.append(
            {
                "time": begin,
                "admitted": sorted(req.job["id"] for req in new),
                "resumed": sorted(req.job["id"] for req in first if not req.is_new),
                "preempted": sorted(req.job["id"] for req in paused),
                "tokens": tokens,
                "hits": sum(req.prepopulated_prompt_len for req in new),
                "evicted": evicted,
                "in_use": self.blocks - len(self.manager.free),
            }
        )
        for req in new:
            req.is_new = False

    def update_states(self, contexts: list[Request], decoding: list[Request]) -> None:
        """As a step begins: where its requests will be when it has ended."""
        for req in contexts:
            req.move_to_next_context_chunk()
            if not req.context_remaining_length:
                req.state = State.GENERATION_IN_PROGRESS
        if self.overlap:
            for req in (*contexts, *decoding):
                if req.state is State.GENERATION_IN_PROGRESS and req.will_complete_next_iteration():
                    req.state = State.GENERATION_TO_COMPLETE

    def update_requests(self, contexts: list[Request], decoding: list[Request]) -> None:
        """The tokens of a step have come."""
        for req in (*contexts, *decoding):
            if req.is_generation_in_progress_state:
                req.add_token()

    def finish(self, contexts: list[Request]) -> None:
        """What has ended leaves, and what was computed of prompts can be reused."""
        for req in self.active:
            if req.state is State.GENERATION_COMPLETE:
                self.manager.remove_sequence(req)
        self.active = [req for req in self.active if req.state is not State.GENERATION_COMPLETE]
        for req in contexts:
            self.manager.store_context_blocks(req)

    def loop(self) -> None:
        """`_executor_loop`."""
        while self.active or self.waiting:
            self.fetch()
            contexts, decoding = self.prepare()
            if not contexts and not decoding:
                self._wait()
                continue
            self.now = self.free_at
            self.update_states(contexts, decoding)
            self.update_requests(contexts, decoding)
            self.finish(contexts)

    def loop_overlap(self) -> None:
        """`_executor_loop_overlap`: a step is decided and begun before the results of the one before are known."""
        previous: tuple[list[Request], list[Request], float] | None = None
        while self.active or self.waiting:
            self.fetch()
            contexts, decoding = self.prepare()
            is_empty = not contexts and not decoding
            if is_empty and previous is None:
                self._wait()
                continue
            if previous is not None:
                *batch, end = previous
                self.now = max(self.now, end)
                # What the step before ended of that is in the step that has just begun is computed in vain.
                self.update_requests(*batch)
            self.update_states(contexts, decoding)
            if previous is not None:
                self.finish(previous[0])
            previous = None if is_empty else (contexts, decoding, self.free_at)

    def _wait(self) -> None:
        if not self.waiting or self.waiting[0].job["arrival"] <= self.now:
            raise RuntimeError(f"{len(self.active)} requests are active, and none is scheduled")
        self.now = self.waiting[0].job["arrival"]


def run(trace: dict[str, Any], module: Any) -> list[dict[str, Any]]:
    """What is decided in each step."""
    executor = Executor(trace, module)
    (executor.loop_overlap if trace["overlap"] else executor.loop)()
    return executor.rows
