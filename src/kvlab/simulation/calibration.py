"""The time of a step as it was fitted to a model on a machine, and the file it is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from kvlab.errors import ConfigError
from kvlab.kv.spec import DTYPE_BYTES
from kvlab.models.config import DecoderConfig
from kvlab.simulation.work import NAMES, WORK, Work, rows

KEY = "executor.timing_path"
_HEADER = "# A step's time, fitted to recorded runs by `kvlab calibrate`: seconds for one of each term.\n"


@dataclass(frozen=True, slots=True)
class Subject:
    """What was timed: a model in the form in which its runs computed it."""

    model: str
    parameters: int
    dtype: str  # of the products
    bytes_per_weight: float
    kv_bytes_per_token: int

    def __str__(self) -> str:
        takes = f"{self.bytes_per_weight:.3g} bytes per weight, {self.kv_bytes_per_token:,} of KV per token"
        return f"{self.model} ({self.parameters / 1e6:,.0f} M parameters) in {self.dtype} ({takes})"

    @property
    def is_exact(self) -> bool:
        """Whether weights were stored as they are: plain, or compact in three quarters of the bytes. Of the two
        `executor.weights=auto` takes what the processor is fast with.
        """
        return self.bytes_per_weight > 0.7 * DTYPE_BYTES.get(self.dtype, 2)

    def same_work(self, other: Subject) -> bool:
        """Whether steps of both have the same to do; the name does not matter."""
        own, others = ((s.parameters, s.bytes_per_weight, s.kv_bytes_per_token) for s in (self, other))
        return self.dtype == other.dtype and np.allclose(own, others, rtol=1e-3)


@dataclass(frozen=True)
class Calibration:
    """Coefficients in seconds by the names of `kvlab.simulation.work.TERMS`, with `between_s` from a step's end to
    the next one's start; and the largest steps that they were fitted to.
    """

    subject: Subject
    machine: str
    threads: int
    coefficients: Mapping[str, float]
    between_s: float
    largest: Mapping[str, int]
    origin: Mapping[str, Any]  # runs, steps, intervals, errors: for people

    def step_s(self, model: DecoderConfig, works: list[Work]) -> NDArray[np.float64]:
        """Seconds `[N]` of N steps, the time until the next one included."""
        seconds: NDArray[np.float64] = rows(model, works) @ np.array([self.coefficients[name] for name in NAMES])
        return seconds + self.between_s

    def how_near(self) -> str | None:
        """How far its times of steps that it was not fitted to were off; None: the file does not say."""
        try:
            errors = self.origin["held_out"]
            median, p90, total = (100 * float(errors[name]) for name in ("median", "p90", "total"))
        except (KeyError, TypeError, ValueError):
            return None
        text = f"steps held out of the fit were off by {median:.1f} % in the median, {p90:.1f} % at p90"
        return f"{text}; all together by {total:+.1f} %"

    def text(self) -> str:
        """The file."""
        text: str = yaml.safe_dump(asdict(self), sort_keys=False, width=110, default_flow_style=None)
        return _HEADER + text

    @classmethod
    def read(cls, path: str | None) -> Calibration:
        """Raises ConfigError, naming what would do, where there is no such file or it is something else."""
        if not path:
            raise ConfigError(KEY, path, "timing=fitted reads a file that kvlab calibrate wrote; name it")
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            values["subject"] = Subject(**values["subject"])
            calibration = cls(**values)
            numbers = [calibration.between_s, calibration.threads]
            numbers += [calibration.coefficients[name] for name in NAMES]
            numbers += [calibration.largest[name] for name in WORK]
            if not all(0 <= float(number) < np.inf for number in numbers):
                raise ValueError("a time is negative or infinite")
        except OSError as error:
            raise ConfigError(KEY, path, f"cannot be read: {error.strerror}; kvlab calibrate writes one") from error
        except (yaml.YAMLError, UnicodeError, ValueError, TypeError, KeyError, AttributeError) as error:
            text = "is no file of kvlab calibrate, or not a whole one; kvlab calibrate RUN... writes one"
            raise ConfigError(KEY, path, text) from error
        return calibration
