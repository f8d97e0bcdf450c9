"""Do clients that are not ours get structured outputs and tool calls from `kvlab serve`?

    python -m experiments.clients.run [--only NAME]

Each client has a virtual environment of its own in kvlab's cache, made in the first run. The model is the published
SmolLM2 (`kvlab fetch smollm2`), which has 135 million parameters: what is asked is the form of its answers alone.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from experiments.clients.programs import CLIENTS
from experiments.environments import program
from experiments.serving import server_process
from kvlab.lab.machine import describe

MODEL = "smollm2_135m"
#: The packages of each program's name up to its first "_".
PACKAGES = {
    "openai": "openai==3.54.0",
    "instructor": "instructor==1.17.0",
    "langchain": "langchain-openai==1.1.9",
    "pydantic": "pydantic-ai-slim[openai]==2.68.0",
    "litellm": "litellm==1.80.0",
    "llm": "llm==0.36",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CLIENTS)
    only = parser.parse_args().only
    failed = 0
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}\n\n| client | what | result |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder), [f"model={MODEL}"]) as server:
        for name, client in CLIENTS.items():
            if only not in (None, name):
                continue
            package = PACKAGES[name.partition("_")[0]]
            python = program(package).parent / "python"
            command: list[str | Path] = [python, Path(__file__).with_name("programs.py"), name, server.url, MODEL]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            said = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:]
            failed += done.returncode != 0
            print(f"| {package.replace('==', ' ')} | {client.__doc__} | `{''.join(said)[:160]}` |", flush=True)
    raise SystemExit(int(failed > 0))


if __name__ == "__main__":
    main()
