"""Python's heap while requests are served."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_at_rest() -> Iterator[None]:
    """What is alive now is left out of garbage collections within: to go through all objects of the libraries takes
    a fifth of a second, and it would be in the middle of some step. Reference counts free as always.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
