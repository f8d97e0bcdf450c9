"""Blocks in files: what comes back is what was stored for this key by this model, or nothing."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.errors import ConfigError, TierError
from kvlab.kv.tiers.base import KEY_BYTES, Key, Page
from kvlab.kv.tiers.disk import DiskStore

IDENTITY = {"model": "tiny", "kv.dtype": "float32", "kv.block_size": "16"}
KEY, OTHER = bytes(range(KEY_BYTES)), bytes(range(1, KEY_BYTES + 1))
PAGE = np.arange(300, dtype=np.uint16).view(np.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "blocks", IDENTITY, 4)
    yield store
    store.close()


def read(store: DiskStore, key: Key = KEY, size: int = len(PAGE)) -> Page:
    page = np.zeros(size, dtype=np.uint8)
    store.read(0, key, page)
    return page


def is_missed(store: DiskStore, key: Key = KEY, size: int = len(PAGE)) -> bool:
    with pytest.raises((TierError, OSError)):
        read(store, key, size)
    return True


def file_of(store: DiskStore, key: bytes = KEY) -> Path:
    (file,) = store.directory.rglob(f"{key.hex()}.kv")
    return file


def file_exists(store: DiskStore, key: Key) -> bool:
    return any(store.directory.rglob(f"{key.hex()}.kv"))


def test_a_block_is_found_by_the_next_process(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    store.write(0, KEY, PAGE)
    store.close()
    again = DiskStore(store.directory, IDENTITY, 4)
    assert again.kept() == [KEY]
    assert (read(again) == PAGE).all()
    assert is_missed(again, OTHER)
    assert not caplog.records
    again.close()


def test_the_block_not_used_for_longest_comes_first(store: DiskStore) -> None:
    keys = [bytes([number]) * KEY_BYTES for number in range(3)]
    for number, key in enumerate(keys):
        store.write(number, key, PAGE)
        os.utime(file_of(store, key), (number, number))
    read(store, keys[0])
    assert store.kept() == [keys[1], keys[2], keys[0]]
    store.close()
    smaller = DiskStore(store.directory, IDENTITY, 2)
    assert smaller.kept() == smaller.kept() == [keys[2], keys[0]]
    assert not file_exists(store, keys[1])
    smaller.close()


@pytest.mark.parametrize("place", [0, 8, 12, 16, 30, 60, 88, -1])
def test_a_block_with_a_wrong_byte_is_a_miss_and_goes(
    store: DiskStore, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(0, KEY, PAGE)
    file = file_of(store)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert is_missed(store)
    assert not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is not whole and was removed; such blocks are computed again"
    ]


@pytest.mark.parametrize("size", [0, 40, 88 + 599, 88 + 601])
def test_a_block_that_is_cut_or_too_long_is_a_miss(store: DiskStore, size: int) -> None:
    store.write(0, KEY, PAGE)
    file = file_of(store)
    file.write_bytes((file.read_bytes() + b"x")[:size])
    assert is_missed(store)
    assert not file.exists()


def test_a_block_of_another_size_or_key_is_a_miss(store: DiskStore) -> None:
    store.write(0, KEY, PAGE)
    assert is_missed(store, size=200)
    store.write(0, KEY, PAGE)
    store.write(1, OTHER, PAGE)
    file_of(store).replace(file_of(store, OTHER))
    assert is_missed(store, OTHER)


def test_a_place_has_one_page(store: DiskStore) -> None:
    store.write(0, KEY, PAGE)
    store.write(0, OTHER, PAGE)
    assert store.kept() == [OTHER]
    store.remove(0, OTHER)
    assert store.kept() == []


def test_a_link_in_place_of_a_block_is_not_followed(store: DiskStore, tmp_path: Path) -> None:
    store.write(0, KEY, PAGE)
    file, elsewhere = file_of(store), tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert is_missed(store)
    assert elsewhere.exists()
    assert store.kept() == []


def test_a_full_disk_stops_writing_and_says_so_once(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(0, KEY, PAGE)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        store.write(1, OTHER, PAGE)
    monkeypatch.undo()
    with pytest.raises(TierError, match="takes no more pages"):
        store.write(1, OTHER, PAGE)
    assert (read(store) == PAGE).all()
    assert not list(store.directory.glob("temporary-*"))
    assert [record.getMessage() for record in caplog.records] == [
        f"kv.offload_dir={store.directory}: No space left on device; no more blocks are written to it; "
        "those that it has are read on"
    ]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("what", ["a directory in place of a file", "a file in place of a folder"])
def test_what_is_in_the_way_of_one_block_stops_no_other(
    store: DiskStore, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    folder = store.directory / KEY.hex()[:2]
    if what.startswith("a directory"):
        (folder / f"{KEY.hex()}.kv").mkdir(parents=True)
    else:
        folder.touch()
    for _ in range(2):
        with pytest.raises(OSError, match=r"directory|exists"):
            store.write(0, KEY, PAGE)
    store.write(1, OTHER, PAGE)
    assert (read(store, OTHER) == PAGE).all()
    assert not list(store.directory.glob("temporary-*"))
    assert len(caplog.records) == 1


def test_a_fifo_in_place_of_a_block_is_a_miss(store: DiskStore) -> None:
    store.write(0, KEY, PAGE)
    file = file_of(store)
    file.unlink()
    os.mkfifo(file)
    assert is_missed(store)


@pytest.mark.parametrize("block", [4096, 1 << 16])
def test_a_directory_that_had_room_has_room_again(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Whatever the file system's blocks are: each file takes whole ones."""
    free = 0

    def disk(_: object) -> object:
        taken = sum(1 for path in store.directory.rglob("*") if path.is_dir() or path.suffix == ".kv")
        return SimpleNamespace(f_frsize=block, f_bavail=free - taken)

    monkeypatch.setattr(os, "statvfs", disk)
    free = store.room(len(PAGE))[0] // block
    for place in range(4):
        store.write(place, bytes([place] * KEY_BYTES), PAGE)
        needed, left = store.room(len(PAGE))
        assert needed <= left
    assert needed == 0


