"""Python's garbage collector while requests are served, and memory that nobody uses."""

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# How many more objects are created than freed between collections of young objects; how many of those come before
# one of the middle generation, and how many of that before one of all objects.
_THRESHOLDS = (50_000, 20, 100)
_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()
_alive = 0  # blocks of Python's memory after the last collection of all; 0: not known yet


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Keep the garbage collector out of the steps within: with many sequences, a collection of all objects takes
    tenths of a second in the middle of some step.

    Objects that are alive now are left out of collections, and collections of young objects are rarer: reference
    cycles live longer, everything else is freed as always. The settings are those of the process; the last of
    several users, in any thread, restores them.

    Freezing sets back what Python counts towards a collection of all objects, so that where requests come in bursts
    it would never come. The last user makes it, by Python's own rule: when there are a quarter more objects.
    """
    global _users, _before, _alive
    with _lock:
        if not _users:
            _before = gc.get_threshold()
            gc.freeze()
            gc.set_threshold(*_THRESHOLDS)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                gc.set_threshold(*_before)
                gc.unfreeze()
                if sys.getallocatedblocks() > 1.25 * _alive > 0:  # which counts faster than Python counts objects
                    gc.collect()
                    _alive = 0
                _alive = _alive or sys.getallocatedblocks()


def return_memory() -> None:
    """Give back to the system what is free, which the C library would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
