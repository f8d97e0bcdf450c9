"""What do fewer bits cost an evaluation? lm-evaluation-harness over `kvlab serve`, format by format.

    python -m experiments.precision.evaluations

Its tasks are in `tasks/`: questions with four answers, by the log-probability of each, and the perplexity of
`text.txt`. The harness has an environment of its own in kvlab's cache (1.5 GB), made in the first run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.environments import program
from experiments.serving import server_process
from kvlab.lab.machine import describe
from kvlab.models.published import published_file

HERE = Path(__file__).parent
MODEL = "smollm2_135m"
FORMATS = {
    "float32": ["executor.dtype=float32"],
    "bfloat16": ["executor.dtype=bfloat16"],
    "bfloat16, K and V in int8": ["executor.dtype=bfloat16", "kv.dtype=int8"],
    "bfloat16, K and V in fp8_e4m3": ["executor.dtype=bfloat16", "kv.dtype=fp8_e4m3"],
    "bfloat16, K in int8, V in int4": ["executor.dtype=bfloat16", "kv.dtype=int8", "kv.value_dtype=int4"],
    "bfloat16, K and V in int4": ["executor.dtype=bfloat16", "kv.dtype=int4"],
    "bfloat16, weights in int8": ["executor.dtype=bfloat16", "executor.weights=int8"],
    "bfloat16, both in int8": ["executor.dtype=bfloat16", "executor.weights=int8", "kv.dtype=int8"],
}


def evaluate(url: str, tasks: Path, folder: Path) -> dict[str, dict[str, float]]:
    """The results of both tasks."""
    about = {
        "model": MODEL,
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(published_file("smollm2").parent / "tokenizer"),
        "max_length": "512",
        "num_concurrent": "4",
    }
    told = ",".join(f"{name}={value}" for name, value in about.items())
    tool = program("lm_eval[api,hf]==0.4.13", torch=True).parent / "lm_eval"
    command: list[str | Path] = [
        tool,
        "--model",
        "local-completions",
        "--model_args",
        told,
        "--tasks",
        "facts,pages",
    ]
    command += ["--include_path", ".", "--output_path", folder / "results"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(command, cwd=tasks, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"lm_eval failed: {done.stderr[-2000:]}")
    (file,) = (folder / "results").rglob("results_*.json")
    found: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
    return found


def main() -> None:
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}\n")
    print("| | right answers | word perplexity |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        tasks = Path(place, "tasks")
        shutil.copytree(HERE / "tasks", tasks)
        pages = [
            page.strip() for page in (HERE / "text.txt").read_text(encoding="utf-8").split("\n\n") if page.strip()
        ]
        (tasks / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
        for number, (name, settings) in enumerate(FORMATS.items()):
            folder = Path(place, str(number))
            folder.mkdir()
            with server_process(folder, [f"model={MODEL}", "model.max_seq_len=1024", *settings]) as server:
                results = evaluate(server.url, tasks, folder)
            right, words = results["facts"]["acc,none"], results["pages"]["word_perplexity,none"]
            print(f"| {name} | {right:.0%} | {words:.1f} |", flush=True)


if __name__ == "__main__":
    main()
