"""Time and bytes per second of every attention backend against the machine's read bandwidth, and its error.

    python -m experiments.attention_backends.benchmark [--figure bandwidth.png] [--json results.json]

Decode: each of `batch` sequences has `context` tokens and one query. Prefill: a prompt of `context` tokens at once.
In each round the read bandwidth and every backend are measured in turn; medians of the rounds, ratios of medians.
`gather` is no backend but what one writes first: index the cache by the table, repeat K and V for the query heads,
call PyTorch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab.attention.base import AttentionBackend, AttentionSpec, Support
from kvlab.attention.registry import attention_backends, select_backend
from kvlab.errors import BackendError
from kvlab.kernels.cpu.memory import ways_to_read
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
COLD_BYTES = 256 * 2**20  # K and V of all layers: more than a processor's caches hold
ORACLE = "concat"
PAUSE_CYCLES = 2_000_000  # of a GPU: about a millisecond
TOGETHER_S = 0.05  # how long the calls that are timed together take
PATIENCE_S = 5.0  # a backend slower than this in one case is not measured again there


@dataclass(frozen=True)
class Case:
    """`new` tokens a sequence: 1 decodes, `context` prefills. `scattered`: blocks in random order."""

    batch: int
    context: int
    group: int
    new: int = 1
    scattered: bool = False


@dataclass(frozen=True)
class Row:
    """A backend in a case. `seconds` is the median of one layer's call; `error` the largest difference from plain
    attention, relative to its largest value.
    """

    backend: str
    batch: int
    context: int
    group: int
    new: int
    scattered: bool
    seconds: float
    kv_bytes: int
    read_bandwidth: float
    error: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of K and V in the sequences over the time."""
        return self.kv_bytes / self.seconds

    @property
    def share(self) -> float:
        """Of the machine's read bandwidth, measured in the same rounds."""
        return self.bytes_per_s / self.read_bandwidth


