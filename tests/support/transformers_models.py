"""Tiny random models of families that kvlab has no decoder for, as transformers writes and runs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.config import AttentionConfig, EngineConfig, ExecutorConfig, KVConfig, ModelConfig, SchedulerConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.protocol import EngineStats
from kvlab.lab.run.drive import drive

VOCAB = 150
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: What is special about each family. Windows are shorter than the prompts, heads not always hidden_size / heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 20, "hidden_size": 64},
    "olmo2": {"rms_norm_eps": 1e-3},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
        "attention_bias": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"use_bias": True, "sliding_window": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
#: Of which kvlab has a decoder of its own, too.
OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
#: Whose checkpoints have other names or pieces than the model, or whose V is smaller than K.
UNLIKE: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


@dataclass(frozen=True)
class Written:
    """A model on disk, and as transformers runs it in float32."""

    directory: Path
    reference: Any  # transformers' PreTrainedModel

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """transformers' own greedy tokens."""
        ids = torch.tensor([prompt])
        found = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens


def write_model(family: str, directory: Path) -> Written:
    """Every parameter random, so large that each token depends on its whole prompt."""
    config = AutoConfig.for_model(family, **{**SIZES, **(FAMILIES | UNLIKE | OWN).get(family, {})})
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in reference.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if name.endswith("bias") else (0.5, 1.5)))
    reference.save_pretrained(directory)
    return Written(directory, reference)


def engine_config(
    directory: Path, kv: KVConfig, backend: str = "auto", implementation: str = "transformers", **scheduler: Any
) -> EngineConfig:
    """An engine in float32 on one thread, with transformers' decoder whatever the family."""
    return EngineConfig(
        ModelConfig(
            "tiny", family=None, path=str(directory), weights=None, max_seq_len=128, implementation=implementation
        ),
        kv=kv,
        executor=ExecutorConfig(dtype="float32", device="cpu", threads=1),
        attention=AttentionConfig(backend),
        scheduler=SchedulerConfig(**scheduler),
    )


@dataclass(frozen=True)
class Memory:
    """A cache, and a sign that what it is for has happened."""

    kv: KVConfig
    happened: Callable[[EngineStats], bool] = lambda stats: True


MEMORIES = {
    "contiguous slots": Memory(KVConfig("contiguous")),
    "pages": Memory(KVConfig(block_size=8, num_blocks=80, prefix_sharing=False)),
    "shared pages": Memory(KVConfig(block_size=4, num_blocks=160), lambda stats: (stats.hit_tokens or 0) >= 40),
    "so few pages that some are preempted": Memory(
        KVConfig(block_size=4, num_blocks=17, prefix_sharing=False, windows=False),
        lambda stats: bool(stats.preemptions),
    ),
}
OUTPUT = 10  # tokens of an answer


def _prompts() -> list[tuple[int, ...]]:
    """Three with a common beginning, and others, shorter and longer than the windows of the models."""
    draw = random.Random(0)
    common = draw.choices(range(VOCAB), k=24)
    lengths = [(common, 1), (common, 9), ([], 5), (common, 20), ([], 33), ([], 50)]
    return [tuple(start + draw.choices(range(VOCAB), k=own)) for start, own in lengths]


PROMPTS = _prompts()


def expected_tokens(written: Written) -> list[list[int]]:
    """transformers' own answers, which depend on their prompts."""
    found = [written.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert len(set(map(tuple, found))) == len(PROMPTS)
    return found


def answers(engine: EngineCore) -> list[list[int]]:
    """An engine's answers to all prompts at once."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    requests = [Request(f"r{index}", prompt, params) for index, prompt in enumerate(PROMPTS)]
    return [list(record.output_token_ids) for record in drive(engine, requests).records]


def served(written: Written, memory: Memory) -> list[list[int]]:
    """The answers from this memory, prompts cut into chunks. What the memory is for has to happen."""
    limits: dict[str, Any] = {"max_batch_size": 4, "max_batched_tokens": 28, "admission_reserve": 0.0}
    engine = build_engine(plan_engine(engine_config(written.directory, memory.kv, **limits)))
    found = answers(engine)
    assert memory.happened(engine.stats())
    return found
