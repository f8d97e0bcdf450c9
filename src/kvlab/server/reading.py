"""Large bodies: what takes long with them is done beside the event loop, and without holding up other threads."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvlab.confined import Confined, ConfinedError
from kvlab.engine.garbage import return_memory
from kvlab.server.bodies import KINDS
from kvlab.server.errors import ApiError

LARGE = 16 << 10  # bytes of a body, from which on it is large: a smaller one takes the loop some milliseconds
_RETURNED = 1 << 20  # bytes of a body, after which memory is given back
_MEMORY = 1 << 30
_SECONDS = 20

T = TypeVar("T")


class LargeBodies:
    """Reads one after the other, in a process with limits, and turns one after the other into tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._process = Confined("kvlab.server.body_process", memory=_MEMORY, seconds=_SECONDS)
        self._reading = ThreadPoolExecutor(1, "kvlab-bodies")
        self._working = ThreadPoolExecutor(1, "kvlab-prompts")

    async def read(self, path: str, body: bytes) -> bytes:
        """What is left of a body whose fields were checked: no unknown field, no more values than can be served.
        Raises ApiError.
        """
        if path not in KINDS:
            return body
        head = json.dumps({"path": path, "max_tokens": self._max_tokens}).encode()
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._reading, self._process.ask, head + b"\n" + body)
        except ConfinedError as error:
            raise ApiError(400, f"the body cannot be read: it {error}") from error
        if answer[:1] == b"E":
            raise ApiError(*json.loads(answer[1:]))
        return answer[1:]

    async def work(self, make: Callable[[], T], size: int) -> T:
        """What `make` makes of a body of so many bytes, which is large."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._working, make)
        finally:
            if size > _RETURNED:
                # A tokenizer takes a hundred bytes for each of a text.
                await loop.run_in_executor(self._working, return_memory)