class ReadProbe:
    """Bytes per second at which the device reads memory in order, more than its caches hold: by a sum, or on a CPU
    by kvlab's kernel where that is faster.
    """

    def __init__(self, device: str) -> None:
        self._device, self._bytes = device, 2**28 if device == "cpu" else 2**30
        if device == "cpu":
            self._ways = ways_to_read(self._bytes)
        else:
            self._ways = [torch.ones(self._bytes // 8, dtype=torch.int64, device=device).sum]

    def __call__(self) -> float:
        return self._bytes / min(seconds(way, self._device) for way in self._ways)


class Gather(AttentionBackend):
    """Attention by indexing and copying, sequence after sequence; decode alone."""

    name = "gather"

    def supports(self, spec: AttentionSpec) -> Support:
        return Support(True)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        keys, values, out = view.keys(layer), view.values(layer), []
        for sequence, length in enumerate(view.lengths):
            blocks = view.block_tables[sequence].long()
            k, v = (
                cache[blocks].transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim)[:, :length]
                for cache in (keys, values)
            )
            k, v = (x.repeat_interleave(spec.group, dim=0) for x in (k, v))
            rows = q[view.starts[sequence] : view.starts[sequence + 1]].transpose(0, 1)
            causal = len(rows[0]) > 1
            out.append(
                scaled_dot_product_attention(rows[None], k[None], v[None], is_causal=causal, scale=spec.scale)[0]
            )
        return torch.cat([x.transpose(0, 1) for x in out])


def seconds(call: Callable[[], object], device: str) -> float:
    """How long one call takes. On a GPU its time there, behind a pause in which the host launches it."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(PAUSE_CYCLES)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def make_view(case: Case, dtype: str, device: str) -> CacheView:
    """A step over a pool of random K and V, of so many layers that none is in a cache when its turn comes."""
    blocks = case.batch * -(-case.context // BLOCK_SIZE)
    layer_bytes = 2 * blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM * getattr(torch, dtype).itemsize
    layers = max(1, -(-COLD_BYTES // layer_bytes))
    storage = KVStorage(KVSpec(layers, KV_HEADS, HEAD_DIM, dtype), blocks, BLOCK_SIZE, device)
    for tensor in (storage.keys, storage.values):
        tensor[0].normal_()
        tensor[1:] = tensor[0]
    pool = PagedKVCachePool(blocks, BLOCK_SIZE, case.context, storage)
    if case.scattered:
        pool.allocator.allocate(blocks)
        pool.allocator.free(torch.randperm(blocks).tolist())
    slots = [pool.allocate_slot(case.context) for _ in range(case.batch)]
    if case.new < case.context:
        pool.view(slots, [case.context - case.new] * case.batch).advance()
    view = pool.view(slots, [case.new] * case.batch)
    for metadata in ("block_tables", "seq_lens", "query_start", "positions"):
        getattr(view, metadata)  # built once a step, not once a layer
    return view


def measure(
    case: Case, names: Sequence[str], dtype: str, device: str, rounds: int, probe: Callable[[], float]
) -> list[Row]:
    """A row for each backend that computes the case on this machine."""
    spec = AttentionSpec(KV_HEADS * case.group, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, dtype, device)
    view = make_view(case, dtype, device)
    q = torch.randn(case.batch * case.new, spec.num_heads, HEAD_DIM, device=device).to(getattr(torch, dtype))
    backends: dict[str, AttentionBackend] = {}
    among = {**attention_backends(), Gather.name: Gather}
    for name in names:
        try:
            backends[name] = select_backend(spec, name, among)
        except BackendError as error:
            print(error)
    expected = select_backend(spec, ORACLE, among).forward(q, view, 0, spec).float()
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in backends}
    for name, backend in backends.items():  # and warm up, which may compile a kernel
        found = backend.forward(q, view, 0, spec).float()
        errors[name] = float((found - expected).abs().max() / expected.abs().max())
    bandwidths = []
    layers = view.storage.spec.num_layers
    for turn in range(rounds):
        bandwidths.append(probe())
        for name, backend in backends.items():
            if turn and times[name][0] > PATIENCE_S / rounds:
                continue
            # One layer after another, as in a model: a call alone would mostly wait for sleeping threads.
            calls = max(1, min(64, int(TOGETHER_S / times[name][0]))) if turn else 1

            def run(backend: AttentionBackend = backend, calls: int = calls) -> None:
                for call in range(1, 1 + calls):
                    backend.forward(q, view, call % layers, spec)

            times[name].append(seconds(run, device) / calls)
    kv_bytes = case.batch * case.context * KV_HEADS * HEAD_DIM * 2 * q.element_size()
    bandwidth = statistics.median(bandwidths)
    return [
        Row(name, **asdict(case), seconds=statistics.median(times[name]), kv_bytes=kv_bytes,
            read_bandwidth=bandwidth, error=errors[name])
        for name in backends
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, each beside `sdpa` of its case."""
    sdpa = {(r.batch, r.context, r.group, r.new, r.scattered): r.seconds for r in rows if r.backend == "sdpa"}
    lines = [
        "| step | batch | context | group | blocks | backend | ms | GB/s | of bandwidth | times sdpa | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        base = sdpa.get((r.batch, r.context, r.group, r.new, r.scattered))
        step, blocks = "decode" if r.new == 1 else "prefill", "random" if r.scattered else "in order"
        reads = (f"{r.bytes_per_s / 1e9:.1f}", f"{r.share:.0%}") if r.new == 1 else ("", "")
        ratio = f"{base / r.seconds:.1f}" if base else ""
        lines.append(
            f"| {step} | {r.batch} | {r.context:,} | {r.group} | {blocks} | {r.backend} | {r.seconds * 1e3:.2f} "
            f"| {reads[0]} | {reads[1]} | {ratio} | {r.error:.0e} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Bytes per second of decode over context, a panel for each group size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(
        ("cpu", "triton", "sdpa", "concat", "online_softmax", "safe_softmax", "gather"),
        ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#999999"), strict=True,
    ))  # fmt: skip
    decode = [r for r in rows if r.new == 1 and r.batch == max(x.batch for x in rows if x.new == 1)]
    groups = sorted({r.group for r in decode})
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), sharey=True, squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        mine = [r for r in decode if r.group == group]
        contexts = sorted({r.context for r in mine})
        for name, colour in colours.items():
            for scattered, style in ((False, "-o"), (True, "--s")):
                line = sorted((r.context, r.bytes_per_s / 1e9) for r in mine
                              if r.backend == name and r.scattered == scattered)  # fmt: skip
                if line:
                    label = f"{name}, random blocks" if scattered else name
                    axis.plot(*zip(*line, strict=True), style, color=colour, label=label)
        limit = [statistics.median(r.read_bandwidth for r in mine if r.context == c) / 1e9 for c in contexts]
        axis.plot(contexts, limit, color="black", linewidth=1, label="read bandwidth")
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", title=f"{group} query heads to a KV head")
        axis.set_xticks(contexts, [f"{c:,}" for c in contexts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("K and V read, GB/s")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--backends", default=",".join([*attention_backends(), Gather.name]))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--groups", default="2,4")
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    names, groups = options.backends.split(","), [int(g) for g in options.groups.split(",")]
    contexts = [int(c) for c in options.contexts.split(",")]
    cases = [
        Case(options.batch, context, group, scattered=scattered)
        for context in contexts for group in groups for scattered in (False, True)
    ] + [Case(1, context, groups[0]) for context in contexts]  # fmt: skip
    if options.prefill:
        cases += [Case(1, options.prefill, group, new=options.prefill) for group in groups]
    probe = ReadProbe(options.device)
    rows: list[Row] = []
    for case in cases:
        found = measure(case, names, options.dtype, options.device, options.rounds, probe)
        print(table(found), flush=True)
        rows += found
    bandwidth = statistics.median(row.read_bandwidth for row in rows)
    where = torch.cuda.get_device_name() if options.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    title = f"{where}, {options.dtype}, {KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}"
    print(f"\n{title}; reads {bandwidth / 1e9:.1f} GB/s in order; medians of {options.rounds}\n")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.figure:
        draw(rows, options.figure, title)


if __name__ == "__main__":
    main()
