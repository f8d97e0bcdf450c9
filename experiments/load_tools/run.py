"""Real load tools against `kvlab serve`: do their figures agree with the server's own?

    python -m experiments.load_tools.run [--requests 64] [--only aiperf] [--keep FOLDER]

Each tool has a virtual environment of its own in kvlab's cache (aiperf 0.8 GB, guidellm 1.5 GB), made in the first
run. The model is the published SmolLM2 (`kvlab fetch smollm2`), and Llama 3.1 8B on a simulated L40S with SmolLM2's
tokenizer. The server's own figures are of the records of the very requests that the tool counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from experiments.load_tools.tools import Load, Reported, aiperf, guidellm, write_trace
from experiments.serving import server_process
from kvlab.lab.machine import describe

REAL = ["model=smollm2_135m"]
SIMULATED = ["executor=simulated", "hardware=l40s", "model=llama3_1_8b", "model.tokenizer=fetched:smollm2"]
SIMULATED += ["executor.timing=roofline", "scheduler.max_batch_size=48", "scheduler.max_batched_tokens=512"]
SIMULATED += ["model.max_seq_len=4096"]
SHARE, MILLISECONDS = 0.02, 2.0  # what the tools may differ by: the larger of both
Tool = Callable[[str, str, Load, Path], Reported]


def compare(tool: Tool, settings: list[str], load: Load, folder: Path) -> tuple[Reported, Reported]:
    """What the tool says of a load, and what the server says of the same requests."""
    model = next(text.removeprefix("model=") for text in settings if text.startswith("model="))
    with server_process(folder, settings) as server:
        reported = tool(server.url, model, load, folder)
        served = server.served(last=load.requests)
    times = [(each.ttft_ms, each.tpot_ms or 0.0, each.e2el_ms) for each in served]
    return reported, Reported(len(served), *map(statistics.median, zip(*times, strict=True)))


def agree(reported: Reported, served: Reported) -> bool:
    """Whether the two are of the same requests and their times near enough."""
    pairs = zip(reported[1:], served[1:], strict=True)
    near = all(abs(one - other) <= max(SHARE * other, MILLISECONDS) for one, other in pairs)
    return near and reported.requests == served.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--only", choices=("aiperf", "guidellm"))
    parser.add_argument("--keep", type=Path, help="a folder for what tools and servers write")
    arguments = parser.parse_args()
    count, failed = arguments.requests, 0
    print(f"{describe('cpu')}, {time.strftime('%Y-%m-%d')}; medians in ms: the tool's, the server's\n")
    print("| tool | server | load | requests | ttft | itl | e2e | agree |")
    print("|---|---|---|---|---|---|---|---|")
    keep = arguments.keep
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as place:
        trace = Load(40, trace=write_trace(_folder(Path(place)) / "trace.jsonl"))
        for number, (tool, server, settings, load) in enumerate(
            [
                (aiperf, "simulated", SIMULATED, Load(count)),
                (aiperf, "simulated", SIMULATED, trace),
                (aiperf, "real", REAL, Load(count, concurrency=4, prompt_tokens=200)),
                (guidellm, "simulated", SIMULATED, Load(count)),
                (guidellm, "real", REAL, Load(count, concurrency=4, prompt_tokens=200)),
            ]
        ):
            if arguments.only not in (None, tool.__name__):
                continue
            reported, served = compare(tool, settings, load, _folder(Path(place, str(number))))
            what = "Mooncake trace" if load.trace else f"{load.concurrency} at once"
            figures = [f"{one:.2f}, {other:.2f}" for one, other in zip(reported[1:], served[1:], strict=True)]
            near = agree(reported, served)
            failed += not near
            cells = (tool.__name__, server, what, str(reported.requests), *figures, "yes" if near else "no")
            print(f"| {' | '.join(cells)} |", flush=True)
    raise SystemExit(int(failed > 0))


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


if __name__ == "__main__":
    main()
