"""Do vLLM and kvlab keep, find and evict the same blocks under one recorded load, and does the ledger predict it?

    python -m experiments.recorded_traffic.run PYTHON        the interpreter of an environment that has vLLM

One client asks a server for completions, one after another, through `kvlab record`; its KV events are heard
meanwhile. Then the trace is replayed through the ledger.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx

from kvlab.config import WorkloadConfig
from kvlab.lab.machine import describe
from kvlab.lab.prefix_replay.curves import replay_curves
from kvlab.lab.prefix_replay.traffic import read_traffic
from kvlab.lab.watch.view import ServerPool, judge
from kvlab.peers.kv_events import EventListener
from kvlab.workloads import build_requests
from kvlab.workloads.prompt_blocks import BlockHasher
from kvlab.workloads.trace_format import read_header, read_trace
from tests.support.words import write_tokenizer

BLOCK, BLOCKS, REQUESTS = 128, 40, 120
KEY = "a key of an experiment, thirty bytes and more"
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 400, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Some 12 conversations' prompts, which grow, and fit in the pool no more than a few at a time. No answer fills
    a block, since answers differ.
    """
    draws = random.Random(7)
    begun: list[list[int]] = []
    found = []
    for _ in range(REQUESTS):
        if (len(begun) < 12 and draws.random() < 0.2) or not begun:
            begun.append([draws.randrange(5, 256) for _ in range(draws.randrange(200, 700))])
        number = draws.randrange(len(begun))
        grown = begun[number] + [draws.randrange(5, 256) for _ in range(draws.randrange(20, 200))]
        begun[number] = grown if len(grown) < 1500 else grown[:400]
        rest = len(grown) % BLOCK
        found.append(grown[: len(grown) - max(rest - 100, 0)])
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@dataclass(frozen=True)
class Server:
    """How one is started, at these ports: its own, of events, of their replay."""

    name: str
    command: list[str]
    ports: tuple[int, int, int]


def servers(folder: Path, python: str | None) -> Iterator[Server]:
    own, events, replay = (free_port() for _ in range(3))
    yield Server(
        "kvlab",
        [
            sys.executable, "-m", "kvlab.cli", "serve", "model=qwen3_tiny", "executor=cpu",
            "model.max_seq_len=2048",
            f"kv.num_blocks={BLOCKS - 1}", f"kv.block_size={BLOCK}", f"server.port={own}", "scheduler.watermark=0",
            f"server.kv_events=tcp://127.0.0.1:{events}", f"server.kv_events_replay=tcp://127.0.0.1:{replay}",
        ],
        (own, events, replay),
    )  # fmt: skip
    if python is None:
        return
    model = folder / "model"
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(SHAPE))
    own, events, replay = (free_port() for _ in range(3))
    about = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}", "topic": "",
    }  # fmt: skip
    yield Server(
        "vLLM",
        [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
            "--load-format", "dummy", "--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048",
            "--num-gpu-blocks-override", str(BLOCKS), "--gpu-memory-utilization", "0.2",
            "--enable-prompt-tokens-details", "--enforce-eager",
            "--port", str(own), "--kv-events-config", json.dumps(about), "--no-enable-log-requests",
        ],
        (own, events, replay),
    )  # fmt: skip


@contextmanager
def running(command: list[str], log: Path, ready: str) -> Iterator[None]:
    """A process, which is ready when `ready` answers 200."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    sys.exit("\n".join(line for line in log.read_text().splitlines() if "rror" in line)[:4000])
                try:
                    if httpx.get(ready, timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(60)


def serve(server: Server, folder: Path) -> tuple[ServerPool, Path]:
    """What its events said while it was asked, and the trace of that."""
    own, events, replay = server.ports
    trace, key, port = folder / f"{server.name}.jsonl", folder / "key", free_port()
    key.write_text(KEY)
    url = f"http://127.0.0.1:{own}"
    record = [
        sys.executable, "-m", "kvlab.cli", "record", f"upstream={url}", f"port={port}", f"to={trace}",
        f"hash_with={key}",
    ]  # fmt: skip
    pool = ServerPool(BlockHasher(KEY.encode(), 16))
    with ExitStack() as stack:
        stack.enter_context(running(server.command, folder / f"{server.name}.log", f"{url}/health"))
        stack.enter_context(running(record, folder / "record.log", f"http://127.0.0.1:{port}/health"))
        listener = EventListener(pool, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        stack.callback(listener.close)
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        for prompt in prompts():
            body = {"model": name, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120).raise_for_status()
            listener.hear(0.05)
        listener.hear(1)
        time.sleep(1)  # the trace's last line
    return pool, trace


def evicted(pool: ServerPool) -> list[int]:
    """Contents in the order of their evictions."""
    ends = [(when, content) for content, found in pool.presences.items() for when in found.until]
    return [content for _, content in sorted(ends)]


def main() -> None:
    found: dict[str, ServerPool] = {}
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}; {BLOCKS - 1} blocks of {BLOCK} tokens\n")
    names = ("server", "requests", "stored", "evicted", "stored again", "it found, %", "by its events, %", "agree",
             "ledger, %", "best policy", "belady")  # fmt: skip
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    with tempfile.TemporaryDirectory() as name:
        for server in servers(Path(name), sys.argv[1] if len(sys.argv) > 1 else None):
            pool, trace = serve(server, Path(name))
            found[server.name] = pool
            started = read_header(str(trace)).started or 0.0
            verdict = judge(pool, (request for _, request in read_trace(str(trace))), started)
            workload = WorkloadConfig("recorded", "recorded", path=str(trace), arrival="trace")
            requests = build_requests(workload, vocab_size=2**31, seed=0)
            curves = replay_curves(read_traffic(requests, BLOCK), "recorded", ["lru", "lfu", "sieve"], [BLOCKS - 1])
            rates = {policy: 100 * each[0] for policy, each in curves.hit_rates.items()}
            best = max(("lru", "lfu", "sieve"), key=lambda policy: rates[policy])
            shares = (100 * each / verdict.prompt_tokens for each in (verdict.said_tokens, verdict.there_tokens))
            cells = (
                server.name, len(requests), pool.stored, pool.removed, len(pool.again_s),
                *(f"{share:.1f}" for share in shares), verdict.agree, f"{rates['lru']:.1f}",
                f"{best} {rates[best]:.1f}", f"{rates['belady']:.1f}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if len(found) == 2:
        one, other = found.values()
        there, those = ({each for hashes in pool.now.values() for each in hashes} for pool in (one, other))
        same = sum(a == b for a, b in zip(evicted(one), evicted(other), strict=False))
        print(f"\nat the end {len(there & those)} of {len(there | those)} contents of 16 tokens are in both")
        print(f"{same} of {max(len(evicted(one)), len(evicted(other)))} evictions are the same, in order")


if __name__ == "__main__":
    main()
