"""The cache of compiled kernels: nothing is loaded that others may have written, and nothing that was cut off."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import os
import pwd
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlab.errors import KernelError
from kvlab.kernels.cpu import cache, native
from tests.kernels.stand_in_compiler import LIBRARY, Compiler, alone, files, load, mode


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(native, "_run", compiler.run)
    monkeypatch.setattr(native, "_open", compiler.load)
    monkeypatch.setattr(native, "_instruction_set", lambda _: "portable")
    monkeypatch.setattr(native, "_int8_path", lambda _: "portable")
    monkeypatch.setattr(native, "_take_paths", lambda *_: None)
    monkeypatch.setattr(native, "_find_compiler", lambda _: "/bin/sh")
    return compiler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, not made yet, two levels below one that is."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "caches" / "kvlab"))
    return tmp_path / "caches" / "kvlab"


def test_the_folder_is_this_users_alone(
    compiler: Compiler, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        load()
    finally:
        os.umask(before)
    assert [mode(folder.parent), mode(folder)] == [0o700, 0o700]
    assert [mode(path) & 0o077 for path in folder.iterdir()] == [0, 0, 0]
    assert files(folder) == [".lock", ".sha256", ".so"]
    load()
    assert len(compiler.linked) == 1
    assert compiler.loaded[0] == compiler.loaded[1]
    assert compiler.loaded[0].parent == folder
    assert caplog.messages == []


def test_the_digest_is_that_of_sha256sum(compiler: Compiler, folder: Path) -> None:
    load()
    (library,) = folder.glob("*.so")
    digest = library.with_name(f"{library.name}.sha256").read_text()
    assert digest == f"{hashlib.sha256(LIBRARY).hexdigest()}  {library.name}\n"


def _unlink_digest(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").unlink()


def _empty_digest(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").write_text("")


def _link(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to(library.with_name("elsewhere"))
    library.with_name("elsewhere").write_bytes(b"planted")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda library: library.write_bytes(LIBRARY[:4]), "its SHA-256 is not the one that was kept beside it"),
        (lambda library: library.write_bytes(b""), "its SHA-256 is not the one that was kept beside it"),
        (lambda library: library.chmod(0o722), "other users may write to"),
        (_link, "its SHA-256 is not the one that was kept beside it"),
        (_unlink_digest, "there is no kernels-"),
        (_empty_digest, "its SHA-256 is not the one that was kept beside it"),
    ],
    ids=["cut off", "empty", "writable", "link", "no digest", "empty digest"],
)
def test_a_library_that_may_be_another_is_built_again(
    compiler: Compiler, folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], reason: str
) -> None:
    load()
    (library,) = folder.glob("*.so")
    spoil(library)
    load()
    assert len(compiler.linked) == 2
    (message,) = caplog.messages
    assert message.startswith(f"{library} is not loaded, but built again: ")
    assert reason in message
    load()
    assert len(compiler.linked) == 2
    assert len(caplog.messages) == 1


def _open_to_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)


def _of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        state = list(real(path))
        return os.stat_result([*state[:4], 4242, *state[5:]] if path == folder else state)

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.mark.parametrize("level", ["", ".."])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_open_to_all, "other users may write to {level} (chmod go-w {level} ends that)"),
        (_of_another_user, "{level} belongs to another user, 4242"),
    ],
)
def test_a_folder_that_others_may_write_to_is_not_used(
    compiler: Compiler,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    load()
    kept = {path: path.stat() for path in folder.iterdir()}
    unsafe = (folder / level).resolve()
    spoil(unsafe, monkeypatch)
    load()
    assert caplog.messages == [alone(reason.format(level=unsafe))]
    private = compiler.loaded[1].parent
    assert private.name.startswith("kvlab-")
    assert not private.exists()
    assert {path: path.stat() for path in folder.iterdir()} == kept


def test_nothing_is_made_below_a_folder_that_others_may_write_to(
    compiler: Compiler, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    load()
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == [alone(f"other users may write to {tmp_path} (chmod go-w {tmp_path} ends that)")]


def test_below_a_folder_with_the_sticky_bit_is_safe(
    compiler: Compiler, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o1777)
    load()
    assert compiler.loaded[0].parent == folder
    assert caplog.messages == []


@pytest.mark.parametrize(("members", "safe"), [([], True), (["somebody"], False)])
def test_a_group_of_this_user_alone_may_write(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], safe: bool
) -> None:
    """As where the umask is 002 and each user has a group."""
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    user = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((user, "x", 1, members)))
    load()
    assert (compiler.loaded[0].parent == folder) is safe


def test_a_link_to_a_safe_folder_is_followed(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "link"))
    load()
    assert compiler.loaded[0].parent == tmp_path / "target"
    assert caplog.messages == []


def _file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.parent.mkdir()
    folder.write_text("")
    return f"{folder} is not a folder"


def _loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.parent.symlink_to(folder.parent)
    return "there is no cache folder: Symlink loop"


def _no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("KVLAB_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    return "there is no cache folder: Could not determine home directory"


def _read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    if os.geteuid() == 0:  # who may write anywhere
        real = os.open

        def refused(path: Path, *args: int, **kwargs: int) -> int:
            if Path(path).parent == folder:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refused)
    folder.chmod(0o500)
    return str(folder / "build.lock")


@pytest.mark.parametrize("spoil", [_file, _loop, _no_home, _read_only])
def test_without_a_folder_kernels_are_compiled_for_the_process(
    compiler: Compiler,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    reason = spoil(folder, monkeypatch)
    load()
    assert len(compiler.loaded) == 1
    (message,) = caplog.messages
    assert message.startswith("native kernels are compiled for this process alone: ")
    assert reason in message


def test_an_unsafe_temporary_folder_is_the_end_of_it(
    compiler: Compiler, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KernelError, match=r"in a temporary folder: other users may write to "):
        load()
    assert compiler.loaded == []


def test_a_library_in_a_folder_that_cannot_be_written_to_is_loaded(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image of a container."""
    load()
    monkeypatch.setattr(native, "building", lambda _: pytest.fail("asked for the lock"))
    folder.chmod(0o500)
    load()
    folder.chmod(0o700)
    assert len(compiler.linked) == 1
    assert caplog.messages == []


