"""From a configuration to what the routes of a server share."""

from __future__ import annotations

import time

from kvlab.config import RunConfig
from kvlab.config.server import ServerConfig
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import PacedClock
from kvlab.engine.service import Engine
from kvlab.models.tokenizer import find_tokenizer
from kvlab.server.metrics import ServerMetrics
from kvlab.server.model import ServedModel
from kvlab.server.serving import Serving


def build_serving(config: RunConfig, settings: ServerConfig, metrics: ServerMetrics | None = None) -> Serving:
    """The engine of a run's configuration, its words and its metrics. Raises a KvlabError for settings that cannot
    work, naming them.
    """
    plan = plan_engine(config)
    tokenizer = find_tokenizer(config.model)
    core = build_engine(
        plan,
        detokenize=None if tokenizer is None else tokenizer.decode,
        clock=None if plan.timing is None else PacedClock(settings.time_factor),
    )
    metrics = metrics or ServerMetrics(config.model.name)
    longest = min(config.model.max_seq_len, core.pool.max_sequence_tokens)
    model = ServedModel(config.model.name, longest, plan.model.vocab_size, int(time.time()), tokenizer)
    return Serving(Engine(core, on_step=metrics.step), model, metrics, settings)
