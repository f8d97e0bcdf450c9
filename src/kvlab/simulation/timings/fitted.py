"""A step's time as it was fitted to recorded runs of the same model (`kvlab calibrate`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.config import FrameworkConfig, HardwareConfig
from kvlab.core import StepRecord, attended_pairs
from kvlab.errors import ConfigError
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig
from kvlab.simulation.calibration import KEY, Calibration, Subject
from kvlab.simulation.timings import TIMINGS
from kvlab.simulation.timings.base import Counts, Deployment, StepTiming, set_kernels, set_rates
from kvlab.simulation.work import Work

_SHOWN = {"sequences": "sequences", "tokens": "tokens", "context": "context tokens"}


@TIMINGS.register("fitted")
@dataclass(frozen=True)
class FittedTiming(StepTiming):
    """Times steps by the coefficients of a calibration. They have the host's part in them."""

    calibration: Calibration
    model: DecoderConfig
    because: str | None = None

    includes_host = True

    @classmethod
    def of(cls, deployment: Deployment) -> FittedTiming:
        """Raises ConfigError for a file that is none of `kvlab calibrate`, or was fitted to another model."""
        config, executor = deployment.config, deployment.config.executor
        calibration = Calibration.read(executor.timing_path)
        fitted, of_weight = calibration.subject, deployment.bytes_per_weight
        if executor.weights == "auto" and fitted.is_exact:  # the runs took either of the exact forms
            of_weight = fitted.bytes_per_weight
        asked = Subject(
            config.model.name,
            deployment.model.num_parameters,
            executor.dtype,
            of_weight,
            deployment.kv_bytes_per_token,
        )
        if not fitted.same_work(asked):
            text = f"was fitted to {fitted}, and this is {asked}; calibrate on runs of it"
            raise ConfigError(KEY, executor.timing_path, text)
        if deployment.devices > 1:
            text = "timing=fitted has the times of one machine; take timing=roofline"
            raise ConfigError("executor.tensor_parallel", deployment.devices, text)
        return cls(calibration, deployment.model, calibration.how_near())

    @property
    def description(self) -> str:
        calibration = self.calibration
        threads = f"{calibration.threads} thread{'s' * (calibration.threads != 1)}"
        return f"fitted on {calibration.machine}, {threads}"

    def unread(self, hardware: HardwareConfig, framework: FrameworkConfig) -> list[str]:
        eager = [] if framework.cuda_graphs else set_kernels(framework, ["eager_layer_us"])
        unread = self._unread([*set_rates(hardware), *eager], "roofline")
        return unread + self._unread(set_kernels(framework), "silicon")

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        return self._seconds(new_tokens, lengths, sampled, 0)

    def step_s(self, new_tokens: Counts, view: CacheView, sampled: int) -> float:
        lengths = np.asarray(view.lengths, dtype=np.int64)
        return self._seconds(new_tokens, lengths, sampled, view.repeated_tokens())

    def _seconds(self, new_tokens: Counts, lengths: Counts, sampled: int, repeated: int) -> float:
        work = Work(
            sequences=len(lengths),
            tokens=int(new_tokens.sum()),
            sampled=sampled,
            context=int(lengths.sum()),
            repeated=repeated,
            attended=int(attended_pairs(new_tokens, lengths).sum()),
        )
        return float(self.calibration.step_s(self.model, [work])[0])

    def remark(self, steps: Sequence[StepRecord]) -> str | None:
        """How many of the steps are larger than any that was fitted."""
        largest, works = self.calibration.largest, [Work.of(step) for step in steps if step.batch_seqs]
        beyond = [name for name in _SHOWN if any(getattr(work, name) > largest[name] for work in works)]
        if not beyond:
            return None
        count = sum(any(getattr(work, name) > largest[name] for name in _SHOWN) for work in works)
        said = ", ".join(f"{max(getattr(w, name) for w in works):,} {_SHOWN[name]}" for name in beyond)
        fitted = ", ".join(f"{largest[name]:,}" for name in beyond)
        larger = f"{count:,} of {len(works):,} steps are larger than any that was fitted"
        return f"{larger}: up to {said}, fitted to {fitted}"
