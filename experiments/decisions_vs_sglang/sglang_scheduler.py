"""SGLang's scheduler, radix cache and allocators without a model: runs in SGLang's environment, without kvlab.

    python sglang_scheduler.py < traces.json > decisions.json

A trace has the settings and, for each request, its arrival in steps, its prompt and the tokens that it will
produce. SGLang's own event loop runs, `event_loop_normal` or `event_loop_overlap`. What is replaced is where
requests come from, and the forward pass, which takes one unit of time. What was decided in each step is written.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from array import array
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

FEW = 1_000  # times that the loop may turn without a batch, though nothing new can come


class _Part:
    """A part of the scheduler that decides nothing: all that is called does nothing, but for what is given."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **others: Any) -> None:
        pass


def stand_in() -> None:
    """Let SGLang be imported without the package for images, whose wheel has to fit that of torch."""
    import transformers.utils
    import transformers.utils.import_utils

    if importlib.util.find_spec("torchvision") is None:
        for part in (
            "",
            ".io",
            ".transforms",
            ".transforms.functional",
            ".transforms.v2",
            ".transforms.v2.functional",
        ):
            name = f"torchvision{part}"
            sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
        for module in (transformers.utils, transformers.utils.import_utils):
            module.is_torchvision_available = lambda: False


def publish(trace: dict[str, Any]) -> None:
    """SGLang's settings: its defaults but for what the trace says."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs
    from transformers import LlamaConfig

    longest = trace["max_model_len"]
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**shape, vocab_size=trace["vocab_size"], max_position_embeddings=longest)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        settings = ServerArgs(
            model_path=folder,
            device="cpu",
            attention_backend="torch_native",  # of those for a processor; it decides nothing
            skip_tokenizer_init=True,
            page_size=trace["page_size"],
            chunked_prefill_size=trace["chunked_prefill_size"],
            max_running_requests=trace["max_running_requests"],
            disable_overlap_schedule=not trace["overlap"],
            disable_radix_cache=not trace["prefix_caching"],
        )
        runtime_context.publish(settings, role="scheduler")
    runtime_context.get_parallel().override_permanently(
        pp_max_micro_batch_size=trace["max_running_requests"], tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_cp_rank=0
    )


def build(trace: dict[str, Any]) -> Any:
    """A `Scheduler` with all that decides as its constructor makes it, without workers and reports."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
    from sglang.srt.runtime_context import get_memory, get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    page, size, longest = trace["page_size"], trace["num_tokens"], trace["max_model_len"]
    one = module.Scheduler.__new__(module.Scheduler)
    one.page_size, one.kv_shard_widening = page, 1
    one.req_to_token_pool = ReqToTokenPool(trace["max_running_requests"], longest + 8, "cpu", False)
    pool = {"dtype": "float32", "device": "cpu", "kvcache": None, "need_sort": False}
    one.token_to_kv_pool_allocator = (
        TokenToKVPoolAllocator(size, **pool) if page == 1 else PagedTokenToKVPoolAllocator(size, page, **pool)
    )
    params = CacheInitParams(
        disable=get_memory().disable_radix_cache,
        req_to_token_pool=one.req_to_token_pool,
        token_to_kv_pool_allocator=one.token_to_kv_pool_allocator,
        page_size=page,
        eviction_policy=get_memory().radix_eviction_policy,
        chunked_prefill_size=get_schedule().chunked_prefill_size,
    )
    context = TreeCacheBuildContext(
        *(None, params, False, False, False, params.disable), _Part(), _Part(), 1, 0, None
    )
    one.tree_cache = create_tree_cache(context)
    one.model_config = SimpleNamespace(
        is_encoder_decoder=False,
        is_multimodal=False,
        vocab_size=trace["vocab_size"],
        self_opened_think_start_ids=None,
        think_end_ids=None,
    )
    one.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False))
    one.max_total_num_tokens, one.max_req_len = size, min(longest, size) - 1
    one.max_prefill_tokens, one.max_running_requests = (
        get_schedule().max_prefill_tokens,
        trace["max_running_requests"],
    )
    one.schedule_policy, one.enable_overlap = get_schedule().schedule_policy, trace["overlap"]
    one.disaggregation_mode, one.spec_algorithm = DisaggregationMode.NULL, SpeculativeAlgorithm.from_string(None)
    one.is_generation, one.processed_tokens_counter = True, 0
    off = (
        *("enable_hierarchical_cache", "enable_priority_scheduling", "schedule_low_priority_values_first"),
        *("enable_unified_cache_external_linker", "enable_lmcache", "enable_hisparse", "enable_lora"),
        *("enable_hicache_storage", "require_mlp_sync", "is_hybrid_swa", "is_hybrid_ssm", "enable_unified_memory"),
        *("enable_fpm", "enable_overlap_mlx", "_war_barrier_enabled", "enable_metrics_for_all_schedulers"),
    )
    nothing = (
        *(
            "dllm_config",
            "hisparse_coordinator",
            "decode_offload_manager",
            "min_free_slots_delayer",
            "sliding_window_size",
        ),
        *(
            "dynamic_chunk_sizer",
            "truncation_align_size",
            "max_new_tokens_limit",
            "max_queued_requests",
            "draft_worker",
        ),
    )
    for name in off:
        setattr(one, name, False)
    for name in nothing:
        setattr(one, name, None)
    one.priority_scheduling_preemption_threshold = 0
    mute = (
        *("metrics_collector", "pool_stats_observer", "kv_events_publisher", "load_publisher", "load_inquirer"),
        *("output_streamer", "model_worker", "publish_load_snapshot", "maybe_sleep_on_idle", "_prefetch_kvcache"),
        *("maybe_send_health_check_signal", "_record_step_counters"),
    )
    for name in mute:
        setattr(one, name, _Part())
    one.metrics_reporter = _Part(enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
    one.scheduler_stage_metrics = _Part(record=lambda *_: nullcontext())
    one.invariant_checker = _Part(_check_all_pools=lambda stats: (False, []))
    one.grammar_manager = _Part(grammar_queue=[], has_waiting_grammars=lambda: False)
    one.dllm_manager = _Part(any_staging_reqs=lambda: False)
    one.beam_coordinator = _Part(pending_member_rows=lambda batch: 0, commit_decode=lambda batch: set())
    one.dp_attn_adapter = _Part(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda batch: batch
    )
    one.ngram_embedding_manager = _Part(prepare_for_forward=lambda batch, **_: batch)
    one._set_or_validate_priority = lambda req: True
    one._abort_on_queued_limit = lambda req: False
    module.get_resolved_model_impl = lambda config: None  # it has no model
    one.init_running_status()
    one.init_chunked_prefill()
    one.init_schedule_policy()
    one.batch_result_processor = SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=one.disaggregation_mode,
        enable_overlap=one.enable_overlap,
        enable_overlap_mlx=False,
        model_config=one.model_config,
        token_to_kv_pool_allocator=one.token_to_kv_pool_allocator,
        tree_cache=one.tree_cache,
        hisparse_coordinator=None,
        req_to_token_pool=one.req_to_token_pool,
        decode_offload_manager=None,
        metrics_collector=one.metrics_collector,
        metrics_reporter=one.metrics_reporter,
        draft_worker=None,
        model_worker=one.model_worker,
        logprob_result_processor=_Part(),
        output_streamer=one.output_streamer,
        beam_coordinator=one.beam_coordinator,
        abort_request=one.abort_request,
    )
    return one


