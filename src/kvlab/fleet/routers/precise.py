"""precise: llm-d's scores, with prefixes by KV events."""

from collections.abc import Mapping
from typing import ClassVar

from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.weighted import Weighted


@ROUTERS.register("precise")
class Precise(Weighted):
    """llm-d with its indexer of KV events: 3 x prefix + 2 x free memory + 2 x short queue."""

    prefixes = "events"
    usual: ClassVar[Mapping[str, float]] = {"prefix": 3.0, "kv": 2.0, "queue": 2.0}
