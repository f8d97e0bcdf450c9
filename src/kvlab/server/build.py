"""From a configuration to what the routes of a server share."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvlab.config import LengthConfig, RunConfig, format_bytes
from kvlab.config.server import ServerConfig, drawn_lengths
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import PacedClock, WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.plan import EnginePlan
from kvlab.engine.service import Engine
from kvlab.engine.step import Executor
from kvlab.errors import ConfigError
from kvlab.extras import need_events
from kvlab.kv.content_log import ContentLog
from kvlab.kv.pool import BlockPool
from kvlab.models.grammars import Grammars
from kvlab.models.tokenizer import Tokenizer, find_tokenizer
from kvlab.models.word_tokenizer import word_tokenizer
from kvlab.server.blocks import BlockTimes
from kvlab.server.drawn_answers import DrawnAnswers
from kvlab.server.metrics import ServerMetrics
from kvlab.server.model import ServedModel
from kvlab.server.serving import Serving
from kvlab.server.tool_forms import TOOL_FORMS

if TYPE_CHECKING:
    from kvlab.server.kv_events import KVEventPublisher
    from kvlab.server.traces import Traces


_SHOWN = ("policy", "order", "max_batch_size", "max_batched_tokens", "max_waiting_requests")  # of the scheduler


def build_serving(config: RunConfig, settings: ServerConfig, metrics: ServerMetrics | None = None) -> Serving:
    """The engine of a run's configuration, its words and its metrics. Raises a KvlabError for settings that cannot
    work, naming them.
    """
    if settings.time_factor != 1 and config.executor.kind == "torch":
        text = "is for simulated devices, whose clock can go faster (executor=simulated); leave it out"
        raise ConfigError("server.time_factor", f"{settings.time_factor:g}", text)
    if settings.output_len != drawn_lengths() and config.executor.kind == "torch":
        text = "is for simulated devices; a model that is computed ends its answers itself; leave it out"
        raise ConfigError("server.output_len", _length_text(settings.output_len), text)
    if settings.tool_call_parser != "auto":
        TOOL_FORMS.get(settings.tool_call_parser)
    traces = _traces(config.model.name, settings.otlp_endpoint)
    plan = plan_engine(config)
    tokenizer = find_tokenizer(config.model)
    if not plan.is_real:
        plan, tokenizer = _with_ends(plan), tokenizer or word_tokenizer(plan.model.vocab_size)
    clock = WallClock() if plan.is_real else PacedClock(settings.time_factor)
    blocks = BlockTimes(plan.pool.num_blocks, clock)
    core = build_engine(
        plan,
        detokenize=None if tokenizer is None else tokenizer.decode,
        detokenize_all=None if tokenizer is None else partial(tokenizer.decode, special=True),
        journal=blocks,
        wrap=partial(_wrapped, plan=plan, config=config, settings=settings, tokenizer=tokenizer),
        clock=clock,
    )
    metrics = metrics or ServerMetrics(config.model.name)
    metrics.watch(blocks)
    metrics.describe_cache(
        block_size=plan.pool.block_size,
        num_gpu_blocks=plan.pool.num_blocks,
        cache_dtype=config.kv_dtype,
        enable_prefix_caching=config.kv.prefix_sharing,
        gpu_memory_utilization=config.executor.memory_utilization,
    )
    if isinstance(clock, PacedClock):
        metrics.watch_pace(clock)
    longest = min(config.model.max_seq_len, core.pool.max_sequence_tokens)
    model = ServedModel(
        config.model.name,
        longest,
        plan.model.vocab_size,
        int(time.time()),
        tokenizer,
        has_logprobs=plan.is_real,
        grammars=_grammars(plan, tokenizer),
        tool_call_parser=settings.tool_call_parser,
    )
    shown = _shown(plan, settings)
    events = _kv_events(core, settings)
    if events is not None:
        metrics.watch_events(events)
    engine = Engine(core, on_step=partial(_step_done, metrics=metrics, core=core, events=events))
    return Serving(engine, model, metrics, settings, shown, traces, events)


def _grammars(plan: EnginePlan, tokenizer: Tokenizer | None) -> Grammars | None:
    """Where tokens are computed, have a text, and can end a sequence."""
    ends = plan.model.eos_token_ids
    if not plan.is_real or tokenizer is None or not ends:
        return None
    return tokenizer.grammars(plan.model.vocab_size, ends)


def _step_done(
    record: StepRecord, *, metrics: ServerMetrics, core: EngineCore, events: KVEventPublisher | None
) -> None:
    metrics.step(record)
    metrics.tokens(core.scheduler.running)
    if events is not None:
        events.flush()


def _kv_events(core: EngineCore, settings: ServerConfig) -> KVEventPublisher | None:
    """Who tells what the prefix cache holds, if that was asked for. Raises ConfigError."""
    endpoint, pool = settings.kv_events, core.pool
    if endpoint is None:
        return None
    if not isinstance(pool, BlockPool) or not pool.shares_prefixes:
        text = "tells what the prefix cache holds, and there is none; set kv.backend=paged kv.prefix_sharing=true"
        raise ConfigError("server.kv_events", endpoint, text)
    need_events("server.kv_events", endpoint)
    from kvlab.server.kv_events import KVEventPublisher

    log = ContentLog(has_groups=len(pool.groups) > 1)
    replay, topic = settings.kv_events_replay, settings.kv_events_topic
    events = KVEventPublisher(log, pool.block_size, endpoint, replay, topic)
    pool.allocator.content_log = log
    return events


def _with_ends(plan: EnginePlan) -> EnginePlan:
    """The plan of a model that ends its answers: with its last token, where it has none that ends a sequence."""
    ends = plan.model.eos_token_ids or (plan.model.vocab_size - 1,)
    return replace(plan, model=replace(plan.model, eos_token_ids=ends))


def _wrapped(
    executor: Executor, *, plan: EnginePlan, config: RunConfig, settings: ServerConfig, tokenizer: Tokenizer | None
) -> Executor:
    """The executor, with answers where it has none, and with the faults that were asked for."""
    model, faults = plan.model, config.debug.faults
    if not plan.is_real:
        ends, size, lengths = model.eos_token_ids, model.vocab_size, settings.output_len
        executor = DrawnAnswers(executor, lengths=lengths, ends=ends, vocab_size=size, tokenizer=tokenizer)
    return FaultyExecutor(executor, faults) if faults.rate > 0 else executor


def _length_text(length: LengthConfig) -> str:
    return ", ".join(f"{name}: {value}" for name, value in asdict(length).items() if value is not None)


def _traces(model: str, endpoint: str | None) -> Traces | None:
    if endpoint is None:
        return None
    from kvlab.server.traces import Traces

    return Traces.sent_to(endpoint, model)


def _shown(plan: EnginePlan, settings: ServerConfig) -> dict[str, Any]:
    """The settings that the live page names, with what was chosen for those that are `auto`."""
    config, simulated = plan.config, dict[str, Any]()
    if not plan.is_real:
        simulated = {
            "server.time_factor": settings.time_factor,
            "server.output_len": _length_text(settings.output_len),
        }
    return {
        **plan.chosen,
        "dtype": config.executor.dtype,
        "weights": format_bytes(plan.weights.total),
        "KV cache": format_bytes(plan.pool.num_bytes),
        "kv.backend": config.kv.backend,
        "kv.block_size": plan.pool.block_size,
        "kv.dtype": config.kv_dtype,
        **{f"kv.{name}": getattr(config.kv, name) for name in ("prefix_sharing", "eviction")},
        **{f"scheduler.{name}": getattr(config.scheduler, name) for name in _SHOWN},
        **simulated,
    }
