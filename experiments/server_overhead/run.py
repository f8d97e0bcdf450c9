"""What HTTP costs: a burst as 48 streams of `kvlab serve`, beside the same requests driven in this process.

    python -m experiments.server_overhead.run [--rounds 3] [settings of kvlab run]
    python -m experiments.server_overhead.run --cpu

Both times are the engine's own, from the first arrival to the last token; rounds alternate. The client runs on this
machine too, in a process of its own, and only counts chunks. With --cpu steps are simulated and take no time of the
device, so that each token costs what Python takes for it; CPU seconds are compared.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from experiments.serving import server_process
from experiments.streaming import stream_at_once
from kvlab.cli.compose import compose_run
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine
from kvlab.lab.machine import describe
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

REAL = ["model=qwen3_0_6b", "workload=burst48", "tracking=off"]
NO_TIME = ["executor=simulated", "hardware=h200_sxm", "model=qwen3_0_6b", "workload=burst48", "tracking=off"]
NO_TIME += [
    "executor.timing=roofline",
    "scheduler.max_batch_size=48",
    "scheduler.max_batched_tokens=512",
    "model.max_seq_len=1024",
]
TEXT = "model.tokenizer=fetched:smollm2"

WARM_UP = Request("warm-up", tuple(range(1, 257)), SamplingParams(8, ignore_eos=True))


def body(request: Request) -> dict[str, Any]:
    """A request as a client sends it."""
    sampling = request.sampling
    prompt = list(request.prompt_token_ids)
    return {"prompt": prompt, "max_tokens": sampling.max_tokens, "temperature": 0, "ignore_eos": True}


def in_process(settings: list[str]) -> tuple[float, float]:
    """Seconds of the burst, and CPU seconds of this process for it."""
    config = compose_run(settings).config
    plan = plan_run(config)
    engine = build_engine(plan)
    drive(engine, [WARM_UP])
    before = time.process_time()
    log = drive(engine, plan.requests, at_once=False)
    took = time.process_time() - before
    del engine
    gc.collect()
    return log.duration_s, took


def over_http(settings: list[str], requests: list[Request], folder: Path) -> tuple[float, float]:
    """The same of a server and its process."""
    own = [text for text in settings if not text.startswith(("workload", "tracking"))]
    with server_process(folder, own) as server:
        process = psutil.Process(server.pid)
        stream_at_once(server.url, [body(WARM_UP)])
        before = process.cpu_times()
        chunks = stream_at_once(server.url, [body(request) for request in requests])
        after = process.cpu_times()
        served = server.served(last=len(requests))
    if chunks != [request.sampling.max_tokens for request in requests]:
        raise RuntimeError(f"a stream has not one chunk for each token: {chunks}")
    seconds = max(each.arrival_s + each.e2el_ms / 1000 for each in served) - min(each.arrival_s for each in served)
    return seconds, after.user + after.system - before.user - before.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="steps that take no time; CPU seconds are compared")
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    settings = [*(NO_TIME if arguments.cpu else REAL), TEXT, *arguments.settings]
    requests = plan_run(compose_run(settings).config).requests
    tokens = sum(request.sampling.max_tokens for request in requests)
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}; {len(requests)} requests, {tokens} tokens\n")
    print("| round | in process, s | over HTTP, s | CPU in process, µs a token | CPU over HTTP, µs a token |")
    print("|---|---|---|---|---|")
    ratios = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            fast = ["server.time_factor=1e6"] if arguments.cpu else []
            there = over_http([*settings, *fast], requests, Path(folder))
        here = in_process(settings)
        ratios.append((there[0] / here[0], there[1] / here[1]))
        times = ["", ""] if arguments.cpu else [f"{each[0]:.2f}" for each in (here, there)]
        cells = (str(number + 1), *times, *(f"{1e6 * each[1] / tokens:.0f}" for each in (here, there)))
        print(f"| {' | '.join(cells)} |", flush=True)
    longer, dearer = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"\nCPU over HTTP: {dearer:.2f} times (median)", end="")
    print("" if arguments.cpu else f"; time over HTTP: {longer:.3f} times (median)")


if __name__ == "__main__":
    main()
