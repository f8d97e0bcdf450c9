"""Tokenizers and chat templates of checkpoints: from a directory and from a GGUF file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from kvlab.config import ModelConfig
from kvlab.confined import Confined
from kvlab.core import Message
from kvlab.engine.text import TextStream
from kvlab.errors import ConfigError, TokenizerError
from kvlab.models.chat_template import ChatTemplate, Rendering
from kvlab.models.gguf_tokenizer import PRE_TOKENIZERS
from kvlab.models.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from tests.support.words import SPECIAL, VOCAB, make_tokenizer, setting, write_gguf_checkpoint, write_tokenizer

ASKED = (Message("system", "Be brief."), Message("user", "Who are you?"))
RENDERED = "<|start|>system\nBe brief.<|stop|>\n<|start|>user\nWho are you?<|stop|>\n<|start|>assistant\n"
TEXTS = st.one_of(st.text(max_size=30), st.text("aW é日🎈\u030112 \n'st<|>", max_size=30))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return make_tokenizer()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder / "directory")
    return {"directory": folder / "directory", "GGUF": write_gguf_checkpoint(folder / "words.gguf")}


@pytest.fixture(params=["directory", "GGUF"])
def tokenizer(request: pytest.FixtureRequest, sources: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(setting(sources[request.param]))


def test_text_has_the_tokens_of_the_checkpoints_own(sources: dict[str, Path], reference: Reference) -> None:
    both = [load_tokenizer(setting(path)) for path in sources.values()]

    @settings(max_examples=60)
    @given(text=TEXTS)
    def same(text: str) -> None:
        expected = reference.encode(text).ids
        for found in both:
            assert found.encode(text) == expected
            assert found.decode(expected) == reference.decode(expected)

    same()


def test_tokens_streamed_one_by_one_join_to_the_tokenizers_own_decoding(sources: dict[str, Path]) -> None:
    """Any tokens: those of a text cut anywhere, and bytes that are no text."""
    found = load_tokenizer(setting(sources["GGUF"]))

    @settings(max_examples=150)
    @given(
        data=st.one_of(
            TEXTS.map(lambda text: found.encode(text)), st.lists(st.integers(0, VOCAB - 1), max_size=40)
        ),
        start=st.sampled_from([(), (0, 5), tuple(found.encode("a text"))]),
    )
    def joins(data: list[int], start: tuple[int, ...]) -> None:
        stream = TextStream(found.decode, start)
        parts = [stream.add(token)[0] for token in data]
        assert "".join([*parts, stream.close()]) == found.decode(data)

    joins()


def test_bytes_of_tokens_join_to_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "a é日🎈"
    parts = [tokenizer.token_bytes(token) for token in tokenizer.encode_rendered(text)]
    assert b"".join(part or b"" for part in parts) == text.encode()
    assert len(parts) > len(text)  # some are a part of a character


@pytest.mark.parametrize(("entry", "expected"), [("<0xE2>", b"\xe2"), ("Ġâ", b" \xe2"), ("▁the", None), ("", None)])
def test_bytes_of_a_token_by_its_name_in_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, entry: str, expected: bytes | None
) -> None:
    monkeypatch.setattr(tokenizer, "entries", lambda ids: [entry])
    assert tokenizer.token_bytes(0) == expected


def test_a_long_text_has_the_same_tokens(tokenizer: Tokenizer, reference: Reference) -> None:
    text = "It's 12345, naïve 日本語\n\n  three   words " * 500
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.encode_rendered(text) == reference.encode(text, add_special_tokens=False).ids


def test_messages_are_what_the_template_makes_of_them(tokenizer: Tokenizer, reference: Reference) -> None:
    assert tokenizer.render(ASKED) == RENDERED
    assert tokenizer.encode_prompt(ASKED) == reference.encode(RENDERED).ids
    assert not tokenizer.render(ASKED, Rendering(reply=False)).endswith("assistant\n")
    assert tokenizer.decode(tokenizer.encode_prompt(ASKED)).startswith("system\nBe brief.\nuser")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_each_way_of_splitting_text_in_a_gguf(tmp_path: Path, pre: str) -> None:
    words = load_tokenizer(setting(write_gguf_checkpoint(tmp_path / "words.gguf", pre)))
    text = "It's DON'T 12345, naïve 日本語\n\n  three   words"
    assert words.decode(words.encode(text)) == text
    parts = [part for part, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("a's 12345\n b  c")]
    numbers = [part for part in parts if any(map(str.isdigit, part))]
    assert numbers == {"gpt-2": ["Ġ12345"], "llama-bpe": ["123", "45"], "qwen2": ["1", "2", "3", "4", "5"]}[pre]
    begins = words.encode("a")[0] == 0
    assert begins == (pre == "llama-bpe")  # with the token that begins every text, unless the file says


def test_what_a_file_says_of_the_first_token_holds(tmp_path: Path) -> None:
    path = write_gguf_checkpoint(tmp_path / "words.gguf", others={"tokenizer.ggml.add_bos_token": True})
    words = load_tokenizer(setting(path))
    assert (words.encode("a")[0], words.encode_rendered("a")[0] == 0) == (0, False)


def test_a_tokenizer_lent_to_a_model_has_a_text_for_each_of_its_tokens(
    sources: dict[str, Path], reference: Reference
) -> None:
    own = load_tokenizer(setting(sources["GGUF"]))
    lent = load_tokenizer(ModelConfig(name="qwen3_8b", tokenizer=str(sources["GGUF"])))
    ids = own.encode("a b")
    assert lent.encode("a b") == ids
    assert lent.render(ASKED) == RENDERED
    assert lent.decode([id_ + 3 * reference.get_vocab_size() for id_ in ids]) == own.decode(ids)


def refused(directory: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(setting(directory)).encode_prompt(ASKED)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestRefused:
    def test_random_weights(self) -> None:
        random = ModelConfig(name="qwen3_mini")
        text = "model.name=qwen3_mini has random weights and no tokenizer; use model=smollm2_135m (kvlab fetch"
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(random)
        assert str(caught.value).startswith(text)
        assert find_tokenizer(random) is None

    def test_a_lent_one_that_cannot_be_had(self, tmp_path: Path) -> None:
        """It was asked for: a run must not go on without."""
        with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
            find_tokenizer(ModelConfig(name="qwen3_8b", tokenizer=str(tmp_path)))
        with pytest.raises(ConfigError, match=r"model\.tokenizer=.*known: fetched:smollm2"):
            load_tokenizer(ModelConfig(name="qwen3_8b", tokenizer="fetched:unknown"))

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        assert refused(tmp_path).startswith(f"{tmp_path} has no tokenizer.json, so there is no text with it; use")

    def test_a_broken_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 5}}')
        assert refused(tmp_path).startswith(f"{tmp_path}/tokenizer.json cannot be read (")

    def test_broken_settings(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        assert refused(tmp_path) == f"{tmp_path}/tokenizer_config.json holds no JSON object"

    def test_no_template(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, template=None)
        assert refused(tmp_path).startswith(f"{tmp_path} has no chat template, which messages need; give a text")

    def test_a_broken_template(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, template="{% for message in messages %}\n{{ message.role }")
        assert f"{tmp_path}: its chat template is broken, in line 2: " in refused(tmp_path)
        assert load_tokenizer(setting(tmp_path)).encode("text")  # which needs none

    def test_messages_that_the_template_does_not_take(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
        assert (
            refused(tmp_path) == f"{tmp_path}: its chat template does not take the messages: roles must alternate"
        )

    def test_half_a_character(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(TokenizerError, match="cannot encode"):
            tokenizer.encode("half \ud800")

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ({"tokenizer.ggml.model": None}, "has no tokenizer (tokenizer.ggml.model)"),
            ({"tokenizer.ggml.model": "llama"}, "a tokenizer of kind 'llama'; only gpt2, byte-level BPE, is read"),
            (
                {"tokenizer.ggml.pre": "other"},
                "tokenizer.ggml.pre='other' says, which is unknown; known: gpt-2",
            ),
            ({"tokenizer.ggml.tokens": ["a", "a"]}, "has a vocabulary that contradicts itself"),
            ({"tokenizer.ggml.tokens": 5}, "has no tokenizer.ggml.tokens that is a list"),
            ({"tokenizer.ggml.merges": ["ab"]}, "has a vocabulary that contradicts itself"),
            ({"tokenizer.ggml.merges": ["nobody knows"]}, "has merges that its vocabulary does not"),
        ],
    )
    def test_a_gguf(self, tmp_path: Path, values: dict[str, object], reason: str) -> None:
        path = write_gguf_checkpoint(tmp_path / "words.gguf", others=values)
        assert reason in refused(path)


class TestTemplates:
    def render(self, text: str) -> str:
        return ChatTemplate(text, {"eos_token": "</s>"}, "here").render(ASKED)

    def test_have_what_templates_of_the_hub_use(self) -> None:
        text = "{{ eos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}"
        assert self.render(text + "{% endfor %}") == '</s>{"role": "user", "content": "Who are you?"}'
        assert self.render("{{ strftime_now('%Y') | length }}{{ tools is none }}") == "4True"

    @pytest.mark.parametrize(
        "text",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__subclasses__() }}",
            "{{ raise_exception.__globals__.x }}",
            "{{ messages.append(1) }}",
            "{{ 'a' * 10**9 }}",
            "{{ 'a' * 1000000000 }}",
            "{{ [0] * 1000000000 }}",
            "{% for i in range(10**9) %}{% endfor %}",
            "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
            "{{ messages[7].role.x }}",
            "{{ self.x.y }}",
        ],
    )
    def test_reach_nothing_and_fill_nothing(self, text: str) -> None:
        with pytest.raises(TokenizerError, match="here: its chat template does not take the messages: "):
            self.render(text)

    @pytest.mark.parametrize(
        "text",
        [
            "{{ 'a'.center(2000000000) }}",
            "{{ 'a'.zfill(2000000000) | length }}",
            "{{ '%2000000000d' % 1 }}",
            "{{ '%2000000000d' | format(1) }}",
            "{{ '{:2000000000}'.format(1) }}",
            "{% set many = 'a' * 100000 %}{{ many.replace('a', many) | length }}",
            "{% set n = namespace(s='a' * 9999) %}{% for i in range(20) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "{% set n = namespace(s='a' * 9999) %}{% for i in range(20) %}{% set n.s = n.s + n.s %}{% endfor %}",
        ],
    )
    def test_take_no_more_memory_than_their_process_has(self, text: str) -> None:
        with pytest.raises(TokenizerError, match=r"here: .*: it takes more than 512 MiB of memory"):
            self.render(text)
        assert self.render("{{ messages | length }}") == "2"

    @pytest.mark.parametrize(
        "text",
        [
            "{{ lipsum(n=1000000) | length }}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        ],
    )
    def test_take_no_more_time_than_their_process_has(self, text: str) -> None:
        brief = Confined("kvlab.models.template_process", memory=512 << 20, seconds=0.5)
        with pytest.raises(TokenizerError, match=r"here: .*: it takes more than 0\.5 seconds"):
            ChatTemplate(text, {}, "here", brief).render(ASKED)

    def test_nested_too_deep(self) -> None:
        with pytest.raises(TokenizerError, match="here: its chat template is broken"):
            self.render("{{ " + "(" * 5000 + ")" * 5000 + " }}")

    def test_a_file_of_its_own_and_several_by_name(self, tmp_path: Path) -> None:
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
        write_tokenizer(tmp_path, template=None, chat_template=several, eos_token={"content": SPECIAL[2]})
        assert load_tokenizer(setting(tmp_path)).render(ASKED) == SPECIAL[2]
        (tmp_path / "chat_template.jinja").write_text("own {{ messages | length }}")
        (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")  # another one
        assert load_tokenizer(setting(tmp_path)).render(ASKED) == "own 2"
