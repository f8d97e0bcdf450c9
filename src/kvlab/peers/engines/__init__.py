"""What can serve a run's requests, by name. One file per engine."""

from kvlab.peers.engines.base import EngineKind
from kvlab.registry import Registry

ENGINES: Registry[type[EngineKind]] = Registry("engine.kind", __name__)


def is_peer(kind: str) -> bool:
    """Whether the engine of that name is another than kvlab's own. Raises ConfigError for an unknown one."""
    return ENGINES.get(kind).is_peer
