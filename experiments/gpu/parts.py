"""The parts of `make gpu`. Each gives its rows one by one: what, whether it held, a line for the table, figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from experiments.attention_backends.benchmark import Case, ReadProbe, measure
from experiments.gpu.sizes import ROOT, Sizes, model
from kvlab.attention.registry import select_backend
from kvlab.config import KVConfig, ModelConfig, SchedulerConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.engine.clock import WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import SamplingBatch, StepResult
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.sizing import PoolSize, size_pool
from kvlab.kv.storage import KVStorage
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import drive
from kvlab.models.config import attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import decoder_config
from kvlab.models.ops import select_ops
from kvlab.models.weight_sources import open_weights
from kvlab.models.weights import DummyWeights
from kvlab.workloads import build_requests

TESTS = ROOT / "tests" / "kernels"
ELSEWHERE = ("test_cpu_", "test_offline")  # tests that need no GPU
TOLERANCE = 2**-6  # of the largest value: two steps of bfloat16, to which both results are rounded
PARITY_SEED = 2  # the best two logits of each token are at least 1e-3 apart: rounding does not swap them
FIGURES = {
    "throughput/output_tokens_per_s": "output_tokens_per_s",
    "throughput/total_tokens_per_s": "total_tokens_per_s",
    "latency/ttft_ms_p50": "ttft_ms_p50",
    "latency/tpot_ms_p50": "tpot_ms_p50",
    "capacity/peak_running": "peak_running",
    "capacity/kv_bytes": "kv_bytes",
    "engine/steps": "steps",
    "engine/step_ms_p50": "step_ms_p50",
    "duration_s": "duration_s",
    "requests/completed": "completed",
    "kv/leaked_blocks": "leaked_blocks",
}


@dataclass(frozen=True)
class Row:
    case: str
    ok: bool
    result: str
    figures: dict[str, Any] = field(default_factory=dict)


def _attempt(what: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows, or one that says how they failed: what comes behind is tried all the same."""
    try:
        yield from rows()
    except Exception as error:
        traceback.print_exc()
        yield Row(what, False, f"{type(error).__name__}: {error}"[:300])


def kernels(sizes: Sizes) -> Iterator[Row]:
    """The kernels' own tests on the device. Most of their time goes into compiling, so the files run at once."""
    files = sorted(path for path in TESTS.glob("test_*.py") if not path.name.startswith(ELSEWHERE))
    groups = {"selected tests": files} if sizes.kernel_tests else {path.stem: [path] for path in files}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        running = {what: _start_tests(what, files, sizes, directory) for what, files in groups.items()}
        while running:
            for what in [what for what, process in running.items() if process.poll() is not None]:
                yield row_of_tests(what, running.pop(what).returncode, directory)
            time.sleep(0.05)


