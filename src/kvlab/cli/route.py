"""kvlab route: one address for several servers of OpenAI's protocol, and a router that chooses among them.

kvlab route 'upstreams=[http://127.0.0.1:8000,http://127.0.0.1:8001]' fleet.router=cache_aware
kvlab route 'upstreams=[...]' 'events=[tcp://127.0.0.1:5557,...]' tokenizer=upstream fleet.router=precise
kvlab route replay=decisions.jsonl

The routers are those of simulated fleets. A request goes to another server where one does not answer, as long as
no byte has come. POST /drain?upstream=0 gives one no new requests, /undrain again some; /health and /metrics tell
of each. SIGTERM and Ctrl-C let open requests end, for a minute; the second one ends at once.
"""

from dataclasses import dataclass, field, fields

from kvlab.cli.settings import command, setting
from kvlab.config.fleet import FleetConfig
from kvlab.config.values import address, at_least, server_root
from kvlab.errors import ConfigError

_OF_PROXIES = ("router", "load", "load_s", "prefixes", "memory_blocks", "weights", "temperature")


@dataclass
class RouteServerSettings:
    """Where the proxy listens."""

    host: str = "127.0.0.1"
    port: int = 9100

    def __post_init__(self) -> None:
        at_least("server.port", self.port, 0, 65535)


@dataclass
class RouteCommandSettings:
    """What a proxy takes."""

    upstreams: list[str] = setting([], "the servers, as http://127.0.0.1:8000", "[URL,...]")
    fleet: FleetConfig = field(default_factory=FleetConfig)
    server: RouteServerSettings = field(default_factory=RouteServerSettings)
    events: list[str] = setting([], "where each publishes its KV events, as tcp://127.0.0.1:5557", "[ADDRESS,...]")
    tokenizer: str | None = setting(
        None, "a folder with tokenizer.json, fetched:smollm2, or upstream: its /tokenize", "WHERE"
    )
    api_key: str | None = setting(None, "the servers', for their /metrics", "'${oc.env:NAME}'")
    record: str | None = setting(None, "each decision, with what the router saw", "FILE")
    replay: str | None = setting(None, "make the decisions of such a file again, and compare", "FILE")
    health_s: float = setting(1.0, "between two looks whether a server is up", "S")
    seed: int = setting(0, "of what a router draws", "N")
    plugins: list[str] = setting([], "modules of your own to import first, with a router", "[MODULE,...]")

    def __post_init__(self) -> None:
        at_least("health_s", self.health_s, 0.01)
        if self.replay is not None:
            for name, value in self._changed():
                raise ConfigError(f"fleet.{name}", value, f"is as {self.replay} has it; leave it out")
            return
        if not self.upstreams or not all(url.startswith(("http://", "https://")) for url in self.upstreams):
            text = "must be URLs, such as [http://127.0.0.1:8000,http://127.0.0.1:8001]"
            raise ConfigError("upstreams", ",".join(self.upstreams) or None, text)
        self.upstreams = [server_root(url) for url in self.upstreams]
        if len(set(self.upstreams)) < len(self.upstreams):
            raise ConfigError("upstreams", ",".join(self.upstreams), "names a server twice")
        for name, value in self._changed():
            if name not in _OF_PROXIES:
                text = f"is of simulated fleets; a proxy has fleet.{', fleet.'.join(_OF_PROXIES)}"
                raise ConfigError(f"fleet.{name}", value, text)

    def _changed(self) -> list[tuple[str, object]]:
        """Settings of the fleet that are not as usual."""
        usual = FleetConfig()
        values = [(own.name, getattr(self.fleet, own.name)) for own in fields(FleetConfig)]
        return [(name, value) for name, value in values if value != getattr(usual, name)]


@command(__doc__, RouteCommandSettings, bare=False, alone=True, plugins=True)
def main(settings: RouteCommandSettings) -> int:
    # Imported this late so that --help answers at once.
    import asyncio
    import gc

    from kvlab.server.decisions import replay
    from kvlab.server.lookout import RouteSettings
    from kvlab.server.passing import listening_at, serve
    from kvlab.server.route import Proxy

    if settings.replay is not None:
        router, count, differing = replay(settings.replay)
        print(f"{count - len(differing)} of {count} decisions of {router} come out as they were recorded")
        if differing:
            print(f"the first that does not is in line {differing[0]} of {settings.replay}")
        return 1 if differing else 0
    proxy = Proxy(RouteSettings(**{own.name: getattr(settings, own.name) for own in fields(RouteSettings)}))
    listening = listening_at(settings.server.host, settings.server.port, "server.port")
    asyncio.run(proxy.start())
    where, count = address(*listening.getsockname()[:2]), len(proxy.upstreams)
    print(f"{settings.fleet.router} at {where}, before {count} upstream{'s' * (count > 1)}", flush=True)
    for upstream in proxy.upstreams:
        if upstream.reason:
            print(f"{upstream.url} is left out until it is up: {upstream.reason}", flush=True)
    gc.freeze()  # what was imported is not looked through, 20 ms each time, while calls wait
    return 0 if asyncio.run(serve(proxy.app(), listening)) else 130
