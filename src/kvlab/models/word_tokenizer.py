"""A tokenizer for models that have none here: common words, and bytes for all else. Nothing is downloaded."""

from functools import lru_cache
from importlib.resources import files
from itertools import product
from string import ascii_lowercase

from kvlab.models.chat_template import ChatTemplate
from kvlab.models.tokenizer import Tokenizer

SOURCE = "kvlab's own tokenizer"
#: Common English words, most frequent first: tokens beside bytes.
WORDS = tuple(files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split())
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SPACE = "\u0120"  # what stands for a space in byte-level vocabularies
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache(maxsize=2)
def word_tokenizer(vocab_size: int) -> Tokenizer | None:
    """Byte-level BPE with at most so many tokens, and a plain chat template: common words with and without a space
    are a token each, other words one for each two letters. None where the bytes alone are more.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    words = [form for word in WORDS for form in (_SPACE + word, word)]
    words += [*pairs, *(form for word in WORDS for form in (_SPACE + word.capitalize(), word.capitalize()))]
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if len(tokens) > vocab_size:
        return None
    known = list(dict.fromkeys([*tokens, *words]))[:vocab_size]
    ids = {token: index for index, token in enumerate(known)}
    merges = [(pair[0], pair[1]) for pair in pairs if pair in ids]
    backend = Backend(models.BPE(ids, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    template = lru_cache(maxsize=1)(lambda: ChatTemplate(_TEMPLATE, {}, SOURCE))
    return Tokenizer(backend, SOURCE, template).lent()
