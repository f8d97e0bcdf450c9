"""The HTTP server: where it listens, and what clients may ask of it."""

from dataclasses import dataclass, field

from kvlab.config.values import at_least, parse_bytes
from kvlab.config.workload import LengthConfig, check_length
from kvlab.errors import ConfigError


def drawn_lengths() -> LengthConfig:
    """Lengths of answers as those of chats: half of them up to 150 tokens, a few more than 1,000."""
    return LengthConfig(min=1, max=4096, distribution="lognormal", median=150.0, sigma=0.9)


@dataclass
class ServerConfig:
    """Where the server listens, and its limits."""

    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0 for all
    port: int = 8000  # 0: any that is free
    allowed_hosts: list[str] = field(default_factory=list)  # other names of a server on loopback; "*": any
    cors_origins: list[str] = field(default_factory=list)  # web pages that may call it; "*": any
    api_key: str | None = None  # sent as "Authorization: Bearer KEY"; ${oc.env:NAME} keeps it out of sight
    max_body: str = "8MiB"  # of a call
    max_waiting_outputs: int = 1024  # that may wait for a slow client, before it is cut
    write_timeout_s: float = 60.0  # for a client to read what it was sent
    read_timeout_s: float = 30.0  # for a client to send its headers, and again its body
    keep_alive_s: float = 30.0  # that an idle connection stays open
    drain_s: float = 600.0  # that requests have to end after SIGTERM
    tool_call_parser: str = "auto"  # the form of the model's tool calls; auto: that of its chat template
    otlp_endpoint: str | None = None  # a span of each request is posted there; needs the extra kvlab[otel]
    kv_events: str | None = None  # where events of the prefix cache are published (ZeroMQ); needs kvlab[events]
    kv_events_replay: str | None = None  # where earlier events can be asked for
    kv_events_topic: str = ""  # of all events, as llm-d's kv@ADDRESS@MODEL
    time_factor: float = 1.0  # executor=simulated: simulated seconds per second
    output_len: LengthConfig = field(default_factory=drawn_lengths)  # executor=simulated: tokens of each answer

    def __post_init__(self) -> None:
        at_least("server.port", self.port, 0, 65535)
        if parse_bytes(self.max_body, key="server.max_body") == 0:
            raise ConfigError("server.max_body", self.max_body, "must be more than 0 bytes")
        if self.api_key == "":
            raise ConfigError("server.api_key", self.api_key, "must not be empty; null asks for none")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            text = "must be a URL, such as http://127.0.0.1:4318/v1/traces"
            raise ConfigError("server.otlp_endpoint", self.otlp_endpoint, text)
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("tcp://", "ipc://", "inproc://")):
                text = "is no address of ZeroMQ, such as tcp://127.0.0.1:5557"
                raise ConfigError(f"server.{name}", address, text)
        if self.kv_events is None and self.kv_events_replay is not None:
            text = "repeats what server.kv_events publishes; set that too"
            raise ConfigError("server.kv_events_replay", self.kv_events_replay, text)
        check_length("server.output_len", self.output_len)
        at_least("server.max_waiting_outputs", self.max_waiting_outputs, 1)
        for name in ("write_timeout_s", "read_timeout_s", "keep_alive_s", "drain_s", "time_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"server.{name}", getattr(self, name), "must be more than 0")
