"""kvlab serve: OpenAI's protocol over HTTP, with the engine of a run.

kvlab serve model=smollm2_135m
kvlab serve model=qwen3_mini kv.num_blocks=1024 server.port=8080 scheduler.max_waiting_requests=64
kvlab serve hardware=h200_sxm model=qwen3_8b server.time_factor=10 server.output_len=200

Settings of `kvlab run` may follow; those of the workload and of tracking are not used. SIGTERM and Ctrl-C let open
requests end; the second one ends at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.cli.settings import command, parsed, unknown_setting
from kvlab.config.server import ServerConfig
from kvlab.config.values import address
from kvlab.errors import ConfigError

_LENGTH = "server.output_len"


@dataclass
class ServeSettings:
    """The settings of a server beside those of a run."""

    server: ServerConfig = field(default_factory=ServerConfig)


def written_out(arguments: Sequence[str]) -> list[str]:
    """The arguments with a setting for each part of a length: `server.output_len=200` is of exactly 200 tokens, and
    `server.output_len={median: 200, max: 1000}` has what a workload's lengths have. Raises ConfigError.
    """
    return [part for text in arguments for part in _parts(text)]


def _parts(argument: str) -> list[str]:
    key, _, value = argument.lstrip("-").partition("=")
    if key != _LENGTH or not value:
        return [argument]
    given = parsed(value)
    if type(given) is int:
        given = {"min": given, "max": given}
    if not isinstance(given, dict):
        text = "is no length; write 200, or {min: 50, max: 500}, or {median: 200, max: 1000}"
        raise ConfigError(key, value, text)
    kind = "lognormal" if "median" in given else "uniform"
    return [f"{key}.{name}={part}" for name, part in {"distribution": kind, **given}.items()]


@command(__doc__, ServeSettings, written_out=written_out)
def main(settings: ServeSettings, overrides: list[str]) -> int:
    for text in overrides:
        if text.startswith("server."):
            raise unknown_setting(ServeSettings, text)
    from kvlab.cli.compose import compose_one
    from kvlab.lab.terminal import Terminal

    config = compose_one(overrides, "a server")
    if config.executor.kind == "playback":
        text = "has the requests of its recording alone; a server gets others"
        raise ConfigError("executor.kind", "playback", text)
    console = Terminal()
    from kvlab.server.lifecycle import listen, serve

    listening = listen(settings.server)  # before anything is loaded: a port in use is told at once
    from kvlab.server.app import build_app
    from kvlab.server.build import build_serving

    with console.status("loading the model"):
        serving = build_serving(config, settings.server)
    console.print(f"{config.model.name} at {address(*listening.getsockname()[:2])}")
    if serving.events is not None:
        console.print(f"KV events at {serving.events.endpoint}")
    return 0 if serve(build_app(serving), serving, listening) else 130
