"""A session of tests reads nothing of its user's: shown by this session, and by one whose user has only poison."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.kernels.cpu.cache import cache_folder
from kvlab.kernels.cpu.native import load
from kvlab.peers.install import installed_python
from tests.support.isolation import KEPT, ROOT, SESSION, end, isolate

_SETTINGS = {
    "XDG_CACHE_HOME": "/dev/null/nonsense/cache",
    "XDG_CONFIG_HOME": "/dev/null/nonsense/config",
    "MLFLOW_TRACKING_URI": "nonsense://store",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "nonsense",
    "HF_HOME": "/dev/null/nonsense/hub",
    "HF_ENDPOINT": "nonsense://hub",
    "HUGGING_FACE_HUB_TOKEN": "nonsense",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "nonsense://traces",
    "OPENAI_BASE_URL": "nonsense://server",
    "OPENAI_API_KEY": "nonsense",
    "AWS_ACCESS_KEY_ID": "nonsense",
    "HYDRA_FULL_ERROR": "nonsense",
    "KVLAB_CACHE": "/dev/null/nonsense/kvlab",
    "KVLAB_NEW": "nonsense",
}
_READ_OR_WRITTEN = 0x1 | 0x2 | 0x4 | 0x20 | 0xC0 | 0x100 | 0x200  # IN_ACCESS, _MODIFY, _ATTRIB, _OPEN, ...


class TestThisSession:
    def test_has_a_home_of_its_own(self) -> None:
        home = Path(os.environ[SESSION])
        assert Path.home() == home
        assert home.name.startswith("kvlab-home-")
        assert not (home / ".gitconfig").exists()

    def test_keeps_what_it_builds_in_the_checkout_or_in_its_home(self) -> None:
        folder = cache_folder()
        assert folder in (ROOT / ".cache" / "kvlab", Path.home() / ".cache" / "kvlab")
        assert Path(load()._name).parent == folder
        assert {Path(os.environ[name]).parent for name in ("MPLCONFIGDIR", "TRITON_CACHE_DIR")} == {folder.parent}

    def test_knows_no_setting_and_no_engine_of_its_user(self) -> None:
        assert not {name for name, value in os.environ.items() if "nonsense" in value}
        assert installed_python("vllm") is None


class TestIsolate:
    def test_removes_settings_and_keeps_those_of_developers(self) -> None:
        kept = {**dict.fromkeys(KEPT, "1"), "PYTHONPATH": "src", "PATH": "/bin", "CXX": "g++"}
        found = {**_SETTINGS, **kept, "HOME": "/dev/null/nonsense"}
        home = isolate(found)
        assert home is not None
        try:
            assert list(home.iterdir()) == []
            assert not {name for name, value in found.items() if "nonsense" in value}
            assert kept.items() <= found.items()
            assert isolate(found) is None  # in what this session starts
        finally:
            end(home)
        assert not home.exists()

    def test_a_browser_and_pip_are_found_where_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "caches" / "ms-playwright").mkdir(parents=True)
        (tmp_path / ".config" / "pip").mkdir(parents=True)
        (tmp_path / ".config" / "pip" / "pip.conf").touch()
        found = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "caches")}
        home = isolate(found)
        assert home is not None
        end(home)
        assert found["PLAYWRIGHT_BROWSERS_PATH"] == str(tmp_path / "caches" / "ms-playwright")
        assert found["PIP_CONFIG_FILE"] == str(tmp_path / ".config" / "pip" / "pip.conf")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs inotify")
def test_nothing_of_a_poisoned_home_is_read(tmp_path: Path) -> None:
    """Which a session with a worker and processes of its own gets: none of them opens a file or lists a folder."""
    poison(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != SESSION} | _SETTINGS
    del environment["XDG_CACHE_HOME"]  # the home's then
    environment |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    asked = ["tests/unit/test_isolation.py::TestThisSession"]
    asked += ["tests/peers/test_process.py::test_an_engine_that_will_not_start", "-k", "ThisSession or package"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", *asked]
    with Watch(tmp_path) as watch:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "4 passed" in done.stdout, done.stdout + done.stderr
        assert "4 checks in 4 cases" in done.stdout
        assert watch.seen() == []
        (tmp_path / "mlflow.db").read_bytes()
        assert watch.seen() == ["mlflow.db"]  # it is told what is read


def poison(home: Path) -> None:
    """What another version of kvlab and other programs have left, all of it damaged."""
    caches, settings = home / ".cache", home / ".config"
    cache = caches / "kvlab"
    python = cache / "engines" / "vllm" / "bin" / "python"
    library = cache / Path(load()._name).name
    damaged = (
        *(library, library.with_name(f"{library.name}.sha256"), python, cache / "rates.json", home / "mlflow.db"),
        *(settings / "matplotlib" / "matplotlibrc", settings / "git" / "config", home / ".gitconfig"),
        *(caches / "huggingface" / "token", home / ".triton" / "cache" / "a", home / ".aws" / "credentials"),
    )
    for file in damaged:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\0 damaged")
    python.chmod(0o700)


class Watch:
    """Notes what is opened, read or changed in a folder and those below it, by Linux's inotify."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folder = folder

    def __enter__(self) -> Watch:
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        for each in (self._folder, *(path for path in self._folder.rglob("*") if path.is_dir())):
            if self._libc.inotify_add_watch(self._descriptor, os.fsencode(each), _READ_OR_WRITTEN) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self.seen()  # the listing above
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def seen(self) -> list[str]:
        """The names of files, each once, since the last call; of a folder itself the name is empty."""
        found: dict[str, None] = {}
        while data := self._read():
            start = 0
            while start < len(data):
                *_, size = struct.unpack_from("iIII", data, start)
                found[data[start + 16 : start + 16 + size].rstrip(b"\0").decode()] = None
                start += 16 + size
        return list(found)

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 2**16)
        except BlockingIOError:
            return b""
