"""What transformers says for 32 prompts to SmolLM2: greedy tokens in float32, kept in `published_tokens.json`.

    python -m tests.parity.published        computes them anew, in some minutes

Each token leads all others by a margin that float32 on another machine does not bridge: prompts with a closer
choice are left out.
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from kvlab.attention.base import AttentionBackend
from kvlab.cli.compose import compose_run
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.protocol import EngineStats
from kvlab.errors import BackendError
from kvlab.lab.run.drive import drive
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.models.tokenizer import load_tokenizer
from kvlab.models.weights import WeightSource
from kvlab.workloads import build_requests
from tests.support.published import smollm2_file

FILE = Path(__file__).with_name("published_tokens.json")
PROMPTS, TOKENS = 32, 64
SETTINGS = ("executor.threads=1", "executor.dtype=float32", "model.max_seq_len=256")
BLOCK = 16
MARGIN = 2e-3  # of logits; the largest difference found between kvlab and transformers is a tenth of it


class Greedy(NamedTuple):
    """A prompt and what follows."""

    prompt: list[int]
    tokens: list[int]


def expected() -> list[Greedy]:
    """The prompts with transformers' tokens."""
    return [Greedy(**row) for row in json.loads(FILE.read_text())["rows"]]


def reference(path: Path) -> Any:
    """transformers' model with the file's weights, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    described = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model = AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


def margin(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """The least lead of a token's logit over all others, where the token is what the model picks behind those
    before it; negative where it is not. If none is, the tokens are the model's greedy ones, found in one pass.

    The attention mask is of ones: the model's padding token is one of the chat template's.
    """
    ids = torch.tensor([prompt + tokens[:-1]])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 :]
    picked = torch.tensor(tokens)[:, None]
    others = logits.scatter(1, picked, float("-inf")).amax(-1)
    return float((logits.gather(1, picked)[:, 0] - others).min())


_DECODERS: dict[tuple[object, ...], Decoder] = {}


def _decoder(config: DecoderConfig, weights: WeightSource, attention: AttentionBackend, *others: Any) -> Decoder:
    """A decoder of the model, which shares its weights with earlier ones: to read and pack them takes as long as to
    serve a few prompts.
    """
    specs, max_positions, ops = others
    key = tuple(specs), max_positions, ops.name
    if key not in _DECODERS:
        _DECODERS[key] = Decoder(config, weights, attention, *others)
    decoder = copy(_DECODERS[key])
    decoder.attention = attention
    decoder._stack = ops.stack(decoder._layers, attention)
    return decoder


def served(prompts: list[list[int]], *overrides: str, tokens: int = TOKENS) -> tuple[list[list[int]], EngineStats]:
    """The greedy tokens that kvlab gives these prompts, all at once, past any end of sequence."""
    config = compose_run(["model=smollm2_135m", "executor=cpu", *SETTINGS, *overrides]).config
    with patch("kvlab.engine.executors.torch.Decoder", _decoder):
        engine = build_engine(plan_engine(config))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = [Request(f"r{index}", tuple(prompt), sampling) for index, prompt in enumerate(prompts)]
    log = drive(engine, asked)
    return [list(record.output_token_ids) for record in log.records], engine.stats()


def shared_tokens(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with."""
    return next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)


def check_served(backend: str, kv: str, preempt: bool, count: int, tokens: int) -> None:
    """Assert that the first prompts are given transformers' tokens, and that what was asked of the memory happened:
    with `preempt` it holds all prompts and not their answers. Skips where the backend cannot compute here.
    """
    smollm2_file()
    rows = expected()[:count]
    prompts = [row.prompt for row in rows]
    needed = sum(-(-len(prompt) // BLOCK) for prompt in prompts)
    if kv == "paged":
        needed -= shared_tokens(prompts) // BLOCK * (count - 1)
    blocks = needed + (1 if preempt else count * -(-tokens // BLOCK))
    overrides = [f"attention={backend}", f"kv={kv}", f"scheduler.max_batch_size={count}"]
    if kv != "contiguous":
        overrides += [f"kv.num_blocks={blocks}", f"kv.block_size={BLOCK}", "scheduler.admission_reserve=0"]
    try:
        found, stats = served(prompts, *overrides, tokens=tokens)
    except BackendError as error:
        pytest.skip(str(error))
    assert found == [row.tokens[:tokens] for row in rows]
    assert bool(stats.preemptions) == preempt
    assert bool(stats.hit_tokens) == (kv == "paged")


def main() -> None:
    """Compute and write them."""
    config = compose_run(["model=smollm2_135m", "workload=chat"]).config
    tokenizer = load_tokenizer(config.model)
    requests = build_requests(config.workload, vocab_size=49_152, seed=0, tokenizer=lambda: tokenizer)
    prompts = [list(request.prompt_token_ids) for request in requests]
    model, rows, least = reference(smollm2_file()), list[dict[str, list[int]]](), float("inf")
    with torch.no_grad():
        for prompt, tokens in zip(prompts, served(prompts)[0], strict=True):
            found = margin(model, prompt, tokens)
            print(len(prompt), f"margin {found:.4f}", flush=True)
            if found >= MARGIN and len(rows) < PROMPTS:
                rows.append({"prompt": prompt, "tokens": tokens})
                least = min(least, found)
    FILE.write_text(json.dumps({"least_margin": least, "rows": rows}).replace('{"prompt', '\n{"prompt') + "\n")
    print(len(rows), "prompts, least margin", least)


if __name__ == "__main__":
    main()
