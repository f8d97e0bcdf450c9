"""A model that says what a scenario has it say, through the real sampler and the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvlab.config import SchedulerConfig, SpeculationConfig
from kvlab.core import Request, SamplingParams, StepOutput, StepRecord
from kvlab.core import Sequence as Answer
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.view import CacheView

END = "</s>"
OTHERWISE = "~"


@dataclass
class ScriptedModel:
    """Says the pieces of a script one after another, `OTHERWISE` in place of one that it may not say."""

    script: tuple[str, ...]
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    outputs: list[StepOutput] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocabulary = list(dict.fromkeys((*self.script, END, OTHERWISE)))
        pool = PagedKVCachePool(num_blocks=16, block_size=4, max_seq_len=64)
        config = SchedulerConfig(max_batch_size=2, max_batched_tokens=16, speculation=self.speculation)
        scheduler = build_scheduler(config)
        self.engine = EngineCore(
            pool,
            scheduler,
            self,
            WallClock(),
            eos_token_ids=(self.token(END),),
            vocab_size=len(self.vocabulary),
            detokenize=self.text,
        )

    def token(self, piece: str) -> int:
        return self.vocabulary.index(piece)

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(self.vocabulary[token] for token in token_ids)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        batch = step.sampling()
        logits = torch.zeros(len(batch), len(self.vocabulary))
        logits[:, self.token(OTHERWISE)] = 1.0
        for row, position in enumerate(batch.num_outputs.tolist()):
            logits[row, self.token(self.script[position])] = 2.0
        return Sampler()(logits, batch)

    def ask(self, sampling: SamplingParams) -> Answer:
        """The answer to a request."""
        answer = self.engine.add_request(
            Request("request", (self.token(OTHERWISE),), sampling), self.outputs.append
        )
        while self.engine.has_work():
            if (record := self.engine.step()) is not None:
                self.records.append(record)
            assert not self.engine.pool.audit()
        return answer
