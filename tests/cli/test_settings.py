"""Settings of a command's own: Hydra's grammar, types, errors, help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import kvlab.cli.route
import kvlab.cli.watch
from kvlab.cli.settings import (
    command,
    help_page,
    read_settings,
    setting,
    unknown_setting,
    warn_of_repeats,
)
from kvlab.config import TrackingConfig
from kvlab.errors import ConfigError
from tests.support.commands import call


@dataclass
class Settings:
    name: str | None = setting(None, "a name", "NAME")
    count: int = setting(1, "a number", "N")
    share: float = setting(0.5, "a number that may be in percent", "X")
    again: bool = setting(False, "once more", "true")
    words: list[str] = setting([], "some words", "A,B")
    sizes: list[int] = setting([], "some numbers", "N,N")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("count", self.count, "must be at least 1")


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("name=sqlite:///a.db?x=1", "name", "sqlite:///a.db?x=1"),
        ("name='a, b'", "name", "a, b"),
        ('name="it\'s"', "name", "it's"),
        ("name=007", "name", "007"),
        ("name=null", "name", None),
        ("name=", "name", ""),
        ("--name=x", "name", "x"),
        ("count=3", "count", 3),
        ("share=5%", "share", 5.0),
        ("--again", "again", True),
        ("again=TRUE", "again", True),
        ("words=a/*,b.c", "words", ["a/*", "b.c"]),
        ("words=['a,b', c]", "words", ["a,b", "c"]),
        ("words=x < -5%, y > 3", "words", ["x < -5%, y > 3"]),
        ("words=[http://[::1]:1,http://a:2]", "words", ["http://[::1]:1", "http://a:2"]),
        ("sizes=[1,2]", "sizes", [1, 2]),
        ("sizes=null", "sizes", []),
    ],
)
def test_a_value_is_read_as_hydra_would(argument: str, key: str, value: object) -> None:
    settings, others = read_settings(Settings, [argument, "model=qwen3_tiny", "kv.block_size=8"])
    assert getattr(settings, key) == value
    assert others == ["model=qwen3_tiny", "kv.block_size=8"]


def test_lists_add_up_and_the_last_of_others_counts() -> None:
    settings, _ = read_settings(Settings, ["words=a", "count=2", "words=b,c", "count=3", "tracking.uri=x"])
    assert (settings.words, settings.count, settings.tracking.uri) == (["a", "b", "c"], 3, "x")
    assert read_settings(Settings, [])[0] == Settings()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("count=many", "count=many: must be a whole number"),
        ("count=0", "count=0: must be at least 1"),
        ("share=much", "share=much: is not a number"),
        ("again=perhaps", "again=perhaps: must be true or false"),
        ("sizes=1,a", "sizes=1,a: must be a whole number"),
        ("tracking.timeout_s=0", "tracking.timeout_s=0.0: must be more than 0"),
        ("--fast", "option=--fast: unknown; known: --again, "),
        ("--count", "option=--count: unknown"),
        ("--max-model-len", "option=--max-model-len: unknown; write model.max_seq_len=...; known: --again, "),
        ("--config-dir", "option=--config-dir: is for kvlab run; every command takes hydra.searchpath="),
        ("--speed=3", "option=--speed=3: unknown"),
    ],
)
def test_a_mistake_names_key_and_value(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(Settings, [argument])
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "kv.num_blocks=64 seed=1 kv.num_blocks=128",
            "kv.num_blocks is given 2 times, and kv.num_blocks=128 counts",
        ),
        ("kv.num_blocks=1,2 +kv.num_blocks=3", "kv.num_blocks is given 2 times, and +kv.num_blocks=3 counts"),
        ("model=a model=b model=c", "model is given 3 times, and model=c counts"),
        ("tags.token=secret tags.token=secret2", "tags.token is given 2 times, and tags.token=*** counts"),
        ("--count=1 count=2", "count is given 2 times, and count=2 counts"),
        ("hardware=l40s ~hardware", "hardware is given 2 times, and ~hardware counts"),
        ("--most-words=1 most_words=2", "most_words is given 2 times, and most_words=2 counts"),
        ("--words=a words=b", ""),  # a list, which has both
        ("seed=1 seed=1", ""),
        ("run=1 run=2 a/b=1 a/b=2", ""),
    ],
)
def test_a_setting_that_is_given_twice_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_repeats(words.split(), ("count", "most_words", "words"), ("words",))
    assert capsys.readouterr().err == (f"warning: {said}\n" if said else "")


def test_an_unknown_key_names_the_closest() -> None:
    assert str(unknown_setting(Settings, "cuont=3")).startswith(
        "cuont=3: unknown; did you mean count? known: name, "
    )


def test_the_help_page_has_every_setting() -> None:
    page = help_page("What it does.\n", Settings)
    assert page.startswith("What it does.\n\n  name=NAME   a name\n")
    assert all(f"  {line}" in page for line in ("count=N ", "share=X ", "again=true ", "words=A,B ", "sizes=N,N "))


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [(["--help"], 0, "name=NAME"), ([], 2, "name=NAME"), (["count=0"], 2, ""), (["count=7"], 7, "")],
)
def test_a_command_ends_with_a_code(
    arguments: list[str], code: int, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as ended:
        command("Page", Settings, bare=False, alone=True)(lambda settings: settings.count)()
    shown = capsys.readouterr()
    assert ended.value.code == code
    assert out in shown.out
    assert ("error: count=0: must be at least 1" in shown.err) is (arguments == ["count=0"])


@pytest.mark.parametrize("main", [kvlab.cli.route.main, kvlab.cli.watch.main])
def test_a_help_page_says_where_a_key_comes_from(main: Callable[[], None]) -> None:
    assert "  api_key='${oc.env:NAME}' " in call(main, "--help").output  # and hides no key that there is not


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @command("Page", Settings)
    def interrupted(_settings: Settings, _others: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["kvlab", "count=3"])
    with pytest.raises(SystemExit) as ended:
        interrupted()
    assert ended.value.code == 130
