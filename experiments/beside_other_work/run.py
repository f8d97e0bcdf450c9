"""What is left of throughput beside other processes, and under a quota of CPU time.

    python -m experiments.beside_other_work.run [--busy 2] [--quota 1.5] [--rounds 3] [settings of kvlab run]
    python -m experiments.beside_other_work.run --set GOMP_SPINCOUNT=300000 --set OMP_WAIT_POLICY=passive

Each engine is a process of its own: one as it is, and one for each --set, of environment variables or settings of
kvlab run. A round goes through all of them, quiet and then beside `--busy` processes that compute without end. With
--quota an engine is in a control group that may use so many cores (this needs the right to make one).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from experiments.runs import configure
from kvlab.engine.build import build_engine
from kvlab.kernels.openmp import without_brief_waiting
from kvlab.lab.machine import CpuWatch, describe
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import plan_run

SOURCE = Path(__file__).parents[2]
SETTINGS = ["model=qwen3_mini", "workload=burst48", "tracking=off"]
GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class Measured(NamedTuple):
    """One run of the workload."""

    tokens_per_s: float
    own: float  # cores that the engine kept busy
    others: float  # cores that all else kept busy


def answer(settings: list[str]) -> None:
    """Build an engine; run the workload once for each line of standard input, and write what was measured."""
    plan = plan_run(configure(settings))
    engine = build_engine(plan)
    print(json.dumps(plan.chosen["threads"]), flush=True)
    for _ in sys.stdin:
        watch, before, began = CpuWatch(), time.process_time(), time.monotonic()
        log = drive(engine, plan.requests, at_once=False)
        own = (time.process_time() - before) / (time.monotonic() - began)
        tokens = sum(len(record.output_token_ids) for record in log.records)
        print(json.dumps([tokens / log.duration_s, own, watch.busy_cores()]), flush=True)


class Engine:
    """An engine in a process of its own, idle until it is asked."""

    def __init__(self, settings: list[str], environment: dict[str, str], group: Path | None) -> None:
        command = [sys.executable, "-m", "experiments.beside_other_work.run", "--engine", *settings]
        if group is not None:  # the shell joins it, and becomes the engine
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        self._process = subprocess.Popen(
            command,
            cwd=SOURCE,
            env=without_brief_waiting(os.environ) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.threads = json.loads(self._line())

    def run(self) -> Measured:
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return Measured(*json.loads(self._line()))

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("an engine ended early")
        return line


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.2)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def control_group(cores: float) -> Iterator[Path]:
    """A control group, of version 1 or 2, whose processes may together use so many cores."""
    old = (GROUPS / "cpu").is_dir()
    group = (GROUPS / "cpu" if old else GROUPS) / f"kvlab-{os.getpid()}"
    group.mkdir()
    quota = round(cores * PERIOD_US)
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield group
    finally:
        group.rmdir()


def start(variant: str, settings: list[str], group: Path | None) -> Engine:
    """An engine with what `variant` sets, warmed up."""
    parts = variant.split(",") if variant else []
    environment = dict(part.split("=", 1) for part in parts if part[0].isupper())
    engine = Engine([*settings, *(part for part in parts if not part[0].isupper())], environment, group)
    engine.run()
    return engine


def row(variant: str, threads: int, quiet: list[Measured], beside: list[Measured]) -> str:
    alone = statistics.median(each.tokens_per_s for each in quiet)
    cells = [variant or "as it is", str(threads), f"{alone:,.0f}"]
    if beside:
        left = statistics.median(each.tokens_per_s for each in beside)
        cells += [f"{left:,.0f}", f"{left / alone:.2f}"]
        for kind in (quiet, beside):
            cells.append(", ".join(f"{each.own:.2f} + {each.others:.2f}" for each in kind))
        cells.append(", ".join(f"{each.tokens_per_s:,.0f}" for each in beside))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="processes beside")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quota", type=float, help="cores that an engine may use")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    settings = [*SETTINGS, *arguments.settings]
    if arguments.engine:
        answer(settings)
        return
    quota = f"; a quota of {arguments.quota:g} cores" if arguments.quota else ""
    print(f"{describe('cpu')}{quota}, {time.strftime('%Y-%m-%d')}; {' '.join(settings)}")
    print(f"medians of {arguments.rounds}\n")
    header = ["engine", "threads", "quiet, tok/s"]
    if arguments.busy:
        header += [f"beside {arguments.busy}, tok/s", "share", "cores quiet, own + others", "cores beside", "each"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    with ExitStack() as stack:
        group = stack.enter_context(control_group(arguments.quota)) if arguments.quota else None
        variants = {variant: start(variant, settings, group) for variant in ["", *arguments.set]}
        for engine in variants.values():
            stack.callback(engine.close)
        quiet: dict[str, list[Measured]] = {variant: [] for variant in variants}
        beside: dict[str, list[Measured]] = {variant: [] for variant in variants}
        for _ in range(arguments.rounds):
            for variant, engine in variants.items():
                quiet[variant].append(engine.run())
            with busy(arguments.busy):
                for variant, engine in variants.items() if arguments.busy else ():
                    beside[variant].append(engine.run())
        for variant, engine in variants.items():
            print(row(variant, engine.threads, quiet[variant], beside[variant]))


if __name__ == "__main__":
    main()
