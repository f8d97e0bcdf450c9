"""kvlab and other engines on the same requests, in turns.

    python -m experiments.cpu_speed.compare --vllm-python ENVIRONMENT/bin/python [--workloads burst16 burst48 long8]
                                            [--peers vllm-compiled transformers] [--rounds 5] [--json FILE]

Each program runs in a process of its own; each round runs each program once. Prints output tokens per second,
medians of rounds, how many times a peer's figure kvlab's is, and the share of the roofline that kvlab reached, of
the rates that the machine had right before and after: who shares its memory takes some of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from experiments.runs import configure
from kvlab.cli.roofline import logged_costs, read_run
from kvlab.config import RunConfig
from kvlab.engine.threads import resolve_threads
from kvlab.lab.machine import describe
from kvlab.lab.rates import measure
from kvlab.lab.roofline import MachineRates, roofline
from kvlab.paths import SOURCE
from kvlab.workloads import build_requests

SETTINGS = [
    "executor=cpu",
    "executor.dtype=bfloat16",
    "kv=paged",
    "kv.memory=3GiB",
    "scheduler.max_batch_size=48",
    "scheduler.max_batched_tokens=1024",
]
MAX_SEQ_LEN = "model.max_seq_len=4096"
SHARE = "efficiency/roofline_share"


def write_requests(config: RunConfig, path: Path) -> None:
    """The workload as JSON lines that both sides read."""
    vocabulary = config.model.architecture["vocab_size"]
    requests = build_requests(config.workload, vocab_size=vocabulary, seed=config.seed)
    lines = [
        {"arrival_s": 0.0, "prompt_token_ids": r.prompt_token_ids, "max_tokens": r.sampling.max_tokens}
        for r in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(config: RunConfig, directory: Path) -> None:
    """The model's config.json."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    shapes = AutoConfig.for_model(config.model.family, **config.model.architecture)
    shapes.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shapes.model_type]]
    shapes.save_pretrained(directory)


def run_kvlab(model: str, requests: Path, extra: list[str], folder: Path) -> dict[str, float]:
    """One run in a fresh process: its metrics, the machine's rates around it, and the share of their roofline."""
    command = [sys.executable, "-m", "src.run", f"model={model}", MAX_SEQ_LEN, "workload=jsonl"]
    command += [f"workload.path={requests}", *SETTINGS, "tracking=off", f"hydra.run.dir={folder}", *extra]
    before = measure("bfloat16")
    began = time.perf_counter()
    _checked(command)
    whole = time.perf_counter() - began
    rates = MachineRates(*map(max, before, measure("bfloat16")))
    summary, config, steps = read_run(folder)
    share = roofline(logged_costs(summary, config), steps, rates).share
    metrics: dict[str, float] = summary["metrics"]
    return metrics | rates._asdict() | {"whole_s": whole, SHARE: share}


def run_peer(python: str, peer: str, requests: Path, model: Path) -> dict[str, float]:
    """One run of a peer: output tokens and seconds."""
    script = str(Path(__file__).with_name("peers.py"))
    result: dict[str, float] = json.loads(
        _checked([python, script, peer, str(requests), str(model)]).splitlines()[-1]
    )
    return result


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--workloads", nargs="+", default=["burst16", "burst48", "long8"])
    parser.add_argument("--peers", nargs="*", default=["vllm-compiled", "transformers"])
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overrides", nargs="*", default=[], help="of python -m src.run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(resolve_threads(None))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configure([f"model={arguments.model}", MAX_SEQ_LEN])
        write_model(config, folder / "model")
        for workload in arguments.workloads:
            requests = folder / f"{workload}.jsonl"
            write_requests(configure([f"model={arguments.model}", f"workload={workload}"]), requests)
            found[workload] = {"kvlab": [], **{peer: [] for peer in arguments.peers}}
            for turn in range(arguments.rounds):
                for program, results in found[workload].items():
                    if program == "kvlab":
                        out = folder / f"{workload}-{turn}"
                        results.append(run_kvlab(arguments.model, requests, arguments.overrides, out))
                    else:
                        python = arguments.vllm_python if program.startswith("vllm") else sys.executable
                        results.append(run_peer(python, program, requests, folder / "model"))
                    print(f"{workload} round {turn + 1}: {program} {said(results[-1])}", file=sys.stderr)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))
    print(f"{describe('cpu')}; {arguments.model}, bfloat16; {time.strftime('%Y-%m-%d')}\n")
    print(table(found))


def rate(result: dict[str, Any]) -> float:
    """Output tokens per second."""
    if "seconds" in result:
        return float(result["output_tokens"] / result["seconds"])
    return float(result["throughput/output_tokens_per_s"])


def said(result: dict[str, Any]) -> str:
    """A result in words."""
    words = f"{rate(result):.1f} tok/s"
    if SHARE in result:
        bandwidth, flops = result["read_bytes_per_s"] / 1e9, result["flops_per_s"] / 1e12
        words += f", {result[SHARE]:.0f} % of {bandwidth:.1f} GB/s and {flops:.2f} TFLOP/s"
    return words


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Markdown: a row for each workload and program."""
    rows = [
        "| workload | program | output tok/s | of each round | kvlab is | roofline share |",
        "|---|---|---|---|---|---|",
    ]
    for workload, programs in found.items():
        rates = {program: [rate(result) for result in results] for program, results in programs.items()}
        medians = {program: statistics.median(values) for program, values in rates.items()}
        for program, values in rates.items():
            ratio = statistics.median(a / b for a, b in zip(rates["kvlab"], values, strict=True))
            times = "" if program == "kvlab" else f"{ratio:.2f} times"
            shares = [result[SHARE] for result in programs[program] if SHARE in result]
            share = f"{statistics.median(shares):.0f} %" if shares else ""
            each = ", ".join(f"{value:.1f}" for value in values)
            rows.append(f"| {workload} | {program} | {medians[program]:.1f} | {each} | {times} | {share} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
