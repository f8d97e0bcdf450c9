"""Time as the engine sees it; nothing in the engine reads any other."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since `restart`."""

    def now(self) -> float:
        """Seconds since the clock was started."""

    def restart(self) -> None:
        """Make now 0."""

    def wait_until(self, when: float) -> None:
        """Let time pass until `when`; returns at once if it has passed."""

    def rest(self) -> None:
        """Nothing is left to do: what passes until the next step delays nobody."""
        return


class WallClock(Clock):
    """Real time."""

    _held: float | None = None  # what the next `now` is

    def __init__(self) -> None:
        self.restart()

    def now(self) -> float:
        held, self._held = self._held, None
        return time.perf_counter() - self._origin if held is None else held

    def hold(self, at_s: float) -> None:
        """Let the next `now` be `at_s`, which was read before: a step begins with the look for arrivals."""
        self._held = at_s

    def restart(self) -> None:
        self._origin = time.perf_counter()
        self._held = None

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class LogicalClock(Clock):
    """Time that passes only where something says so: `wait_until`, and the engine for what its executor's
    StepResult gives as `elapsed_s`.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def restart(self) -> None:
        self._now = 0.0

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        """Let `seconds`, at least 0, pass. Raises ValueError for less."""
        if not seconds >= 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} seconds")
        self._now += seconds


class PacedClock(LogicalClock):
    """Time that passes `factor` times as fast as real time, and sleeps where something says that time passes: a
    simulated engine then answers as late as the device would.

    It counts by how much this machine is slower: the seconds of this clock by which steps began late.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.restart()

    @property
    def late_share(self) -> float:
        """By which share steps took longer than the device that is simulated; 0 before the first."""
        return max(0.0, self.late_s) / self.simulated_s if self.simulated_s else 0.0

    def now(self) -> float:
        return (time.perf_counter() - self._origin) * self.factor

    def restart(self) -> None:
        self._origin = time.perf_counter()
        self._due = self.simulated_s = self.late_s = 0.0
        self._rests = True

    def rest(self) -> None:
        self._rests = True

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, (when - self.now()) / self.factor))

    def advance(self, seconds: float) -> None:
        """Let `seconds`, at least 0, pass. A sleep that ends late makes the next one shorter."""
        if not seconds >= 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} seconds")
        now = self.now()
        # A step begins when it is due or, after a pause, now; what sleeps were late by is not added up.
        begin = now if self._rests else self._due
        self._due = (self._due if now - self._due < seconds else now) + seconds
        self.wait_until(self._due)
        self._rests = False
        self.simulated_s += seconds
        self.late_s += self._due - seconds - begin  # 0 where the step began when it was due
