"""A model run step by step over its cache, compared token by token with transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import Checkpoint, random_tokens, read_decoder
from features.steps.support import MemorySize, memory_size
from kvlab.errors import BackendError
from kvlab.kv.pool import BlockPool
from kvlab.models.config import RopeConfig
from kvlab.models.decoder import Decoder

_CLOSE: Any = {"atol": 5e-5, "rtol": 0.0}


@dataclass
class Text:
    """A sequence of known tokens on its way through the model; logits by position."""

    token_ids: tuple[int, ...]
    slot: int
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Reading:
    """A model that reads texts: what it said for their tokens, and what it stored."""

    model: Checkpoint
    pool: BlockPool
    decoder: Decoder | None = None  # in place of the model's own
    texts: list[Text] = field(default_factory=list)
    rows: int = 0  # rows of logits of the latest step

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Open a slot for a text; nothing of it is computed yet."""
        self.texts.append(Text(token_ids, self.pool.allocate_slot()))

    def step(self, counts: list[int], *, last_only: bool = False) -> None:
        """Run the next tokens of each text, as many as `counts` says, in one flat batch."""
        chosen = [(text, count) for text, count in zip(self.texts, counts, strict=True) if count]
        slots, new = [text.slot for text, _ in chosen], [count for _, count in chosen]
        self.pool.reserve(slots, new)
        view = self.pool.view(slots, new)
        tokens: list[int] = []
        wanted: list[tuple[int, Text, int]] = []  # row of the batch, text, position
        for text, count in chosen:
            start = self.pool.get_seq_len(text.slot)
            for position in range(start, start + count):
                if not last_only or position == start + count - 1:
                    wanted.append((len(tokens), text, position))
                tokens.append(text.token_ids[position])
        rows = torch.tensor([row for row, _, _ in wanted])
        decoder = self.decoder or self.model.decoder
        logits = decoder.forward(torch.tensor(tokens), view, rows)
        view.advance()
        self.rows = len(logits)
        for (_, text, position), row in zip(wanted, logits, strict=True):
            text.logits[position] = row
        assert self.pool.audit() == []

    def left(self, text: Text) -> int:
        """Tokens of a text that have not run."""
        return len(text.token_ids) - self.pool.get_seq_len(text.slot)

    def stored(self, text: Text) -> torch.Tensor:
        """K and V in the pool, token by token through the table, `[tokens, layers, 2, kv_heads, head_dim]`."""
        assert self.pool.storage is not None
        places = [self.pool.tables.locate(text.slot, at) for at in range(self.pool.get_seq_len(text.slot))]
        blocks, offsets = torch.tensor(places).T
        sides = [side[:, blocks, :, offsets] for side in (self.pool.storage.keys, self.pool.storage.values)]
        return torch.stack(sides, dim=2)


def numbers(text: str) -> list[int]:
    """Read `3, 16, 33`."""
    return [int(number) for number in text.split(", ")]


@given(parsers.parse("its K and V in {size:Size}", extra_types={"Size": memory_size}), target_fixture="reading")
def cache(model: Checkpoint, size: MemorySize) -> Reading:
    return Reading(model, size.build(model.config.kv_spec("float32")))


@given(parsers.re(r"texts of (?P<lengths>[\d, ]+) tokens"), converters={"lengths": numbers})
def texts(reading: Reading, lengths: list[int]) -> None:
    for seed, length in enumerate(lengths):
        reading.add(random_tokens(length, seed))


@given(
    parsers.re(r"texts of (?P<lengths>[\d, ]+) tokens that end in the same token"), converters={"lengths": numbers}
)
def texts_with_same_end(reading: Reading, lengths: list[int]) -> None:
    for seed, length in enumerate(lengths):
        reading.add((*random_tokens(length - 1, seed), 42))


@given(parsers.parse("the same texts with another token {distance:d} places before the last"))
def changed_texts(reading: Reading, distance: int) -> None:
    for text in tuple(reading.texts):
        changed = list(text.token_ids)
        changed[-1 - distance] = (changed[-1 - distance] + 1) % reading.model.config.vocab_size
        reading.add(tuple(changed))


