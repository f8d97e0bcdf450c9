"""The tokenizer in a GGUF file: byte-level BPE, put together again from its vocabulary and merges;
and as files that transformers reads, with the configuration, for programs without GGUF.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvlab.errors import TokenizerError, shown
from kvlab.models.gguf import GgufFile, read_gguf
from kvlab.models.gguf_config import config_values

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_WORDS += r"|\s+(?!\S)|\s+"


def _split(digits: int) -> pre_tokenizers.PreTokenizer:
    """Words as tiktoken splits them, numbers in groups of up to `digits`."""
    words = pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])


#: Values of tokenizer.ggml.pre: how a text is split before merges. Those of a name are the same for all its models.
PRE_TOKENIZERS = {
    "gpt-2": lambda: _gpt2(),
    "smollm": lambda: _gpt2(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _split(3),
    "qwen2": lambda: _split(1),
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file. Raises ValueError, whose text goes on after the file's name, where it has none, or
    one of another kind.
    """
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    if "tokenizer.ggml.model" not in file.metadata:
        raise ValueError("has no tokenizer (tokenizer.ggml.model)")
    if values["model"] != "gpt2":
        text = f"has a tokenizer of kind {shown(values['model'], repr)}"
        raise ValueError(f"{text}; only gpt2, byte-level BPE, is read")
    pre = values.get("pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        text = f"splits text as tokenizer.ggml.pre={shown(pre, repr)} says"
        raise ValueError(f"{text}, which is unknown; known: {', '.join(PRE_TOKENIZERS)}")
    tokens = _list(values, "tokens", str)
    kinds = _list(values, "token_type", int) if "token_type" in values else [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in _list(values, "merges", str)]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(kinds) != len(tokens) or not all(len(merge) == 2 for merge in merges):
        raise ValueError("has a vocabulary that contradicts itself (tokenizer.ggml.tokens, token_type, merges)")
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # a merge of tokens that there are not
        raise ValueError(f"has merges that its vocabulary does not ({shown(error)})") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    of_kind = {
        kind: [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(of_kind[_CONTROL])
    tokenizer.add_tokens(of_kind[_USER_DEFINED])
    bos = token_text(file, "bos")
    if bos is not None and values.get("add_bos_token", pre == "llama-bpe"):
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids[bos])])
        tokenizer.post_processor = template
    return tokenizer


def token_text(file: GgufFile, name: str) -> str | None:
    """A special token, as `bos` or `eos`, as text; None where the file names none."""
    tokens, index = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(tokens, list) or type(index) is not int or not 0 <= index < len(tokens):
        return None
    return str(tokens[index])


def _list(values: dict[str, Any], key: str, kind: type) -> list[Any]:
    values_of_key = values.get(key)
    if not isinstance(values_of_key, list) or not all(type(value) is kind for value in values_of_key):
        raise ValueError(f"has no tokenizer.ggml.{key} that is a list")
    return values_of_key


def tokenizer_files(path: Path) -> dict[str, str]:
    """The content of tokenizer.json, tokenizer_config.json and config.json, by name. Raises TokenizerError."""
    try:
        file = read_gguf(path)
        backend, config = gguf_tokenizer(file), config_values(file)
    except ValueError as error:
        raise TokenizerError(f"{path} {error}") from error
    tokens = {f"{name}_token": text for name in ("bos", "eos") if (text := token_text(file, name)) is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **tokens,
    }
    return {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": _json(settings),
        "config.json": _json(config),
    }


def _json(values: dict[str, object]) -> str:
    return json.dumps({name: value for name, value in values.items() if value is not None}, indent=2) + "\n"
