"""Any server of OpenAI's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvlab.errors import ConfigError
from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.engine.protocol import ServingEngine


@ENGINES.register("openai")
class OpenAIServer(EngineKind):
    """A server that runs already: it is asked, and left as it is."""

    @staticmethod
    def check(config: RunConfig) -> None:
        url = config.engine.url
        if url is None:
            raise ConfigError("engine.url", url, "engine=openai needs engine.url=http://<host>:<port>")
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ConfigError(
                "engine.url", url, "is no address of a server; write for example http://localhost:8000"
            )

    @staticmethod
    def start(assignment: Assignment) -> ServingEngine:
        from kvlab.peers.endpoint import EndpointEngine  # aiohttp takes a while to import

        return EndpointEngine(
            assignment.config,
            longest=assignment.longest,
            needs_ids=any(request.follows is not None for request in assignment.requests),
            should_stop=assignment.should_stop,
        )
