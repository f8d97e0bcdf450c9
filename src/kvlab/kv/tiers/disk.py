"""Blocks in files of a directory, which outlive the process."""

import fcntl
import hashlib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from zlib import crc32

from kvlab.errors import ConfigError, TierError, printable
from kvlab.kernels.cpu.cache import check_folder
from kvlab.kv.tiers.base import KEY_BYTES, Key, Page, PageStore

_FORMAT = 1  # of the files
_MAGIC = b"kvlab-kv"
# Magic, format, checksum and bytes of the page, its key, digest of whose it is.
_HEADER = Struct(f"<8sIIQ{KEY_BYTES}s32s")
_IDENTITY, _LOCK, _TEMPORARY = "kvlab-offload.json", "lock", "temporary-"
_PAGE_FILE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.kv")
_FOLDERS = 256  # by the first byte of a key
_LARGEST_IDENTITY = 1 << 16  # bytes
_KEY = "kv.offload_dir"
_log = logging.getLogger(__name__)


class DiskStore(PageStore):
    """A file for each block, named by the block's key, in a directory that one engine uses at a time.

        directory/kvlab-offload.json     whose blocks these are
        directory/3f/3f2a...9c.kv        a header, then the block

    A file is written under another name and then renamed, so that it is whole or not there. Its header says of
    which model, weights and format it is, and has a checksum: whatever does not fit is a miss, and goes. Nothing is
    synced to the disk; if the machine crashes, a file that is not whole does not fit.

    The directory keeps what users wrote, as numbers: only this user may write to it, and files are for this user
    alone.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str], num_pages: int) -> None:
        """Open a directory for so many pages, made if it is not there. `identity`: what decides what a key's page
        holds, by names that users know; an engine may read another's pages if all of it is the same.

        Raises ConfigError for a directory of another model, that another engine uses, that others may write to or
        this process may not, or that has files of something else.
        """
        self.directory, self.num_pages = directory, num_pages
        self._identity = dict(identity)
        self._digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).digest()
        self._has_failed = self._has_damaged = False
        self._keys: dict[int, Key] = {}  # by place: a file is named by its key
        try:
            if directory.is_symlink():
                raise self._refusal(f"is a link to {directory.readlink()}; name that directory itself")
            check_folder(directory.absolute().parent.resolve() / directory.name)
            names = {entry.name for entry in os.scandir(directory)}
            if _IDENTITY not in names and (others := names - {_LOCK, f"{_TEMPORARY}identity"}):
                text = f"has files that are not kvlab's ({printable(min(others))})"
                raise self._refusal(f"{text}; name a directory of its own")
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise self._refusal(f"cannot be used: {_reason(error)}; name another directory") from error
        try:
            self._claim()
        except BaseException:
            os.close(self._lock)
            raise

    def kept(self) -> list[Key]:
        """Pages that there is no room for any more go."""
        by_age = sorted(
            (state.st_mtime_ns, bytes.fromhex(name[1]))
            for folder in os.scandir(self.directory)
            if folder.is_dir(follow_symlinks=False)
            for entry in os.scandir(folder)
            if (name := _PAGE_FILE.fullmatch(entry.name))
            and stat.S_ISREG((state := entry.stat(follow_symlinks=False)).st_mode)
        )
        keys = [key for _, key in by_age]
        for key in keys[: -self.num_pages]:
            self._file(key).unlink(missing_ok=True)
        self._keys = dict(enumerate(keys[-self.num_pages :]))
        return list(self._keys.values())

    def room(self, page_bytes: int) -> tuple[int, int]:
        """The bytes that the pages which are not there yet will take of the disk, and those that it has left. Files
        and folders take whole blocks of the file system.
        """
        disk, files = os.statvfs(self.directory), self.num_pages - len(self.kept())
        folders = _FOLDERS - sum(entry.is_dir() for entry in os.scandir(self.directory))
        blocks = files * -(-(_HEADER.size + page_bytes) // disk.f_frsize) + min(max(folders, 0), files)
        return blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize

    def write(self, place: int, key: Key, page: Page) -> None:
        """Once the disk is full or fails, the user is told and no more pages are taken; what stands
        in the way of one file is in the way of no other.
        """
        if self._has_failed:
            raise TierError(f"{self.directory} takes no more pages")
        before = self._keys.get(place, key)
        if before != key:
            self.remove(place, before)
        data, file, temporary = page.data, self._file(key), self.directory / f"{_TEMPORARY}{key.hex()}"
        try:
            file.parent.mkdir(0o700, exist_ok=True)
            with open(temporary, "wb", buffering=0, opener=_open) as opened:
                for part in (memoryview(self._header(key, data)), data):
                    while part:
                        part = part[opened.write(part) :]
            temporary.replace(file)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
                self._say_damaged(file, f"cannot be written: {_reason(error)}")
                raise
            self._has_failed = True
            text = "no more blocks are written to it; those that it has are read on"
            _log.warning("%s=%s: %s; %s", _KEY, self.directory, _reason(error), text)
            raise
        self._keys[place] = key

    def read(self, place: int, key: Key, page: Page) -> None:
        """A file that is not whole goes; of the first, the user is told."""
        data, header, file = page.data, bytearray(_HEADER.size), self._file(key)
        try:
            with open(file, "rb", buffering=0, opener=_open) as opened:
                whole = all(_fill(opened, part) for part in (memoryview(header), data)) and not opened.read(1)
            if whole and header == self._header(key, data):
                os.utime(file)  # it was used now: see `kept`
                return
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, a directory, a disk that fails
            self._say_damaged(file, f"cannot be read: {_reason(error)}")
            raise
        self.remove(place, key)
        self._say_damaged(file, "is not whole and was removed")
        raise TierError(f"{file} is not whole")

    def remove(self, place: int, key: Key) -> None:
        self._keys.pop(place, None)
        with suppress(OSError):
            self._file(key).unlink()

    def close(self) -> None:
        """Let other engines use the directory. Blocks stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> None:
        """Be the directory's only user, and see whose blocks it has. Raises ConfigError."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal("another engine uses it; give each its own directory") from None
        except OSError:  # a file system without locks
            pass
        file = self.directory / _IDENTITY
        try:
            for left in self.directory.glob(f"{_TEMPORARY}*"):  # of a process that was killed
                left.unlink()
            if file.exists():
                self._compare(file)
            else:
                whole = self.directory / f"{_TEMPORARY}identity"
                with open(whole, "w", opener=_open) as opened:
                    opened.write(json.dumps({"format": _FORMAT} | self._identity, indent=1) + "\n")
                whole.replace(file)
        except OSError as error:
            raise self._refusal(f"cannot be used: {_reason(error)}; name another directory") from error

    def _compare(self, file: Path) -> None:
        """Raise ConfigError unless the directory is of the same model, in the same format."""
        try:
            with open(file, "rb", opener=_open) as opened:
                identity = json.loads(opened.read(_LARGEST_IDENTITY))
            is_known = isinstance(identity, dict) and identity.pop("format") == _FORMAT
        except (ValueError, KeyError, RecursionError):  # nested too deep
            is_known = False
        if not is_known:
            raise self._refusal(
                f"its {file.name} is not of this version of kvlab; name another directory, or delete this one"
            )
        if identity != self._identity:
            first = next(
                name for name in [*self._identity, *identity] if identity.get(name) != self._identity.get(name)
            )
            names = dict.fromkeys(["model", first])
            theirs, ours = (
                ", ".join(f"{name}={values.get(name)}" for name in names) for values in (identity, self._identity)
            )
            text = f"holds blocks of {printable(theirs)}, and this engine has {ours}"
            raise self._refusal(f"{text}; name another directory, or delete this one")

    def _header(self, key: Key, data: memoryview) -> bytes:
        return _HEADER.pack(_MAGIC, _FORMAT, crc32(data), len(data), key, self._digest)

    def _say_damaged(self, file: Path, what: str) -> None:
        """Tell the user of the first damaged file: a disk that fails has thousands."""
        if not self._has_damaged:
            _log.warning("%s %s; such blocks are computed again", file, what)
        self._has_damaged = True

    def _file(self, key: Key) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}.kv"

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(_KEY, self.directory, reason)


def _open(path: str, flags: int) -> int:
    """As `open` does, for this user alone, no link, and without waiting for the other end of a FIFO."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _fill(file: io.FileIO, data: memoryview) -> bool:
    """Read as many bytes as there is room for. False if the file has fewer."""
    while data:
        count = file.readinto(data)
        if not count:
            return False
        data = data[count:]
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.strerror} ({error.filename})" if error.filename else error.strerror)
    return printable(str(error))