class Driver:
    """Gives the scheduler its requests and results, and notes what it decides."""

    def __init__(self, trace: dict[str, Any], scheduler: Any) -> None:
        self.page, self.pages = trace["page_size"], trace["num_tokens"] // trace["page_size"]
        self.scheduler = scheduler
        self.waiting = deque(sorted(trace["requests"], key=lambda each: each["arrival"]))
        self.answers = {each["id"]: each["output"] for each in self.waiting}
        self.now = self.free_at = 0.0
        self.ends: deque[float] = deque()  # of the steps whose results are not processed yet
        self.rows: list[dict[str, Any]] = []
        self.retracted: list[str] = []
        self.seen: set[str] = set()
        self.evicted = self.empty = 0
        scheduler.ingest_requests = self.ingest
        scheduler.run_batch = self.run_batch
        processed, update = scheduler.process_batch_result, scheduler.update_running_batch

        def process(batch: Any, result: Any) -> None:
            self.now = max(self.now, self.ends.popleft())
            processed(batch, result)

        def updated(batch: Any) -> Any:
            before = list(batch.reqs)
            after = update(batch)
            self.retracted = [each.rid for each in before if each.is_retracted]
            return after

        evict = scheduler.tree_cache._evict

        def evicted(*arguments: Any, **others: Any) -> Any:
            result = evict(*arguments, **others)
            self.evicted += result.num_tokens_evicted // self.page
            return result

        scheduler.process_batch_result, scheduler.update_running_batch = process, updated
        scheduler.tree_cache._evict = evicted

    def ingest(self, stop_at_pause: bool = False) -> list[Any]:
        """What has come by now; when all is done, the loop is told to end."""
        one = self.scheduler
        idle = one.is_fully_idle()
        if idle and self.waiting:
            self.now = max(self.now, self.waiting[0]["arrival"])
        one.gracefully_exit = idle and not self.waiting
        self.empty += 1
        if self.empty > FEW:
            raise RuntimeError(f"{len(one.waiting_queue)} requests wait, and none is admitted")
        while self.waiting and self.waiting[0]["arrival"] <= self.now:
            self._add(self.waiting.popleft())
        return []

    def _add(self, job: dict[str, Any]) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(
            max_new_tokens=job["max_tokens"],
            temperature=0,
            ignore_eos=job["ignore_eos"],
            stop_token_ids=job["stop"] or None,
        )
        sampling.normalize(None)
        req = Req(job["id"], "", array("q", job["prompt"]), sampling, vocab_size=10**9)
        self.scheduler.init_req_max_new_tokens(req)
        self.scheduler._add_request_to_queue(req)

    def run_batch(self, batch: Any) -> Any:
        """The tokens of a step, which is noted."""
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult

        one, extend = self.scheduler, batch.forward_mode.is_extend()
        self.empty = 0
        one.forward_ct += 1
        batch.forward_iter = one.forward_ct
        batch.input_ids = None
        begin = max(self.now, self.free_at)
        self.free_at = begin + 1
        self.ends.append(self.free_at)
        if not one.enable_overlap or len(self.ends) == 1:
            self.now = begin
        new = [req for req in batch.reqs if extend and req.rid not in self.seen]
        again = [req for req in batch.reqs if extend and req.retraction_count and req.extend_batch_idx == 1]
        first = [req for req in batch.reqs if extend and req.extend_batch_idx == 1]
        self.seen.update(req.rid for req in new)
        pool = one.token_to_kv_pool_allocator
        free = pool.available_size() + one.tree_cache.evictable_size()
        self.rows.append(
            {
                "time": begin,
                "kind": "prefill" if extend else "decode",
                "admitted": sorted(req.rid for req in new),
                "resumed": sorted(req.rid for req in again),
                "preempted": sorted(self.retracted),
                "tokens": {req.rid: req.extend_len if extend else 1 for req in batch.reqs},
                "order": [req.rid for req in batch.reqs],
                "hits": sum(req.prefix_len for req in first if req not in again),
                "evicted": self.evicted,
                "in_use": self.pages - free // self.page,
                "cached": one.tree_cache.evictable_size() // self.page,
                "waiting": len(one.waiting_queue),
                "ratio": one.new_token_ratio_tracker.current,
                "full": one.running_batch.batch_is_full,
            }
        )
        self.retracted, self.evicted = [], 0
        tokens = [
            self.answers[req.rid][min(len(req.output_ids) + self._ahead(req), self._last(req))]
            for req in batch.reqs
        ]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens))

    def _last(self, req: Any) -> int:
        return len(self.answers[req.rid]) - 1

    def _ahead(self, req: Any) -> int:
        """Tokens of steps that run still."""
        return sum(
            req in batch.reqs and req.inflight_middle_chunks <= 0 for batch, _ in self.scheduler.result_queue
        )


def run(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What is decided in each step."""
    publish(trace)
    scheduler = build(trace)
    driver = Driver(trace, scheduler)
    (scheduler.event_loop_overlap if trace["overlap"] else scheduler.event_loop_normal)()
    return driver.rows


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints
    stand_in()
    json.dump([run(trace) for trace in json.load(sys.stdin)], out)
    out.close()
