"""The best timing that there is: operations that were measured, where they are known; else the roofline."""

from kvlab.errors import ConfigError
from kvlab.simulation.timings import TIMINGS
from kvlab.simulation.timings.base import Deployment, Timing


@TIMINGS.register("auto")
class AutoTiming(Timing):
    """A choice between timings, never one itself: a run says which it was."""

    @classmethod
    def of(cls, deployment: Deployment) -> Timing:
        """`silicon`, where its tables are installed and hold the device, the model's shapes and types; else
        `roofline`. Raises ConfigError where that cannot time the deployment either.
        """
        try:
            return TIMINGS.get("silicon").of(deployment)
        except ConfigError as error:
            timing = TIMINGS.get("roofline").of(deployment)
            known = f"; {timing.because}" if timing.because else ""
            object.__setattr__(timing, "because", f"no operations were measured: {error}{known}")
            return timing