def _start_tests(what: str, files: list[Path], sizes: Sizes, directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={TESTS}"]
    command += [f"--junitxml={directory / what}.xml", *map(str, files)]
    if sizes.kernel_tests:
        command += ["-k", sizes.kernel_tests]
    # Plugins that happen to be installed are no part of this, and tensors this small need no second thread.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    with (directory / f"{what}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def row_of_tests(what: str, status: int, directory: Path) -> Row:
    report = directory / f"{what}.xml"
    if not report.is_file():  # pytest did not get as far
        tail = (directory / f"{what}.log").read_text(errors="replace").strip().splitlines()[-1:]
        return Row(what, False, f"pytest ended with status {status}: {' '.join(tail)}")
    suites = list(ElementTree.parse(report).iter("testsuite"))
    counts = {key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    messages = [
        f"{case.get('name')}: {(bad.get('message') or '')[:200]}"
        for case in ElementTree.parse(report).iter("testcase")
        for bad in case
        if bad.tag in ("failure", "error")
    ]
    result = f"{passed} passed, {failed} failed, {counts['skipped']} skipped"
    return Row(what, status == 0 and passed > 0, result, {**counts, "passed": passed, "messages": messages[:10]})


def attention(sizes: Sizes) -> Iterator[Row]:
    """The benchmark of the backends in `experiments/attention_backends`."""
    probe = ReadProbe(sizes.device)
    for case in sizes.cases:
        step = "decode" if case.new == 1 else "prefill"
        what = f"{step}, batch {case.batch}, context {case.context:,}, group {case.group}"
        yield from _attempt(what, partial(_measure, what, case, sizes, probe))


def _measure(what: str, case: Case, sizes: Sizes, probe: ReadProbe) -> Iterator[Row]:
    names = ("triton", "sdpa")
    found = {row.backend: row for row in measure(case, names, "bfloat16", sizes.device, sizes.rounds, probe)}
    for name in names:
        row = found.get(name)
        if row is None:
            yield Row(f"{what}: {name}", False, "cannot run here")
            continue
        result = f"{row.seconds * 1e3:.3f} ms"
        if case.new == 1:
            result += f", {row.bytes_per_s / 1e9:.1f} GB/s, {row.share:.0%} of read bandwidth"
        if name != "sdpa" and "sdpa" in found:
            result += f", {found['sdpa'].seconds / row.seconds:.1f} times sdpa"
        yield Row(f"{what}: {name}", row.error <= TOLERANCE, f"{result}, error {row.error:.0e}", asdict(row))


def parity(sizes: Sizes) -> Iterator[Row]:
    """Greedy tokens of the tiny models in float32, on the device and, with plain attention, on a CPU."""
    torch.set_float32_matmul_precision("highest")
    here, there = (DummyWeights(torch.float32, device).take("x", (700, 3000)) for device in ("cpu", sizes.device))
    same = torch.equal(here, there.cpu())
    yield Row("dummy weights", same, "the same bits on both" if same else "other bits than on a CPU")
    for name in sizes.parity_models:
        expected = _outputs(name, "paged", "concat", "cpu", sizes)
        for kv, backend in sizes.parity_layouts:
            what = f"{name}, {kv}, {backend}"
            yield from _attempt(what, partial(_compare, what, name, kv, backend, sizes, expected))


def _compare(what: str, name: str, kv: str, backend: str, sizes: Sizes, expected: _Outputs) -> Iterator[Row]:
    found = _outputs(name, kv, backend, sizes.device, sizes)
    wrong = [i for i, pair in enumerate(zip(found.tokens, expected.tokens, strict=True)) if pair[0] != pair[1]]
    outputs, tokens = len(expected.tokens), sum(map(len, expected.tokens))
    result = f"{outputs - len(wrong)} of {outputs} outputs equal, {tokens} tokens"
    figures: dict[str, Any] = {"different": wrong, "tokens": tokens}
    if not wrong:
        figures["logit_error"] = error = float((found.logits - expected.logits).abs().max())
        result += f", logits within {error:.0e}"
    yield Row(what, not wrong, result, figures)


class _Outputs(NamedTuple):
    """Each request's tokens, and the logits they were picked from."""

    tokens: list[list[int]]
    logits: torch.Tensor


class _Recorder(Sampler):
    """Keeps the logits it picks from."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        self.logits.append(logits.cpu())
        result: StepResult = super().__call__(logits, batch)
        return result

    def is_greedy(self, batch: SamplingBatch) -> bool:
        """Never, so that all logits are stored."""
        return False


def _outputs(name: str, kv: str, attention: str, device: str, sizes: Sizes) -> _Outputs:
    recorder = _Recorder()
    engine, requests, _ = _engine(
        model(name), KVConfig(kv), attention, device, "float32", sizes.parity_workload, PARITY_SEED, recorder
    )
    records = drive(engine, requests).records
    return _Outputs([list(record.output_token_ids) for record in records], torch.cat(recorder.logits))


def serving(sizes: Sizes) -> Iterator[Row]:
    """A burst on contiguous slots and on pages, at equal KV bytes. What is timed finds every kernel compiled by
    the same run before it, and an empty cache.
    """
    speeds: dict[str, float] = {}
    for kv in ("contiguous", "paged"):
        what = f"{sizes.serving_model}, {sizes.serving_workload.name}, {kv}"
        yield from _attempt(what, partial(_serve, what, kv, sizes, speeds))


def _serve(what: str, kv: str, sizes: Sizes, speeds: dict[str, float]) -> Iterator[Row]:
    config, dtype = model(sizes.serving_model, sizes.max_seq_len), sizes.serving_dtype
    token_bytes = decoder_config(config).kv_spec(dtype).bytes_per_token
    memory = KVConfig(kv, memory=str(sizes.slots * sizes.max_seq_len * token_bytes))
    for _ in range(sizes.runs):
        engine, requests, pool = _engine(config, memory, "triton", sizes.device, dtype, sizes.serving_workload)
        log = drive(engine, requests)
    metrics = run_metrics(log, pool, leaked_blocks=sum(x.rule == "leaked" for x in engine.pool.audit()))
    figures = {short: metrics.get(name, 0.0) for name, short in FIGURES.items()} | {"requests": len(requests)}
    speeds[kv] = figures["output_tokens_per_s"]
    result = (
        "{completed} of {requests} done, {output_tokens_per_s:,.0f} output tok/s, {total_tokens_per_s:,.0f} in "
        "all, ttft p50 {ttft_ms_p50:,.0f} ms, tpot p50 {tpot_ms_p50:.1f} ms, {peak_running:.0f} at once, "
        "{steps} steps in {duration_s:.1f} s".format(**figures)
    )
    if kv == "paged" and speeds.get("contiguous"):
        result += f", {speeds[kv] / speeds['contiguous']:.2f} times contiguous"
    ok = figures["completed"] == len(requests) and not figures["leaked_blocks"]
    yield Row(what, ok, result, figures)


def _engine(
    config: ModelConfig,
    kv: KVConfig,
    attention: str,
    device: str,
    dtype: str,
    workload: WorkloadConfig,
    seed: int = 0,
    sampler: Sampler | None = None,
) -> tuple[EngineCore, list[Request], PoolSize]:
    """An engine, the requests it is to serve, and the size of its pool."""
    scheduler = SchedulerConfig(max_batched_tokens=2048)
    decoder, limit = decoder_config(config), config.max_seq_len
    spec = decoder.kv_spec(dtype)
    size = size_pool(kv, spec, max_batch_size=scheduler.max_batch_size, max_seq_len=limit)
    specs = attention_specs(decoder, dtype, device)
    backend = select_backend(specs, attention)
    weights = open_weights("dummy", getattr(torch, dtype), device, norm_weight=decoder.initial_norm_weight)
    ops = select_ops(getattr(torch, dtype), device)
    executor = TorchExecutor(Decoder(decoder, weights, backend, specs, limit, ops), sampler or Sampler(), device)
    storage = KVStorage(spec, size.num_blocks, size.block_size, device)
    pool = (
        PagedKVCachePool(size.num_blocks, size.block_size, limit, storage, prefix_sharing=kv.prefix_sharing)
        if kv.backend == "paged"
        else ContiguousKVCachePool(size.num_blocks, limit, storage)
    )
    engine = EngineCore(pool, build_scheduler(scheduler), executor, WallClock(), vocab_size=decoder.vocab_size)
    return engine, build_requests(workload, vocab_size=decoder.vocab_size, seed=seed), size


PARTS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    part.__name__: part for part in (kernels, attention, parity, serving)
}
