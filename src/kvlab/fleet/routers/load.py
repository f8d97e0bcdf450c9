"""load: llm-d's scores of memory and queues alone."""

from collections.abc import Mapping
from typing import ClassVar

from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.weighted import Weighted


@ROUTERS.register("load")
class Load(Weighted):
    """1 x free memory + 1 x short queue: it knows no prefixes."""

    usual: ClassVar[Mapping[str, float]] = {"kv": 1.0, "queue": 1.0}
