"""One answer at a time, in words as they come: what `kvlab generate` and `kvlab chat` are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlab.config import EngineConfig, format_bytes
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.garbage import gc_frozen
from kvlab.errors import TokenizerError
from kvlab.lab.results.tables import count
from kvlab.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer: its tokens without the one that ended it, how it came, and the memory that it took."""

    token_ids: tuple[int, ...]
    record: RequestRecord
    kv_blocks: int
    kv_bytes: int
    block_size: int

    @property
    def speed(self) -> str:
        """Tokens, times and memory in words."""
        record = self.record
        tokens, first = len(record.output_token_ids), record.ttft_ms
        if first is None:
            return "no token"
        rate = "" if not record.tpot_ms else f", then {1000 / record.tpot_ms:.1f} tok/s"
        blocks = f"{count(self.kv_blocks, 'block')} of {count(self.block_size, 'token')}"
        memory = f"KV cache: {blocks}, {format_bytes(self.kv_bytes)}"
        return f"{count(tokens, 'token')}: the first after {first:,.0f} ms{rate}; {memory}"

    @property
    def found(self) -> str:
        """What the prefix cache had of the prompt, in words."""
        cached, prompt = self.record.cached_tokens, self.record.prompt_tokens
        return f"prefix cache: {cached} of {count(prompt, 'prompt token')} found, {prompt - cached} computed"


class Speaker:
    """A model that answers. Raises a KvlabError for settings that cannot work, and for a model without words."""

    def __init__(self, config: EngineConfig) -> None:
        plan = plan_engine(config)
        plan.computed_by  # noqa: B018 - raises for hardware that is simulated
        self.tokenizer: Tokenizer = load_tokenizer(config.model)
        self._engine = build_engine(plan, detokenize=self.tokenizer.decode)
        self._pool, self._eos, self._asked = plan.pool, set(plan.model.eos_token_ids), 0
        self.max_tokens = self._engine.pool.max_sequence_tokens  # of prompt and answer together

    @gc_frozen()
    def answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        write: Callable[[str], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Spoken:
        """Answer a prompt with up to `sampling.max_tokens` tokens, or as many as fit, and `write` its words as they
        come. Ends early when `should_stop` says so. Raises TokenizerError for a prompt that leaves no room.
        """
        room = self.max_tokens - len(prompt)
        if room < 1:
            raise TokenizerError(
                f"the prompt has {len(prompt):,} tokens, and the model takes {self.max_tokens:,} with its answer "
                "(model.max_seq_len, and the size of the KV cache); say less, or set more"
            )
        records: list[RequestRecord] = []
        name, self._asked = f"r{self._asked}", self._asked + 1
        asked = replace(sampling, max_tokens=min(room, sampling.max_tokens))
        request = Request(name, tuple(prompt), asked, arrival_s=self._engine.clock.now())
        self._engine.submit(request, lambda output: write(output.text), records.append)
        while not records:
            if should_stop():
                self._engine.abort(name)
            else:
                self._engine.step()
        (record,) = records
        held = len(prompt) + len(record.output_token_ids)
        blocks = -(-held // self._pool.block_size)
        while self._engine.has_work():
            self._engine.step()  # gives the memory back
        if record.error:
            raise TokenizerError(f"the answer failed: {record.error}")
        ids = record.output_token_ids
        ended = bool(ids) and ids[-1] in self._eos
        size = blocks * self._pool.block_size * self._pool.bytes_per_slot
        return Spoken(ids[:-1] if ended else ids, record, blocks, size, self._pool.block_size)
