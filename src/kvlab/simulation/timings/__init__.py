"""How long a step takes on a simulated device, by name. One file per timing."""

from kvlab.registry import Registry
from kvlab.simulation.timings.base import Deployment, StepTiming, Timing

TIMINGS: Registry[type[Timing]] = Registry("executor.timing", __name__)

__all__ = ["TIMINGS", "Deployment", "StepTiming", "Timing"]