@given("attention computed by the backend")
def with_backend(reading: Reading, backend_name: str) -> None:
    """The one that this run of the scenario is about; skipped, with its reason, where it cannot run."""
    try:
        reading.decoder = read_decoder(reading.model.config, reading.model.directory, backend_name)
    except BackendError as error:
        pytest.skip(str(error))


@when("all tokens of each run in one step")
def run_all(reading: Reading) -> None:
    reading.step([reading.left(text) for text in reading.texts])


@when("all tokens of each run in one step, asking for the logits of their last tokens")
def run_all_for_last(reading: Reading) -> None:
    reading.step([reading.left(text) for text in reading.texts], last_only=True)


@when(parsers.re(r"(?P<chunk>\d+) tokens? of each runs? in each step, until the end"), converters={"chunk": int})
def run_in_chunks(reading: Reading, chunk: int) -> None:
    while any(reading.left(text) for text in reading.texts):
        reading.step([min(chunk, reading.left(text)) for text in reading.texts])


@when(parsers.re(r"their (first|next) (?P<counts>[\d, ]+) tokens run in one step"), converters={"counts": numbers})
def run_some(reading: Reading, counts: list[int]) -> None:
    reading.step(counts)


@then("the logits of every token are those of transformers")
def logits_equal(reading: Reading) -> None:
    for text in reading.texts:
        assert sorted(text.logits) == list(range(len(text.token_ids)))
    asked_logits_equal(reading)


@then("the logits of every token asked for are those of transformers")
def asked_logits_equal(reading: Reading) -> None:
    for text in reading.texts:
        expected = reading.model.logits(text.token_ids)
        assert text.logits
        for position, row in text.logits.items():
            torch.testing.assert_close(row, expected[position], **_CLOSE)


@then(parsers.re("the last tokens of the changed texts get (?P<result>other|the same) logits"))
def changed_logits(reading: Reading, result: str) -> None:
    half = len(reading.texts) // 2
    for text, changed in zip(reading.texts[:half], reading.texts[half:], strict=True):
        last = len(text.token_ids) - 1
        difference = (text.logits[last] - changed.logits[last]).abs().max()
        assert (difference < 1e-5) == (result == "the same")


@then(parsers.parse("there are {count:d} rows of logits"))
def rows_of_logits(reading: Reading, count: int) -> None:
    assert reading.rows == count


@then("K and V of every token are those of transformers")
def stored_equal(reading: Reading) -> None:
    for text in reading.texts:
        expected = reading.model.stored_kv(text.token_ids)
        assert len(expected) == len(text.token_ids)
        torch.testing.assert_close(reading.stored(text), expected, **_CLOSE)


@then(parsers.re("without its (?P<option>RoPE scaling|sliding windows) the model would say something else"))
def option_matters(reading: Reading, option: str) -> None:
    """So that this scenario could not pass without it."""
    config = reading.model.config
    if option == "RoPE scaling":
        layers = tuple(replace(layer, rope=RopeConfig(layer.rope.theta)) for layer in config.layers)
    else:
        layers = tuple(replace(layer, sliding_window=None) for layer in config.layers)
    decoder = read_decoder(replace(config, layers=layers), reading.model.directory)
    pool = MemorySize(40, 16, paged=True).build(config.kv_spec("float32"))
    other = Reading(reading.model, pool, decoder)
    other.add(reading.texts[0].token_ids)
    run_all(other)
    last = len(other.texts[0].token_ids) - 1
    difference = (other.texts[0].logits[last] - reading.texts[0].logits[last]).abs().max()
    assert difference > 0.1


@then(
    parsers.parse("K of that token in the first layer is what transformers stores at positions {positions}"),
    target_fixture="same_token",
)
def first_layer_keys(reading: Reading, positions: str) -> list[torch.Tensor]:
    """In the first layer, K depends on nothing but the token and its position."""
    keys = []
    for text, position in zip(reading.texts, numbers(positions), strict=True):
        assert position == len(text.token_ids) - 1
        keys.append(reading.stored(text)[position, 0, 0])
        torch.testing.assert_close(keys[-1], reading.model.stored_kv(text.token_ids)[position, 0, 0], **_CLOSE)
    return keys


@then("no two of them are equal")
def all_different(same_token: list[torch.Tensor]) -> None:
    for index, key in enumerate(same_token):
        assert all((key - other).abs().max() > 0.01 for other in same_token[:index])
