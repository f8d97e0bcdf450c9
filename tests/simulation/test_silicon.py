"""Steps timed by measured operations: their sum, how it grows, and what the tables do not have."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.models.config import DecoderConfig
from kvlab.models.families import decoder_config
from kvlab.simulation.tables import MeasuredTables
from kvlab.simulation.timings.silicon import SiliconTiming, _all_rounded, _rounded
from tests.simulation.test_roofline import counts, windowed
from tests.support.plans import composed

RUN = ("executor=simulated", "executor.timing=silicon", "executor.tensor_parallel=2", "hardware=h100_sxm")


@pytest.fixture(scope="module")
def tables() -> MeasuredTables:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")
    run = composed(*RUN, "model=qwen3_32b")
    assert run.hardware is not None
    return MeasuredTables(run.hardware, run.framework)


@pytest.fixture(scope="module")
def timing(tables: MeasuredTables) -> SiliconTiming:
    return timed(tables, qwen3())


def qwen3() -> DecoderConfig:
    return decoder_config(composed(*RUN, "model=qwen3_32b").model)


def timed(tables: MeasuredTables, model: DecoderConfig) -> SiliconTiming:
    return SiliconTiming(tables, model, 2, "bfloat16", "bfloat16")


def test_operations_add_up_to_the_packages_own_steps_of_uniform_batches(timing: SiliconTiming) -> None:
    engine = pytest.importorskip("aiconfigurator_core.sdk.engine")
    whole = engine.EngineHandle.compile("Qwen/Qwen3-32B", "h100_sxm", "vllm", tp_size=2)
    for batch, context in ((1, 100), (8, 1000), (200, 5000)):
        step = timing.device_s(np.full(batch, 1), np.full(batch, context), batch)
        assert step * 1e3 == pytest.approx(whole.predict_decode_latency(batch, context - 1), rel=0.01)
    for batch, chunk, prefix in ((1, 500, 0), (4, 1024, 0), (1, 777, 5000)):
        step = timing.device_s(np.full(batch, chunk), np.full(batch, chunk + prefix), batch)
        assert step * 1e3 == pytest.approx(whole.predict_prefill_latency(batch, chunk + prefix, prefix), rel=0.01)


def test_more_rows_longer_contexts_and_more_cached_take_no_less(timing: SiliconTiming) -> None:
    def seconds(new: list[int], lengths: list[int]) -> float:
        return timing.device_s(counts(*new), counts(*lengths), len(new))

    contexts = [seconds([1] * 64, [context] * 64) for context in range(100, 8000, 100)]
    assert contexts == sorted(contexts)
    rows = [seconds([1] * rows, [2000] * rows) for rows in (1, 8, 64, 256)]
    assert rows == sorted(rows)
    prefixes = [seconds([512], [512 + prefix]) for prefix in range(0, 8000, 250)]
    assert prefixes == sorted(prefixes)


def decoding_s(timing: SiliconTiming, contexts: NDArray[np.int64]) -> float:
    return timing._decoding_s(contexts[None])[0]


def test_ragged_batches(timing: SiliconTiming) -> None:
    decode, prefill = partial(decoding_s, timing), timing._prefilling_s
    assert decode(counts(*[500, 1500] * 32)) == decode(counts(*[1000] * 64))
    assert decode(counts(*[100] * 7, 30_000)) >= decode(counts(30_000))  # the longest is one sequence's alone
    alike = prefill([256, 256], [0, 0]), prefill([512, 512], [0, 0])
    assert prefill([256, 512], [0, 0]) == pytest.approx(sum(alike) / 2)
    mixed = timing.device_s(counts(1, 1, 300), counts(700, 900, 300), 3)
    linear = timing._linear_s(302) + timing._rows_s(timing._specs["head"], 3)
    assert mixed == pytest.approx(linear + decode(counts(700, 900)) + prefill([300], [0]))
    assert timing.device_s(counts(300), counts(300), 0) == pytest.approx(
        timing._linear_s(300) + prefill([300], [0])
    )


def test_a_window_limits_what_its_layers_attend_to(tables: MeasuredTables) -> None:
    model = qwen3()
    full, narrow = (timed(tables, windowed(model, *[window] * model.num_layers)) for window in (None, 512))
    assert decoding_s(narrow, counts(8000)) == decoding_s(full, counts(512))
    assert decoding_s(narrow, counts(300)) == decoding_s(full, counts(300))
    assert narrow._prefilling_s([300], [100]) == full._prefilling_s([300], [100])
    pieces = narrow._prefilling_s([1024], [0])
    assert pieces == pytest.approx(full._prefilling_s([512, 512], [0, 511]))
    assert pieces < full._prefilling_s([4096], [0])


@pytest.mark.usefixtures("tables")
def test_fp8_is_measured_with_three_kinds_of_scales() -> None:
    def step_s(*overrides: str) -> float:
        timing = plan_engine(composed(*RUN, "model=qwen3_32b", *overrides)).timing
        assert isinstance(timing, SiliconTiming)
        return timing.device_s(counts(*[1] * 64), counts(*[8000] * 64), 64)

    plain, dynamic = step_s(), step_s("executor.weights=fp8")
    static, block = (step_s("executor.weights=fp8", f"framework.fp8_scales={kind}") for kind in ("static", "block"))
    assert static < dynamic < plain
    assert block not in (static, dynamic)
    assert step_s("kv.dtype=fp8_e4m3") < plain


def test_rounding_keeps_seven_bits() -> None:
    assert [_rounded(count) for count in (0, 1, 127, 128, 129, 131, 255, 1001)] == [
        0,
        1,
        127,
        128,
        130,
        132,
        256,
        1000,
    ]
    assert all(abs(_rounded(count) - count) <= count / 128 for count in range(1, 20_000, 7))
    assert _all_rounded(np.arange(70_000)).tolist() == [_rounded(count) for count in range(70_000)]


def test_steps_at_once_take_what_each_takes(tables: MeasuredTables) -> None:
    timing = timed(tables, windowed(qwen3(), *[None, 512] * 32))
    new, lengths = counts(1, 1, 300, 1), counts(700, 9001, 1300, 20) + counts(1, 1, 300, 1) * np.arange(40)[:, None]
    assert timing.run_s(new, lengths, 3) == [timing.device_s(new, row, 3) for row in lengths]


@pytest.mark.usefixtures("tables")
def test_collectives_are_those_of_the_version() -> None:
    devices = ("hardware=rtx_pro_6000_server", "model=qwen3_32b", "executor.dtype=bfloat16")
    ones, context = np.ones(64, np.int64), np.full(64, 1024)

    def step(*overrides: str) -> float:
        timing = plan_engine(composed("executor=simulated", "executor.timing=silicon", *devices, *overrides)).timing
        assert isinstance(timing, SiliconTiming)
        return timing.device_s(ones, context, 64)

    two, older = "executor.tensor_parallel=2", "framework.version=0.19.0"
    # 129 all-reduces of 64 x 5,120 numbers: 21 us each with 0.24, 63 with 0.19, which has no peer access.
    assert step(two, older) - step(two) == pytest.approx(129 * 42e-6, rel=0.1)
    four = "executor.tensor_parallel=4"
    assert step(four, older) > step(four)  # of which 0.19 has none of its own: extrapolated


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "hardware=rtx_4090",
            "hardware=rtx_4090: .* on a100_sxm, .*; the nearest is l40s; or take exec",
        ),
        ("framework.version=newest", "framework.version=newest: must be a version, as 0.24.0"),
        ("framework.tables=mine", "framework.tables=mine: must be one of vllm, sglang, trtllm; or"),
        ("executor.dtype=float32", "executor.dtype=float32: timing=silicon has bfloat16 and float16; or"),
        ("executor.weights=int8", "executor.weights=int8: vllm .* was measured with bfloat16, .*; or"),
        ("kv.dtype=int8", "kv.dtype=int8: vllm .* was measured with bfloat16, .*; or"),
        ("model=qwen3_tiny", "model=qwen3_tiny: vllm .* with 1 KV heads of 64 numbers .* not with 1 of 32; or"),
    ],
)
def test_what_the_tables_lack_is_a_sentence(overrides: str, message: str) -> None:
    model = () if overrides.startswith("model=") else ("model=qwen3_8b",)
    with pytest.raises(ConfigError, match=message):
        plan_engine(composed(*RUN, *model, overrides))


def test_without_the_package_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    said = r"pip install aiconfigurator-core==[0-9.]+, or take executor.timing=roofline"
    with pytest.raises(ConfigError, match=said):
        plan_engine(composed(*RUN, "model=qwen3_8b"))


def step_ms(rows: int, *settings: str) -> float:
    """Of decodes at 1,000 tokens, in ms."""
    timing = plan_engine(composed("executor=simulated", "executor.timing=silicon", *settings)).timing
    assert isinstance(timing, SiliconTiming)
    return 1000 * timing.device_s(np.full(rows, 1), np.full(rows, 1000), rows)


@pytest.mark.usefixtures("tables")
class TestWhatStepsShow:
    B300 = ("hardware=b300_sxm", "model=qwen3_32b", "executor.tensor_parallel=8")

    def test_small_all_reduces_end_in_the_norm_behind_them(self) -> None:
        own = {version: step_ms(32, *self.B300, f"framework.version={version}") for version in ("0.16.0", "0.20.1")}
        assert own["0.16.0"] > 1.3 * own["0.20.1"]  # 26 us each and a norm, or 12 us with it
        none = "framework.fused_allreduce_mib=0"
        assert step_ms(32, *self.B300, "framework.version=0.20.1", none) == pytest.approx(own["0.16.0"], rel=0.02)
        many = {step_ms(2000, *self.B300, setting) for setting in (none, "framework.fused_allreduce_mib=4")}
        assert len(many) == 1  # too large to end in one
        one = self.B300[:2]
        assert step_ms(32, *one) == step_ms(32, *one, none)

    def test_what_tokens_take_beyond_the_operations_is_divided_among_devices(self) -> None:
        for devices in (1, 8):
            settings = (*self.B300[:2], f"executor.tensor_parallel={devices}")
            more, none = (step_ms(256, *settings, f"framework.device_token_us={us}") for us in (80, 0))
            assert more - none == pytest.approx(256 * 0.08 / devices)

    def test_products_that_were_measured_with_their_launches_are_those_of_another_framework(self) -> None:
        settings = ("hardware=b200_sxm", "model=qwen3_32b", "executor.weights=fp8", "framework.fp8_scales=block")
        timing = plan_engine(composed("executor=simulated", "executor.timing=silicon", *settings)).timing
        assert timing is not None
        assert "fp8_block of sglang" in timing.description
        assert step_ms(8, *settings) < step_ms(8, *settings[:2], "framework.device_token_us=5")  # 16 bits

    def test_products_and_experts_in_nvfp4_of_tensorrt_llm_are_those_of_sglang(self) -> None:
        device, framework = "hardware=b200_sxm", "framework=trtllm"
        dense, weights = ("model=llama3_1_70b", device, framework), "executor.weights=nvfp4"
        # Its own products of few rows take longer than those in fp8.
        assert step_ms(8, *dense, weights) < 0.75 * step_ms(8, *dense, "executor.weights=fp8")
        sparse = ("model=deepseek_v3", device, weights, "executor.tensor_parallel=8")
        own, others = (step_ms(512, *sparse, f"framework={name}") for name in ("trtllm", "sglang"))
        assert own < 1.1 * others  # with CUTLASS's experts 7 ms more

    def test_a_product_of_few_rows_takes_no_longer_than_of_twice_and_four_times_as_many(self) -> None:
        settings = ("hardware=b200_sxm", "model=llama3_1_70b", "executor.tensor_parallel=4", "executor.weights=fp8")
        few, more = (step_ms(rows, *settings, "framework.fp8_scales=static") for rows in (4, 16))
        assert few < 1.05 * more  # some of 4 rows were measured to take 2.5 times as long
