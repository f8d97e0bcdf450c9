"""In place of the compiler of kernels: one that writes a file; and what tests say of folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvlab.kernels.cpu import native

LIBRARY = b"a library"


class Compiler:
    """In place of the compiler and the loader: each file that is to be made has the same content."""

    def __init__(self) -> None:
        self.linked: list[Path] = []
        self.loaded: list[Path] = []
        self.hook: Callable[[bool], None] = lambda linking: None

    def run(self, command: list[str]) -> None:
        linking, target = "-shared" in command, Path(command[-1])
        self.hook(linking)
        target.write_bytes(LIBRARY)
        if linking:
            self.linked.append(target)

    def load(self, path: Path) -> str:
        assert path.read_bytes() == LIBRARY, "loaded what was not built"
        self.loaded.append(path)
        return str(path)


def load() -> None:
    """As another process would."""
    native._attempt.cache_clear()
    native.load()
    native._attempt.cache_clear()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def alone(reason: str) -> str:
    return (
        f"native kernels are compiled for this process alone: {reason}; "
        "KVLAB_CACHE names another folder to keep them in"
    )


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())
