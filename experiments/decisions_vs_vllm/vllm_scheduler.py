"""vLLM's scheduler and KV cache manager without a model: runs in vLLM's environment and needs nothing of kvlab.

    python vllm_scheduler.py < trace.json > decisions.json

The trace has the settings and, for each request, its arrival in steps, its prompt and the tokens that it will
produce. A step takes one unit of time. What was decided in each step is written.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from typing import Any


def build(trace: dict[str, Any]) -> Any:
    """A scheduler as vLLM's engine builds it, with its default settings but for what the trace says."""
    import torch
    from transformers import LlamaConfig
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        longest = trace["max_model_len"]
        config = LlamaConfig(**shape, vocab_size=trace["vocab_size"], max_position_embeddings=longest)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=longest)
    scheduler = SchedulerConfig(
        max_num_seqs=trace["max_num_seqs"],
        max_num_batched_tokens=trace["max_num_batched_tokens"],
        max_model_len=longest,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=trace["ahead"],
        policy=trace["policy"],
        scheduler_reserve_full_isl=trace["reserve_full_isl"],
    )
    block, blocks = trace["block_size"], trace["num_blocks"] + 1  # vLLM never uses one of them
    cache = CacheConfig(block_size=block, enable_prefix_caching=trace["prefix_caching"])
    cache.num_gpu_blocks = blocks
    layer = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if "state" in trace["kinds"] and trace["prefix_caching"]:
        cache.mamba_cache_mode = "align"
    state = {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": cache.mamba_cache_mode}
    if trace["exports"]:  # FlashInfer's kernel writes a state in the middle of a prompt's last chunk
        state |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": block}

    unit = longest if "state" in trace["kinds"] and not trace["prefix_caching"] else block

    def spec(kind: int | str | None) -> Any:
        if kind == "state":
            return MambaSpec(block_size=unit, **state)
        return FullAttentionSpec(**layer) if kind is None else SlidingWindowSpec(**layer, sliding_window=kind)

    groups = [KVCacheGroupSpec([f"layer{number}"], spec(kind)) for number, kind in enumerate(trace["kinds"])]
    whole = VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)
    return (AsyncScheduler if trace["ahead"] else Scheduler)(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=unit,
        log_stats=True,
    )


def run(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What is decided in each step."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = build(trace)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(trace["block_size"], sha256)
    pool = scheduler.kv_cache_manager.block_pool
    evicted = 0
    evict = pool._maybe_evict_cached_block

    def count(block: Any) -> bool:
        nonlocal evicted
        found = bool(evict(block))
        evicted += found
        return found

    pool._maybe_evict_cached_block = count
    waiting = sorted(trace["requests"], key=lambda each: each["arrival"])
    answers = {each["id"]: each["output"] for each in waiting}
    steps: list[dict[str, Any]] = []
    running: deque[tuple[int, Any, list[str]]] = deque()  # begin, what was scheduled, who gets a token
    most, now, free_at = 1 + trace["ahead"], 0, 0  # steps that are decided at once; when the device is free
    while waiting or running or scheduler.has_unfinished_requests():
        if not running and not scheduler.has_unfinished_requests():
            now = max(now, waiting[0]["arrival"])
        while waiting and waiting[0]["arrival"] <= now:
            job = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=job["max_tokens"],
                ignore_eos=job["ignore_eos"],
                stop_token_ids=list(job["stop"]),
            )
            asked = (job["id"], job["prompt"], sampling, None)
            came = len(answers) - len(waiting)  # equals go by it, who would go by their names
            scheduler.add_request(
                Request(*asked, arrival_time=float(came), priority=job["priority"], block_hasher=hasher)
            )
        before = evicted
        if scheduler.has_requests():
            out = scheduler.schedule()
            stats = scheduler.make_stats()
            begin = max(now, free_at)
            if out.num_scheduled_tokens:
                free_at = begin + 1
                steps.append(
                    {
                        "time": begin,
                        "admitted": sorted([each.req_id for each in out.scheduled_new_reqs]),
                        "resumed": sorted(out.scheduled_cached_reqs.resumed_req_ids),
                        "preempted": sorted(out.preempted_req_ids or ()),
                        "tokens": out.num_scheduled_tokens,
                        "hits": stats.prefix_cache_stats.hits,
                        "evicted": evicted - before,
                        "in_use": trace["num_blocks"] - pool.get_num_free_blocks(),
                    }
                )
            sampling_now = [
                name for name in out.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk
            ]
            running.append((begin, out, sampling_now))
            if len(running) < most and out.num_scheduled_tokens:
                continue
        begin, out, sampled = running.popleft()
        names = list(out.num_scheduled_tokens)
        tokens = [
            [answers[name][scheduler.requests[name].num_output_tokens]]
            if name in sampled and name in scheduler.requests
            else []
            for name in names
        ]
        now = max(now, begin + bool(names))
        index = {name: number for number, name in enumerate(names)}
        scheduler.update_from_output(out, ModelRunnerOutput(names, index, tokens))
    return steps


if __name__ == "__main__":
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    json.dump(run(json.load(sys.stdin)), out)
    out.close()
