"""The load tools, each in an environment of its own, and what they report of a load."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from experiments.environments import program, tools_folder
from kvlab.models.gguf_tokenizer import tokenizer_files
from kvlab.models.published import published_file

AIPERF, GUIDELLM = "aiperf==0.13.0", "guidellm==0.8.1"
TOKENIZER = "local/smollm2"  # as the id of a hub's model, which both tools look up in the hub's cache


class Load(NamedTuple):
    """Requests of random text: `concurrency` at once until all are sent. Or those of a trace, each at its time."""

    requests: int
    concurrency: int = 8
    prompt_tokens: int = 1_000
    output_tokens: int = 64
    trace: Path | None = None


class Reported(NamedTuple):
    """Medians in milliseconds, and how many requests they are of."""

    requests: int
    ttft_ms: float
    itl_ms: float
    e2e_ms: float


def run_tool(tool: Path, *arguments: str, folder: Path, timeout_s: float) -> None:
    """Run a tool without a network. RuntimeError, with what it said, if it fails."""
    hub = _hub(tools_folder() / "hub")
    settings = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [tool, *arguments],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    (folder / "tool.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{tool.name} ended with status {done.returncode}: {done.stderr[-2_000:]}")


def _hub(folder: Path) -> Path:
    """The tokenizer of SmolLM2, laid out as the model hub's client keeps what it fetched."""
    model = folder / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = model / "snapshots" / "0"
    if not (model / "refs" / "main").exists():
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        for name, text in tokenizer_files(published_file("smollm2")).items():
            (snapshot / name).write_text(text)
        (model / "refs" / "main").write_text("0")
    return folder


def aiperf(url: str, model: str, load: Load, folder: Path, timeout_s: float = 600) -> Reported:
    """Load the server with NVIDIA's AIPerf. Its clock begins before it takes a connection and ends with the last
    chunk that has text; its inter-token latency is a request's average.
    """
    if load.trace is None:
        what = [f"--concurrency={load.concurrency}", f"--request-count={load.requests}"]
        what += [f"--warmup-request-count={load.concurrency}", "--random-seed=1"]
        what += [f"--prompt-input-tokens-mean={load.prompt_tokens}"]
        what += [f"--prompt-output-tokens-mean={load.output_tokens}"]
    else:
        what = [f"--input-file={load.trace}", "--custom-dataset-type=mooncake_trace", "--fixed-schedule"]
    out = folder / "aiperf"
    run_tool(
        program(AIPERF),
        *("profile", f"--model={model}", f"--url={url}", "--endpoint-type=completions", "--streaming"),
        *(f"--tokenizer={TOKENIZER}", "--use-server-token-count", "--extra-inputs=ignore_eos:true"),
        *(f"--output-artifact-dir={out}", "--ui-type=none", "--no-gpu-telemetry", "--no-server-metrics"),
        *what,
        folder=folder,
        timeout_s=timeout_s,
    )
    found: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    medians = (found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency", "request_latency"))
    return Reported(round(found["request_count"]["avg"]), *medians)


def guidellm(url: str, model: str, load: Load, folder: Path, timeout_s: float = 600) -> Reported:
    """Load the server with GuideLLM. Its clock begins with the first byte it sends and ends with the stream; its
    inter-token latency is a request's average.
    """
    out = folder / "guidellm.json"
    run_tool(
        program(GUIDELLM, torch=True),
        *("run", "--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
        folder=folder,
        timeout_s=timeout_s,
    )
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    ttft, itl, e2e = (
        metrics[name]["successful"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    )
    return Reported(e2e["count"], ttft["median"], itl["median"], 1000 * e2e["median"])


def write_trace(path: Path, requests: int = 40, seconds: float = 20.0) -> Path:
    """A trace in Mooncake's format: arrivals at random, half of the prompts begin with the same 512 tokens."""
    draws = random.Random(0)
    times = sorted(draws.uniform(0, seconds * 1000) for _ in range(requests))
    with path.open("w") as file:
        for number, time_ms in enumerate(times):
            length = draws.randint(520, 1_000)
            blocks = [0 if number % 2 else 1_000 + number, 2_000 + number]
            row = {"timestamp": round(time_ms), "input_length": length, "output_length": draws.randint(32, 96)}
            file.write(json.dumps(row | {"hash_ids": blocks}) + "\n")
    return path
