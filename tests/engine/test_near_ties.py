"""Other chunks or proposals move distributions by rounding alone: where another token is sampled is a near tie."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
import yaml

from kvlab.config import EngineConfig, ExecutorConfig, KVConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.logits import sample as pick
from kvlab.engine.service import Engine
from kvlab.paths import CONF
from kvlab.splitmix import uniforms

Key = tuple[str, int]
Distributions = dict[float, torch.Tensor]  # of each draw's number: the cumulated probabilities that it was held to


def _requests(seed: int) -> list[Request]:
    """Prompts and outputs of few tokens, so that proposals are accepted, and penalties. No top_p: its edge is a tie
    of its own.
    """
    draws = random.Random(seed)
    requests = []
    for number in range(4):
        prompt = ([draws.randrange(40) for _ in range(6)] * 20)[: draws.randint(5, 90)]
        sampling = SamplingParams(
            30,
            temperature=draws.choice([0.3, 1.2]),
            seed=draws.randrange(9999),
            n=draws.choice([1, 5]),
            ignore_eos=True,
            repetition_penalty=draws.choice([1.0, 1.3]),
            presence_penalty=draws.choice([0.0, 0.7]),
            frequency_penalty=draws.choice([0.0, 0.5]),
            logit_bias=tuple((token, 9.0) for token in sorted(set(prompt[:3]))),
        )
        requests.append(Request(f"r{number}", tuple(prompt), sampling))
    return requests


def _serve(
    requests: Sequence[Request], model: str, dtype: str, scheduler: SchedulerConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[Key, list[int]], Distributions]:
    seen: Distributions = {}

    def spy(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        for number, row in zip(numbers.tolist(), scores.double().softmax(dim=-1).cumsum(dim=-1), strict=True):
            seen[number] = row
        return pick(scores, numbers)

    shape = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
    config = EngineConfig(
        model=ModelConfig(family=shape["family"], architecture=shape["architecture"], max_seq_len=256),
        kv=KVConfig(num_blocks=300, block_size=8, dtype=dtype),
        scheduler=scheduler,
        executor=ExecutorConfig(dtype="float32"),
    )
    tokens: dict[Key, list[int]] = {}
    with monkeypatch.context() as patch, closing(Engine.from_config(config)) as engine:
        patch.setattr("kvlab.engine.sampler.sample", spy)
        for output in engine.generate(requests):
            if output.token_id is not None:
                tokens.setdefault((output.request_id, output.index), []).append(output.token_id)
    return tokens, seen


@pytest.mark.parametrize("model", ["gemma3_tiny", "qwen3_tiny"])
@pytest.mark.parametrize(("dtype", "moves"), [("auto", 1e-5), ("fp8_e4m3", 2e-2), ("int8", 2e-2)])
def test_other_chunks_and_proposals_move_distributions_by_rounding(
    model: str, dtype: str, moves: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format of few bits turns a difference in the last digit of K or V into a whole step of the format."""
    whole = SchedulerConfig(max_batched_tokens=512, max_batch_size=24)
    parts = SchedulerConfig(
        max_batched_tokens=24,
        max_batch_size=24,
        speculation=SpeculationConfig("ngram", num_speculative_tokens=4, prompt_lookup_min=1),
    )
    requests = _requests(524)
    tokens, expected = _serve(requests, model, dtype, whole, monkeypatch)
    others, drawn = _serve(requests, model, dtype, parts, monkeypatch)
    compared = 0
    for request in requests:
        sampling = request.sampling
        for sample in range(sampling.n):
            pair = tokens[request.request_id, sample], others[request.request_id, sample]
            for position, (token, other) in enumerate(zip(*pair, strict=True)):
                (number,) = uniforms([sampling.seed or 0], [sample], [position]).tolist()
                if expected[number].shape == drawn[number].shape == (512,):  # not of candidates in their own order
                    assert (expected[number] - drawn[number]).abs().max() < moves
                    compared += 1
                if token != other:  # a near tie; what follows has another history
                    break
    assert compared > 100
