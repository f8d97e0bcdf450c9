"""What a hit in host memory saves over computing a prompt again, and what tiers of which size find of real traffic.

    python -m experiments.offload.benchmark real [--figure FILE]
    python -m experiments.offload.benchmark simulated [--figure FILE]
    python -m experiments.offload.benchmark traffic TRACE.jsonl [--figure FILE]
    python -m experiments.offload.benchmark preemption

`real` measures this machine. The others are simulated: the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs import configure, measure
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine
from kvlab.engine.core import EngineCore
from kvlab.lab.run.plan import plan_run

BLOCK = 16
REAL = (
    "model=qwen3_0_6b",
    "model.max_seq_len=4352",
    "tracking=off",
    "workload=burst16",
    "workload.prompt_len={min: 1, max: 1}",
    "workload.output_len={min: 1, max: 1}",
    "scheduler.max_batched_tokens=512",
)
REAL_LENGTHS = (128, 256, 512, 1024, 2048)
REPETITIONS = 3
DEVICES = {
    "Llama 3.1 8B, H100": ("model=llama3_1_8b", "hardware=h100_sxm"),
    "Qwen3 32B, 2 x H200": ("model=qwen3_32b", "hardware=h200_sxm", "executor.tensor_parallel=2"),
    "Llama 3.1 70B, 4 x H100": ("model=llama3_1_70b", "hardware=h100_sxm", "executor.tensor_parallel=4"),
}
SIMULATED = (
    *("executor=simulated", "executor.timing=roofline", "tracking=off", "workload=burst16"),
    *("scheduler.max_batch_size=48", "scheduler.max_batched_tokens=8192"),
)
SIMULATED_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
LINKS_GB_S = (0.5, 1, 2, 4, 8, 16, 32, 64)
EFFICIENCY = 0.85  # hardware.host_link_efficiency
LONG = 8192  # tokens of the prompt whose link is varied
TRAFFIC = (
    *SIMULATED,
    *DEVICES["Llama 3.1 8B, H100"],
    "model.max_seq_len=131072",
    "kv.block_size=512",
    "workload=mooncake",
    "workload.window=1200",
    "workload.rate_scale=0.3",
)
CROWDED = (
    *SIMULATED,
    *DEVICES["Llama 3.1 8B, H100"],
    "model.max_seq_len=4096",
    "kv.memory=24GiB",
    "scheduler.max_batch_size=128",
    "scheduler.admission_reserve=0",
    "workload.num_requests=200",
    "workload.prompt_len={min: 500, max: 3000}",
    "workload.output_len={min: 200, max: 1000}",
)
HOST = ("null", "64GiB", "256GiB", "1TiB")
DISK = ("null", "1TiB", "4TiB")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


class Point(NamedTuple):
    """A prompt, and after how many ms its first token came: when it was computed, when the pool had it, and when
    host memory had it.
    """

    tokens: int
    bytes_per_token: int  # of a device
    computed_ms: float
    in_pool_ms: float
    loaded_ms: float

    @property
    def crossover_gb_s(self) -> float:
        """The bandwidth of a device at which loading takes as long as computing, in 10^9 bytes per second."""
        return self.tokens * self.bytes_per_token / (self.computed_ms - self.in_pool_ms) / 1e6


def answer(engine: EngineCore, name: str, prompt: tuple[int, ...]) -> RequestRecord:
    """Ask for one token, and wait for it."""
    ended: list[RequestRecord] = []
    arrival_s = engine.clock.now()
    engine.submit(Request(name, prompt, SamplingParams(1, ignore_eos=True, seed=0), arrival_s), None, ended.append)
    while engine.has_work():
        if engine.step() is None and (wakeup_s := engine.next_wakeup()) is not None:
            engine.clock.wait_until(wakeup_s)
    return ended[0]


def ttft_ms(settings: Sequence[str], prompts: Sequence[tuple[int, ...]], last: int, cached: int) -> float:
    """The median time to the first token of the last of these prompts, one after another, each of which found so
    many tokens.
    """
    engine = build_engine(plan_run(configure([*settings, f"kv.num_blocks={len(prompts[0]) // BLOCK + 2}"])))
    records = [answer(engine, f"{number}", prompt) for number, prompt in enumerate(prompts)][-last:]
    findings, found = engine.audit(), {record.cached_tokens for record in records}
    engine.close()
    if findings or found != {cached}:
        raise RuntimeError(f"{found} tokens were found, not {cached}; {findings}")
    return statistics.median(record.ttft_ms for record in records if record.ttft_ms is not None)


def point(settings: Sequence[str], tokens: int, repetitions: int, host: str) -> Point:
    """A prompt of so many tokens, in a pool that has room for one."""
    random = np.random.default_rng(tokens)
    prompts = [tuple(random.integers(0, 30_000, tokens).tolist()) for _ in range(repetitions + 1)]
    pair, cached = prompts[:2], tokens - 1
    plan = plan_run(configure([*settings, f"kv.num_blocks={tokens // BLOCK + 2}"]))
    return Point(
        tokens,
        plan.pool.bytes_per_token // plan.config.executor.tensor_parallel,
        ttft_ms(settings, prompts, repetitions, 0),
        ttft_ms(settings, [prompts[0]] * (repetitions + 1), repetitions, cached),
        ttft_ms([*settings, f"kv.offload={host}"], pair + pair * repetitions, repetitions, cached),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(name: str, points: Sequence[Point]) -> None:
    head = [
        "tokens",
        "computed, ms",
        "in host memory, ms",
        "in the pool, ms",
        "computed / loaded",
        "crossover, GB/s",
    ]
    rows = (
        [
            f"{each.tokens:,}",
            *(f"{ms:.1f}" for ms in (each.computed_ms, each.loaded_ms, each.in_pool_ms)),
            f"{each.computed_ms / each.loaded_ms:.1f}",
            f"{each.crossover_gb_s:.2f}",
        ]
        for each in points
    )
    print(f"### {name}\n\n{table(head, rows)}\n")


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def draw_lengths(
    by_name: dict[str, list[Point]], by_link: Mapping[str, Sequence[tuple[float, float]]], path: Path
) -> None:
    """Times to the first token over the prompt's length, and over the link's bandwidth."""
    figure, axes = pyplot().subplots(1, 2 if by_link else 1, figsize=(11 if by_link else 6.5, 4.2), squeeze=False)
    left = axes[0][0]
    for colour, (name, points) in zip(COLOURS, by_name.items(), strict=False):
        tokens = [each.tokens for each in points]
        left.plot(tokens, [each.computed_ms for each in points], "o-", color=colour, label=f"{name}: computed")
        left.plot(tokens, [each.loaded_ms for each in points], "s--", color=colour, label="in host memory")
    left.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="time to the first token, ms")
    left.set_xticks(tokens, [f"{each:,}" for each in tokens], fontsize=8)
    left.minorticks_off()
    left.legend(fontsize=7)
    for colour, (name, values) in zip(COLOURS, by_link.items(), strict=False):
        right, last = axes[0][1], by_name[name][SIMULATED_LENGTHS.index(LONG)]
        right.plot(*zip(*values, strict=True), "s--", color=colour, label=f"{name}: in host memory")
        right.axhline(last.computed_ms, color=colour, linewidth=1)
        right.plot([last.crossover_gb_s / EFFICIENCY], [last.computed_ms], "k*", markersize=10)
        right.set(xscale="log", yscale="log", xlabel="hardware.host_link_gb_s", title=f"{LONG:,} tokens")
        right.set_xticks(LINKS_GB_S, [str(each) for each in LINKS_GB_S])
        right.minorticks_off()
        right.legend(fontsize=7, title="lines: computed; stars: crossover", title_fontsize=7)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def real(figure: Path | None) -> None:
    points = [point(REAL, tokens, REPETITIONS, "1GiB") for tokens in REAL_LENGTHS]
    show("qwen3_0_6b on this machine", points)
    if figure:
        draw_lengths({"qwen3_0_6b, this CPU": points}, {}, figure)


def simulated(figure: Path | None) -> None:
    by_name, by_link = {}, {}
    for name, device in DEVICES.items():
        settings = [*SIMULATED, *device, f"model.max_seq_len={SIMULATED_LENGTHS[-1] + 2}"]
        by_name[name] = [point(settings, tokens, 1, "64GiB") for tokens in SIMULATED_LENGTHS]
        show(name, by_name[name])
        by_link[name] = [
            (link, point([*settings, f"hardware.host_link_gb_s={link}"], LONG, 1, "64GiB").loaded_ms)
            for link in LINKS_GB_S
        ]
        rows = [[f"{link}", f"{ms:.1f}"] for link, ms in by_link[name]]
        print(f"{LONG:,} tokens:\n\n{table(['hardware.host_link_gb_s', 'in host memory, ms'], rows)}\n")
    if figure:
        draw_lengths(by_name, by_link, figure)


def traffic(trace: Path, figure: Path | None) -> None:
    found = {
        (host, disk): measure(
            configure([*TRAFFIC, f"workload.path={trace}", f"kv.offload={host}", f"kv.offload_disk={disk}"])
        )[2]
        for disk in DISK
        for host in HOST
    }
    head = [
        "host memory",
        "disk",
        "tokens found, %",
        "in host memory",
        "on disk",
        "first token p50, ms",
        "p90, ms",
        "mean, ms",
    ]
    rows = [[*map(said, key), *row(metrics)] for key, metrics in found.items()]
    print(f"{table(head, rows)}\n")
    if figure:
        draw_traffic(found, figure)


def preemption() -> None:
    rows = []
    for host, mode in (("null", "recompute"), ("64GiB", "recompute"), ("64GiB", "swap"), ("64GiB", "auto")):
        metrics = measure(configure([*CROWDED, f"kv.offload={host}", f"scheduler.preemption.mode={mode}"]))[2]
        names = ("requests/preemptions", "tokens/recomputed", "kv/swapped_out_blocks", "kv/swapped_in_blocks")
        numbers = [f"{metrics.get(name, 0):,.0f}" for name in names]
        rows.append([mode, said(host), *numbers, f"{metrics['throughput/output_tokens_per_s']:,.0f}"])
    head = ["mode", "host memory", "preemptions", "tokens computed again", "blocks out", "blocks in", "tokens/s"]
    print(f"{table(head, rows)}\n")


def said(setting: str) -> str:
    return "none" if setting == "null" else setting.replace("iB", " iB").replace("G ", " G").replace("T ", " T")


def row(metrics: dict[str, float]) -> list[str]:
    shares = (100 * metrics.get(f"kv/{tier}_hit_tokens", 0) / metrics["tokens/prompt"] for tier in ("host", "disk"))
    found = [100 * metrics["kv/prefix_hit_rate"], *shares]
    latencies = [metrics[f"latency/ttft_ms_{name}"] for name in ("p50", "p90", "mean")]
    return [f"{each:.1f}" for each in found] + [f"{each:,.0f}" for each in latencies]


def draw_traffic(found: dict[tuple[str, str], dict[str, float]], path: Path) -> None:
    """Hit rates and times to the first token over the host memory, a line for each disk."""
    plots = pyplot()
    figure, axes = plots.subplots(1, 2, figsize=(11, 4.2))
    for axis, name, factor, label in (
        (axes[0], "kv/prefix_hit_rate", 100, "prompt tokens found, %"),
        (axes[1], "latency/ttft_ms_mean", 1e-3, "mean time to the first token, s"),
    ):
        for colour, disk in zip(COLOURS, DISK, strict=False):
            values = [factor * found[host, disk][name] for host in HOST]
            axis.plot(range(len(HOST)), values, "o-", color=colour, label=f"disk: {said(disk)}")
        axis.set_xticks(range(len(HOST)), [said(host) for host in HOST])
        axis.set(xlabel="host memory (kv.offload)", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real", "simulated", "traffic", "preemption"])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "traffic" and arguments.trace is None:
        parser.error("traffic needs the file of a trace")
    if arguments.what == "real":
        real(arguments.figure)
    elif arguments.what == "simulated":
        simulated(arguments.figure)
    elif arguments.what == "preemption":
        preemption()
    else:
        traffic(arguments.trace, arguments.figure)


if __name__ == "__main__":
    main()
