"""Does vLLM's own decoder read the KV events of kvlab's server?

python -m experiments.kv_events.run PYTHON        the interpreter of an environment that has vLLM
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx2 as httpx

from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import key_of
from kvlab.server.build import build_serving
from kvlab.server.kv_events import block_hash
from tests.support.router import Router
from tests.support.serving import running, wait_until_empty

REQUESTS = 200
ANY = "tcp://127.0.0.1:0"
KINDS = {
    "simulated": ("executor=simulated", "executor.timing=roofline", "hardware=h100_sxm", "kv.num_blocks=200"),
    "computed": ("executor=cpu", "executor.threads=1", "kv.num_blocks=200"),
}


def ask(url: str, number: int) -> None:
    """A request that shares a prefix with some of the others, in some tenant."""
    draws = random.Random(number)
    shared = [draws.randrange(4)] * 16 * draws.randrange(8)
    own = [draws.randrange(500) for _ in range(draws.randrange(1, 200))]
    body = {"prompt": shared + own, "max_tokens": draws.randrange(1, 120), "ignore_eos": True, "n": 1 + number % 2}
    body |= {"cache_salt": "ann"} if number % 5 == 0 else {}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def held(pool: BlockPool) -> dict[str, list[int]]:
    """The tokens of all prefixes that the index can find, by the hash of their last block."""
    found = {}
    for node in pool.index.nodes():
        if node.block is not None:
            path, at = [], node
            while at.parent is not None:
                path.append(at.tokens)
                at = at.parent
            found[str(block_hash(key_of(node)))] = array("q", b"".join(reversed(path))).tolist()
    return found


def main() -> None:
    for kind, settings in KINDS.items():
        config = compose_run(["model=qwen3_tiny", "scheduler.max_batch_size=32", *settings]).config
        serving = build_serving(config, ServerConfig(port=0, kv_events=ANY, kv_events_replay=ANY))
        with running(serving) as server, ThreadPoolExecutor(32) as clients:
            list(clients.map(partial(ask, server.url), range(REQUESTS)))
            wait_until_empty(serving)
            events, stats = serving.events, serving.engine.stats()
            assert events is not None
            while events.published < events._number:
                time.sleep(0.01)
            router = Router(events.endpoint, events.replay_endpoint)
            batches = [payload for _, payload in router.replayed(0)]
            router.close()
        pool = serving.engine.core.pool
        assert isinstance(pool, BlockPool)
        lines = "\n".join(payload.hex() for payload in batches)
        command = [sys.argv[1], str(Path(__file__).with_name("listener.py"))]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        said = json.loads(done.stdout.splitlines()[-1])
        agree = "the same" if said["known"] == held(pool) else "OTHERS"
        print(
            f"{kind}: {len(batches)} batches, {said['heard']}; {stats.preemptions} preemptions, "
            f"{stats.hit_tokens} tokens hit, {stats.evicted_blocks} blocks evicted; vLLM's decoder has "
            f"{len(said['known'])} blocks, {agree} as the index"
        )


if __name__ == "__main__":
    main()
