"""The folder for what is made for this machine: compiled kernels, measured rates.

Code in it is loaded into the process, so nobody else may be able to put a file there. The rules are those of ssh
for its keys, for the folder and each folder above it:

- It belongs to this user, to root or to the owner of `/`, who can replace any file anyway.
- Others may not write to it, unless it is a folder above with the sticky bit (`/tmp`), where nobody can rename what
  another user owns. A group with this user as its only member is nobody else.

The checks follow symbolic links first. What they allow stays so: only those who are trusted could change it.
"""

import fcntl
import grp
import hashlib
import os
import pwd
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_S = 120.0  # a build takes about ten seconds
_LOCK_FILE = "build.lock"
#: What a build that was killed leaves behind begins so.
BUILD_PREFIX = "build-"


def cache_folder() -> Path:
    """`KVLAB_CACHE`, else `kvlab` in the user's cache folder, with symbolic links resolved. Each level that is not
    there is made, for this user alone.

    Raises OSError, with a sentence as its text, for a folder that cannot be made or that others may write to.
    """
    try:
        if named := os.environ.get("KVLAB_CACHE"):
            folder = Path(named).expanduser().resolve()
        else:
            folder = (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab").resolve()
    except (RuntimeError, ValueError) as error:  # no such user, a loop of links
        raise OSError(f"there is no cache folder: {error}") from error
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Make what is not there of a folder's path, and check that only this user may write there. Raises OSError."""
    for level in (*reversed(folder.parents), folder):  # from the top: nothing is made below an unsafe folder
        try:
            state = level.lstat()
        except FileNotFoundError:
            with suppress(FileExistsError):
                level.mkdir(0o700)
            state = level.lstat()
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(f"{level} is not a folder")
        if state.st_uid not in _trusted_owners():
            raise PermissionError(f"{level} belongs to another user, {_user(state.st_uid)}")
        if _others_may_write(level, state) and (level == folder or not state.st_mode & stat.S_ISVTX):
            command = f"chmod go-w {shlex.quote(str(level))}"
            raise PermissionError(f"other users may write to {level} ({command} ends that)")


def check_intact(file: Path) -> None:
    """Check that a file is what `keep` put there, and that only this user may have written it. Raises OSError."""
    try:
        kept = _read(_digest_file(file)).split()[:1]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {_digest_file(file).name}") from error
    if [hashlib.sha256(_read(file)).hexdigest().encode()] != kept:
        raise OSError("its SHA-256 is not the one that was kept beside it")


def keep(made: Path, file: Path) -> None:
    """Move a complete file to its place in the cache, and its SHA-256, as `sha256sum` writes it, beside it."""
    made.chmod(0o700)
    digest = made.with_name("digest")
    digest.write_text(f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {file.name}\n")
    digest.chmod(0o600)
    # Killed in between, the old file and the new digest do not fit, and the next process builds it again.
    digest.replace(_digest_file(file))
    made.replace(file)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Keep other processes from building in the folder meanwhile, and clear away what killed ones left.

    On a file system without locks nothing is kept from anybody: `keep` makes a file appear complete or not at all.
    Raises OSError if the folder cannot be written to, or another process has built for two minutes.
    """
    # Not readable by others: whoever can open it could lock it.
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {folder / _LOCK_FILE} for {_LOCK_S:g} s"
                    ) from None
                time.sleep(0.05)
                continue
            except OSError:
                break
            for left in folder.glob(f"{BUILD_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
            break
        yield
    finally:
        os.close(descriptor)  # which releases the lock


def _digest_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _read(file: Path) -> bytes:
    with open(file, "rb") as opened:
        state = os.fstat(opened.fileno())
        if state.st_uid not in _trusted_owners() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users may write to {file}")
        return opened.read()


def _trusted_owners() -> set[int]:
    return {0, os.geteuid(), os.stat("/").st_uid}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _others_may_write(folder: Path, state: os.stat_result) -> bool:
    if state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _is_own_group(folder, state.st_gid)


def _is_own_group(folder: Path, number: int) -> bool:
    """Whether a folder's group is this user's own, and no list of access rights names others."""
    user = _user(os.geteuid())
    try:
        group = grp.getgrgid(number)
        lists = os.listxattr(folder)
    except (KeyError, OSError, AttributeError):
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user} and "system.posix_acl_access" not in lists
