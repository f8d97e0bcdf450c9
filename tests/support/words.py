"""A tiny checkpoint that reads and writes text: its weights are random, its tokenizer is a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.config import ModelConfig
from tests.support.gguf_files import write_gguf

SPECIAL = ("<|end|>", "<|start|>", "<|stop|>")
END = 2  # ends a sequence
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXT = (
    "Who are you? I am a model of a few numbers, and the words that I know are few. " * 3 + "Naïve 日本語 🎈 12345."
)
VOCAB = 400
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def make_tokenizer(digits: bool = True) -> Tokenizer:
    """Byte-level BPE, as SmolLM2's."""
    found = Tokenizer(models.BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True), bytes_alone] if digits else [bytes_alone]
    found.pre_tokenizer = pre_tokenizers.Sequence(parts)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        show_progress=False,
        special_tokens=[AddedToken(text, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator([TEXT], trainer)
    return found


def write_tokenizer(directory: Path, template: str | None = TEMPLATE, **settings: Any) -> None:
    """The files of the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    values = {"eos_token": SPECIAL[END], "bos_token": None, **settings}
    if template is not None:
        values["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def make_model(**shape: int) -> Any:
    """Llama in 50 thousand parameters, or of another `shape`, loud enough that each token depends on those before
    it.
    """
    torch.manual_seed(0)
    described = AutoConfig.for_model("llama", vocab_size=VOCAB, eos_token_id=END, **SHAPE | shape)
    model = AutoModelForCausalLM.from_config(described).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_checkpoint(directory: Path, template: str | None = TEMPLATE, **shape: int) -> Path:
    """Weights, configuration, tokenizer and chat template."""
    make_model(**shape).save_pretrained(directory)
    write_tokenizer(directory, template)
    return directory


def gguf_metadata(pre: str) -> dict[str, Any]:
    """The tokenizer as GGUF keeps it."""
    state = json.loads(make_tokenizer().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf_checkpoint(path: Path, pre: str = "smollm", others: dict[str, Any] | None = None) -> Path:
    """The same in one file; `others` are values in place of its own."""
    write_gguf(make_model(), path, metadata=gguf_metadata(pre) | (others or {}))
    return path


def setting(where: Path | str, max_seq_len: int = 512) -> ModelConfig:
    """`model=checkpoint` with this path."""
    return ModelConfig(name="words", family=None, path=str(where), weights=None, max_seq_len=max_seq_len)