def test_processes_that_start_at_once_compile_once(compiler: Compiler, folder: Path) -> None:
    inside = threading.Semaphore(0)

    def wait(linking: bool) -> None:
        if linking:
            inside.release()
            time.sleep(0.2)  # the other one asks for the lock meanwhile

    compiler.hook = wait
    first, second = (threading.Thread(target=native._find_or_build, args=(None, "native", "")) for _ in range(2))
    first.start()
    assert inside.acquire(timeout=60)
    second.start()
    first.join()
    second.join()
    assert len(compiler.loaded) == 2
    assert len(compiler.linked) == 1


def test_a_lock_that_is_never_released(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_LOCK_S", 0.1)
    folder.mkdir(parents=True)
    with cache.building(folder):
        load()
    assert caplog.messages == [alone(f"another process has held {folder}/build.lock for 0.1 s")]
    assert len(compiler.loaded) == 1


def test_without_locks_a_library_still_appears_complete(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    load()
    load()
    assert len(compiler.linked) == 1


@pytest.mark.parametrize("stage", ["compiling", "linking", "moving"])
def test_killed_while_it_is_made_the_next_process_makes_it(
    compiler: Compiler,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stage: str,
) -> None:
    def die(linking: bool) -> None:
        if linking is (stage == "linking"):
            os.kill(os.getpid(), signal.SIGKILL)

    real = Path.replace

    def replace(path: Path, target: Path) -> None:
        real(path, target)
        die(False)

    child = os.fork()
    if child == 0:
        try:
            if stage == "moving":
                monkeypatch.setattr(Path, "replace", replace)
            else:
                compiler.hook = die
            load()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert any(path.name.startswith("build-") for path in folder.iterdir())
    load()
    assert files(folder) == [".lock", ".sha256", ".so"]
    assert len(compiler.loaded) == len(compiler.linked) == 1
    assert caplog.messages == []
