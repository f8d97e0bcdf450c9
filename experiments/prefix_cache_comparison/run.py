"""The prompt tokens that kvlab and vLLM find in their prefix caches, request by request, on the same requests.

    python -m experiments.prefix_cache_comparison.run --vllm-python ENVIRONMENT/bin/python

Both engines compute a small model with random weights in float32, with blocks of 32 tokens (the smallest that vLLM
has on a CPU) in the same bytes, and serve the conversations in a closed loop. Prints, for each workload, how many
requests have the same cached tokens, and the sums.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab.lab.results.records import read_run

SETTINGS = [
    "model=qwen3_tiny",
    "model.max_seq_len=2048",
    "executor=cpu",
    "executor.dtype=float32",
    "kv.block_size=32",
    "kv.memory=16MiB",
    "figures=false",
    "tracking=off",
]
WORKLOADS = {
    "conversations, one at a time": ["workload=multi_turn", "workload.concurrency=1", "workload.num_requests=6"],
    "conversations, four at once": ["workload=multi_turn", "workload.concurrency=4", "workload.num_requests=12"],
    "shared prefixes, 48 at once": ["workload=shared_prefix"],
}
ENGINES: dict[str, list[str]] = {"kvlab": [], "vllm_eager": ["+engine.options.block_size=32"]}


def cached(engine: str, settings: list[str], python: str) -> dict[str, tuple[int, int]]:
    """Prompt tokens of each request, and those that were found."""
    own = [*ENGINES[engine], *([] if engine == "kvlab" else [f"engine.python={python}"])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvlab.cli", "run", f"engine={engine}", *SETTINGS, *settings, *own]
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
        return {each.name: (each.prompt_tokens, each.cached_tokens) for each in read_run(Path(folder)).requests()}


def row(name: str, ours: dict[str, tuple[int, int]], theirs: dict[str, tuple[int, int]]) -> str:
    """A row of the table."""
    same = sum(ours[each] == theirs[each] for each in ours)
    sums = [sum(found for _, found in each.values()) for each in (ours, theirs)]
    prompts = sum(tokens for tokens, _ in ours.values())
    rates = " / ".join(f"{100 * each / prompts:.1f} %" for each in sums)
    return f"| {name} | {len(ours)} | {same} | {prompts:,} | {sums[0]:,} / {sums[1]:,} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    arguments = parser.parse_args()
    print("| workload | requests | the same cached tokens | prompt tokens | found, kvlab / vLLM | hit rate |")
    print("|---|---|---|---|---|---|")
    for name, settings in WORKLOADS.items():
        found = [cached(engine, settings, arguments.vllm_python) for engine in ENGINES]
        print(row(name, *found), flush=True)


if __name__ == "__main__":
    main()
