"""kvlab record: pass an OpenAI server's traffic through, and write a trace of it, for workload=recorded.

kvlab record upstream=http://127.0.0.1:8000
kvlab record upstream=http://127.0.0.1:8000 port=9000 to=monday.jsonl tokenizer=fetched:smollm2
kvlab run hardware=h100_sxm model=llama3_1_8b workload=recorded workload.path=monday.jsonl

Clients talk to the recorder as to the server. Text is hashed and not kept unless record.text=true; keys and
headers never are. If the trace cannot be written, traffic goes on and /health says why.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kvlab.cli.settings import command, refuse_existing, setting
from kvlab.config.values import address, at_least, server_root
from kvlab.errors import ConfigError


@dataclass
class KeptSettings:
    """What is kept of a request beside its figures."""

    text: bool = setting(False, "keep prompts and outputs as text, in a file for its owner alone", "true")


@dataclass
class RecordSettings:
    """What a recorder takes."""

    upstream: str | None = setting(None, "the server, as http://127.0.0.1:8000", "URL")
    to: str = setting("trace.jsonl", "the trace", "FILE")
    host: str = setting("127.0.0.1", "the address to listen on; 0.0.0.0 for all", "ADDRESS")
    port: int = setting(9000, "0: any that is free", "N")
    tokenizer: str | None = setting(
        None, "a folder with tokenizer.json, fetched:smollm2, or upstream: its /tokenize", "WHERE"
    )
    hash_with: str | None = setting(None, "what hashes are keyed with; a new key is made and forgotten", "FILE")
    record: KeptSettings = field(default_factory=KeptSettings)

    def __post_init__(self) -> None:
        at_least("port", self.port, 0, 65535)
        if self.upstream is None or not self.upstream.startswith(("http://", "https://")):
            raise ConfigError("upstream", self.upstream, "must be a URL, such as http://127.0.0.1:8000")


@command(__doc__, RecordSettings, bare=False, alone=True)
def main(settings: RecordSettings) -> int:
    # Imported this late so that --help answers at once.
    import asyncio
    import gc

    from kvlab.lab.traffic import read_key
    from kvlab.server.passing import listening_at, serve
    from kvlab.server.recorder import Recorder
    from kvlab.server.tracing import UPSTREAM, TraceSettings
    from kvlab.workloads.prompt_blocks import text_encoder

    path = Path(settings.to)
    refuse_existing("to", path)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        path.touch()
        path.unlink()  # until there is something to write
    except OSError as error:
        why = f"cannot be written: {error.strerror}; name a file in another directory"
        raise ConfigError("to", settings.to, why) from error
    if settings.tokenizer != UPSTREAM:
        text_encoder(settings.tokenizer)  # it is there, and one
    upstream = server_root(str(settings.upstream))
    text = settings.record.text
    trace = TraceSettings(settings.to, read_key(settings.hash_with), settings.tokenizer, upstream, text=text)
    recorder = Recorder(trace)
    listening = listening_at(settings.host, settings.port)
    kept = ", with prompts and outputs as text" if text else ""
    print(f"{upstream} at {address(*listening.getsockname()[:2])}; its trace: {settings.to}{kept}", flush=True)
    gc.freeze()  # what was imported is not looked through, 20 ms each time, while calls wait
    have_ended = asyncio.run(serve(recorder.app(), listening))
    lost = f", {recorder.trace.lost} lost: {recorder.trace.error}" if recorder.trace.lost else ""
    print(f"{recorder.trace.progress.written} requests in {settings.to}{lost}")
    return 0 if have_ended else 130
