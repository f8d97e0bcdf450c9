"""A clock of real time with an event loop in it: who waits lets connections and processes be served meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvlab.engine.clock import WallClock

T = TypeVar("T")

_LOOK_S = 0.05  # between two looks at whether to stop


class LoopClock(WallClock):
    """Real time. `loop` runs only while somebody waits, in the thread that waits: nothing needs a lock, and no
    other thread delays what is to be sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self._has_news = False

    def at(self, when: float) -> float:
        """A time of `time.perf_counter`, on this clock."""
        return when - self._origin

    def wait_until(self, when: float) -> None:
        """Run the loop until `when`, or until `wake` is called; once where `when` has passed."""
        delay = 0.0 if self._has_news else max(0.0, when - self.now())
        self._has_news = False
        self._run_for(delay)

    def wake(self) -> None:
        """From the loop: something happened that the waiting caller should see now."""
        self._has_news = True
        self.loop.stop()

    def run(self, work: Coroutine[Any, Any, T], should_stop: Callable[[], bool] = lambda: False) -> T:
        """Run the loop until the work is done. Raises what it raises, and KeyboardInterrupt where `should_stop`."""
        task = self.loop.create_task(work)
        task.add_done_callback(lambda _: self.loop.stop())
        while not task.done():
            if should_stop():
                task.cancel()
                self._run_for(_LOOK_S)
                raise KeyboardInterrupt
            self._run_for(_LOOK_S)
        return task.result()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what the loop has still to do, do the `last` thing, and end it. May be called more than once."""
        if self.loop.is_closed():
            return
        tasks = asyncio.all_tasks(self.loop)

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await last()

        self.run(end())  # to its end, though what is cancelled may `wake`
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run_for(self, delay: float) -> None:
        timer = self.loop.call_later(delay, self.loop.stop)
        self.loop.run_forever()
        timer.cancel()