def test_what_a_killed_process_left_half_written_goes(store: DiskStore) -> None:
    store.close()
    (store.directory / "temporary-00").write_bytes(b"half")
    again = DiskStore(store.directory, IDENTITY, 4)
    assert not list(store.directory.glob("temporary-*"))
    again.close()


def test_a_process_that_was_killed_before_it_named_its_model_leaves_the_directory_free(tmp_path: Path) -> None:
    for name in ("lock", "temporary-identity"):
        (tmp_path / name).write_bytes(b"")
    DiskStore(tmp_path, IDENTITY, 4).close()


def test_files_are_for_their_user_alone(store: DiskStore) -> None:
    store.write(0, KEY, PAGE)
    assert all(not path.stat().st_mode & 0o077 for path in store.directory.rglob("*"))


def refusal(directory: Path, **identity: str) -> str:
    with pytest.raises(ConfigError) as caught:
        DiskStore(directory, IDENTITY | identity, 4)
    return str(caught.value).replace(str(directory), "DIR")


def test_a_directory_of_another_model_is_refused_with_both(store: DiskStore) -> None:
    store.write(0, KEY, PAGE)
    store.close()
    assert refusal(store.directory, **{"model": "other", "kv.dtype": "int8"}) == (
        "kv.offload_dir=DIR: holds blocks of model=tiny, and this engine has model=other; name another directory, "
        "or delete this one"
    )
    assert "of model=tiny, kv.dtype=float32, and this engine has model=tiny, kv.dtype=int8;" in refusal(
        store.directory, **{"kv.dtype": "int8"}
    )
    assert "model=tiny, weights=None, and this engine has model=tiny, weights=1" in refusal(
        store.directory, weights="1"
    )
    assert store.kept() == [KEY]


def test_directories_that_cannot_be_used_are_refused(store: DiskStore, tmp_path: Path) -> None:
    assert refusal(store.directory) == "kv.offload_dir=DIR: another engine uses it; give each its own directory"
    link = tmp_path / "link"
    link.symlink_to(store.directory)
    assert refusal(link) == f"kv.offload_dir=DIR: is a link to {store.directory}; name that directory itself"
    (tmp_path / "photo.png").touch()
    assert refusal(tmp_path) == (
        "kv.offload_dir=DIR: has files that are not kvlab's (blocks); name a directory of its own"
    )
    assert not (tmp_path / "lock").exists()
    assert "is not a folder; name another directory" in refusal(tmp_path / "photo.png")
    assert "is not a folder; name another directory" in refusal(tmp_path / "photo.png" / "below")
    assert refusal(Path("/proc/kvlab")).startswith("kv.offload_dir=DIR: cannot be used: No such file or directory")
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert f"other users may write to {shared} (chmod go-w {shared} ends that)" in refusal(shared).replace(
        "DIR", str(shared)
    )
    store.close()
    identity = store.directory / "kvlab-offload.json"
    for text in ("[" * 20_000, '{"a":' * 20_000, " " * 10**6):  # nested too deep, too long
        identity.write_text(text)
        assert "its kvlab-offload.json is not of this version" in refusal(store.directory)
    identity.unlink()
    os.mkfifo(identity)
    assert "its kvlab-offload.json is not of this version" in refusal(store.directory)
    identity.unlink()
    (store.directory / "kvlab-offload.json").write_text("[1]")
    assert refusal(store.directory) == (
        "kv.offload_dir=DIR: its kvlab-offload.json is not of this version of kvlab; name another directory, or "
        "delete this one"
    )
