"""Attack kvlab for as long as there is time: pools, storms over the engine, killed commands, damaged checkpoints,
and a server with clients that try to stop it.

    make soak SOAK_MINUTES=15
    python -m experiments.soak.run [--minutes 15] [--seed 1]
    python -m experiments.soak.run pools --config NAME --seed 1 --operations 2000
    python -m experiments.soak.run storms --config NAME --seed 1 --jobs 300
    python -m experiments.soak.run kills --only 7 --signal SIGTERM
    python -m experiments.soak.run checkpoints --seed 1
    python -m experiments.soak.run servers

The first two share their time between the parts and print a table; what fails is printed with the command
that does it again. Exit status 1 if anything failed. The short forms of the same are in the test suite.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import psutil
import torch

from experiments.hostile_load.attacks import ATTACKS
from experiments.hostile_load.run import LONGEST_GAP_S, SETTINGS, watch
from experiments.serving import server_process
from kvlab.lab.machine import describe
from tests.engine import storm, storm_client
from tests.lab import killing
from tests.property import fuzz
from tests.property.reference import kv_of, stored_kv_of
from tests.security.checkpoints import damage

OPERATIONS, JOBS = 2000, 300  # of a history, and of a storm
DAMAGES = 50  # of a round
ATTACKED_S = 20.0  # of a server, a round
SHARES = {"pools": 0.35, "storms": 0.25, "kills": 0.25, "checkpoints": 0.05, "servers": 0.1}  # of the time


@dataclass
class Part:
    """What a part did."""

    rounds: int = 0
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: tuple[int, int] = (0, 0)  # bytes, once the first round is over and at the end


Round = tuple[str, Callable[[], Counter[str]]]  # its name, and what it does


def pools(seed: int) -> Iterator[Round]:
    """A history of each kind of pool, then again with another seed."""
    for number in itertools.count(seed):
        for config in fuzz.CONFIGS.values():
            yield config.name, partial(_history, number, OPERATIONS, config)


def _history(seed: int, operations: int, config: fuzz.FuzzConfig) -> Counter[str]:
    done = fuzz.run(seed, operations, config)
    kv_of.cache_clear()
    stored_kv_of.cache_clear()
    names = ("evicted_blocks", "cow_copies", "merged_blocks", "hit_tokens")
    return Counter({"operations": done.operations} | {name: done.counters[name] for name in names})


def storms(seed: int) -> Iterator[Round]:
    """A storm of each kind of fault on each pool, then again with another seed."""
    for number in itertools.count(seed):
        for config in storm.CONFIGS.values():
            yield config.name, partial(_storm, number, JOBS, config)


def _storm(seed: int, jobs: int, config: storm.StormConfig) -> Counter[str]:
    counts = storm.run(seed, jobs, config)
    storm_client.alone.cache_clear()
    ends = sum(counts[name] for name in ("length", "stop", "failed", "aborted", "left"))
    return Counter({"streams": ends}) + counts


def kills(seed: int) -> Iterator[Round]:
    """Every point with every signal, in random order."""
    draws = random.Random(seed)
    while True:
        pairs = list(itertools.product(killing.KILL_POINTS, killing.SIGNALS))
        draws.shuffle(pairs)
        for point, sign in pairs:
            yield f"{point.command}: {point.name}, {sign}", partial(_kill, point, sign, killing.forked)


def _kill(point: killing.KillPoint, sign: str, launch: killing.Launcher) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        killing.check(point, sign, Path(folder), launch)
    return Counter({f"{point.command}s killed": 1, sign: 1})


def checkpoints(seed: int) -> Iterator[Round]:
    """Damaged files of a model, each refused in a sentence or served."""
    for first in itertools.count(seed, DAMAGES):
        yield f"seeds from {first}", partial(_damages, range(first, first + DAMAGES))


def _damages(seeds: range) -> Counter[str]:
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                sentence = damage(Path(folder), seed)
            except Exception as error:
                again = f"python -m experiments.soak.run checkpoints --seed {seed}"
                raise AssertionError(f"{type(error).__name__}: {error}\n  {again}") from error
            done["damaged checkpoints"] += 1
            done["served"] += sentence is None
    return done


def servers(seed: int) -> Iterator[Round]:
    """A server under every attack at once, beside a stream that has to go on."""
    for number in itertools.count(seed):
        yield f"server {number}", _attacked


def _attacked() -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder), SETTINGS) as server:
        watched = watch(server, list(ATTACKS), ATTACKED_S)
    if watched.lost or watched.longest_gap_s > LONGEST_GAP_S:
        raise AssertionError(f"a gap of {watched.longest_gap_s:.2f} s in a stream; {watched.lost[:3]}")
    ends = sum(watched.ends.values(), Counter[str]())
    return Counter({"streamed tokens": watched.tokens, "hostile calls": sum(ends.values())})


def attack(name: str, rounds: Iterator[Round], seconds: float) -> Part:
    """Rounds until the time is up; one that fails stops no other."""
    part, begin, first = Part(), time.monotonic(), 0
    for what, act in rounds:
        try:
            part.done += act()
        except Exception as error:
            part.failures.append(f"{name}, {what}: {error}")
            print(f"FAILED: {part.failures[-1]}", file=sys.stderr, flush=True)
        part.rounds += 1
        first = first or resident()
        if time.monotonic() - begin >= seconds:
            break
    part.seconds = time.monotonic() - begin
    part.memory = (first, resident())
    print(f"{name}: {part.rounds} rounds in {part.seconds:.0f} s, {len(part.failures)} failed", file=sys.stderr)
    return part


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def table(parts: dict[str, Part], seed: int) -> str:
    """What was done, as a table for the page."""
    lines = [
        f"{describe('cpu')}, {datetime.now(UTC):%Y-%m-%d}, seed {seed}",
        "",
        "| part | rounds | seconds | what was done | memory, first round to last | failures |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        done = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in part.done.items())
        first, last = (size / 2**20 for size in part.memory)
        memory = f"{first:.0f} to {last:.0f} MiB"
        row = (name, f"{part.rounds:,}", f"{part.seconds:.0f}", done, memory, str(len(part.failures)))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    if options.part == "pools":
        print(fuzz.run(options.seed, options.operations, fuzz.CONFIGS[options.config]))
    elif options.part == "storms":
        print(dict(storm.run(options.seed, options.jobs, storm.CONFIGS[options.config])))
    elif options.part == "kills":
        print(dict(_kill(killing.KILL_POINTS[options.only], options.signal, killing.spawned)))
    elif options.part == "checkpoints":
        print(dict(_damages(range(options.seed, options.seed + 1))))
    elif options.part == "servers":
        print(dict(_attacked()))
    else:
        every = {"pools": pools, "storms": storms, "kills": kills, "checkpoints": checkpoints, "servers": servers}
        parts = {
            name: attack(name, rounds(options.seed), SHARES[name] * options.minutes * 60)
            for name, rounds in every.items()
        }
        print(table(parts, options.seed))
        failures = [failure for part in parts.values() for failure in part.failures]
        for failure in failures:
            print(f"\n{failure}")
        return 1 if failures else 0
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(SHARES))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first round; by default the time"
    )
    parser.add_argument("--config", choices=[*fuzz.CONFIGS, *storm.CONFIGS], metavar="NAME")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--only", type=int, default=0, help="number of the moment, in tests/lab/killing.py")
    parser.add_argument("--signal", choices=killing.SIGNALS, default="SIGKILL")
    options = parser.parse_args()
    known = {"pools": list(fuzz.CONFIGS), "storms": list(storm.CONFIGS)}.get(options.part)
    if known is not None and options.config not in known:
        parser.error(f"--config: one of {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
