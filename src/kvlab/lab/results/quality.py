"""What fewer bits cost in quality: logits of a model beside those of the same model with more."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlab.config import format_bytes
from kvlab.core import Request
from kvlab.engine.build import plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.engine.plan import EnginePlan
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.lab.machine import available_memory
from kvlab.planning.cache import kv_spec

_PROMPTS = 4
_POSITIONS = 16  # the last of each prompt
_LONGEST = 512  # tokens of a prompt that are run
_WORKING_MEMORY = 2**29


def quality_metrics(plan: EnginePlan, requests: Sequence[Request]) -> tuple[dict[str, float], str]:
    """What `compare` says of the last 16 positions of the first 4 prompts, against the run's own dtype. Nothing
    where no number has fewer bits, and nothing but the reason where memory is short. Builds either model in turn,
    so the run's engine must be closed.
    """
    config = plan.config
    own = config.executor.dtype
    if plan.kernels is None or (set(config.kv_dtypes) == {own} and config.executor.weights_dtype == own):
        return {}, ""
    kv = replace(config.kv, dtype="auto", key_dtype=None, value_dtype=None)
    reference = plan_engine(replace(config, kv=kv, executor=replace(config.executor, weights="auto")))
    needed, available = reference.weights.parameters + _WORKING_MEMORY, available_memory(plan.device)
    if needed > available:
        return {}, (
            f"quality/*: not measured, as the model in {own} needs {format_bytes(needed)} and "
            f"{plan.device} has {format_bytes(available)} available"
        )
    prompts = [list(request.prompt_token_ids[:_LONGEST]) for request in requests[:_PROMPTS]]
    positions = [range(max(0, len(prompt) - _POSITIONS), len(prompt)) for prompt in prompts]
    following = [prompt[place + 1] if place + 1 < len(prompt) else None
                 for prompt, places in zip(prompts, positions, strict=True) for place in places]  # fmt: skip
    ours, expected = (logits_of(compared, prompts, positions) for compared in (plan, reference))
    return compare(ours, expected, following), ""


def compare(
    computed: torch.Tensor, expected: torch.Tensor, following: Sequence[int | None] = ()
) -> dict[str, float]:
    """The metrics for logits `[positions, vocab]`; `following` is the token that came behind each position, None
    behind the last of a text.

    KL(P || Q) = sum P (log P - log Q) with P of the expected logits, in nats. The perplexity of a text is
    exp(-mean log P(token)).
    """
    error = (computed - expected).abs()
    ours, theirs = (logits.double().log_softmax(-1) for logits in (computed, expected))
    metrics = {
        "quality/logit_error_mean": float(error.mean()),
        "quality/logit_error_max": float(error.max()),
        "quality/top1_agreement": float((computed.argmax(-1) == expected.argmax(-1)).double().mean()),
        "quality/kl_mean": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
    }
    rows = [row for row, token in enumerate(following) if token is not None]
    if rows:
        tokens = torch.tensor([token for token in following if token is not None], device=computed.device)
        for name, logs in (("perplexity", ours), ("reference_perplexity", theirs)):
            metrics[f"quality/{name}"] = float(logs[rows, tokens].mean().neg().exp())
    return metrics


def logits_of(plan: EnginePlan, texts: Sequence[list[int]], positions: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[positions, vocab]` float32 at some positions of each text. Builds the plan's model."""
    model, spec = build_decoder(plan), kv_spec(plan.config, plan.model)
    parts = []
    for text, places in zip(texts, positions, strict=True):
        storage = KVStorage(spec, 1, len(text), plan.device, plan.computed_by.attention.layout)
        pool = ContiguousKVCachePool(1, len(text), storage)
        view = pool.view([pool.allocate_slot(len(text))], [len(text)])
        rows = torch.tensor(list(places), device=plan.device)
        parts.append(model.forward(torch.tensor(text, device=plan.device), view, rows).float())
        view.advance()
    return torch.cat(parts)
