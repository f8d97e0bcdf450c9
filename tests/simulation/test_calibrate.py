"""Fitting the time of a step: times made up from known coefficients are found again, whatever disturbed them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from kvlab.config import EngineConfig, ExecutorConfig, HardwareConfig, ModelConfig
from kvlab.core import PoolStats, StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.errors import ConfigError
from kvlab.lab.calibrate import RealRun, calibrate
from kvlab.lab.run.drive import drive
from kvlab.models.config import DecoderConfig
from kvlab.models.families import decoder_config
from kvlab.paths import CONF
from kvlab.simulation.calibration import Calibration, Subject
from kvlab.simulation.timings.fitted import FittedTiming
from kvlab.simulation.work import NAMES, Work, rows
from tests.simulation.test_executor import traffic
from tests.support.plans import composed

MODEL = decoder_config(composed("model=qwen3_0_6b").model)
TRUE = dict.fromkeys(NAMES, 0.0) | {
    "weights": 0.030,
    "tiles": 0.004,
    "rows_64": 0.0004,
    "read": 4e-6,
    "repeated": 2e-6,
    "pairs": 2e-7,
}
SUBJECT = Subject("qwen3_0_6b", MODEL.num_parameters, "bfloat16", 2.0, 114688)


def real_run(
    seed: int, *, steps: int = 300, noise: float = 0.0, sharing: bool = True, model: DecoderConfig = MODEL
) -> RealRun:
    """A run whose steps took the time that TRUE gives, or longer."""
    rng = np.random.default_rng(seed)
    found, now = list[StepRecord](), 0.0
    for index in range(steps):
        decoding, chunk = int(rng.integers(1, 49)), int(rng.integers(16, 464)) * (index % 3 == 0)
        context, sequences = int(rng.integers(50, 400, decoding).sum()), decoding + (chunk > 0)
        step = StepRecord(
            index=index,
            start_s=now,
            end_s=now,
            running=sequences,
            waiting=0,
            batch_seqs=sequences,
            prefill_tokens=chunk,
            decode_tokens=decoding,
            sampled_tokens=decoding,
            context_tokens=context + chunk,
            attended_tokens=context + chunk * (chunk + 1) // 2,
            pool=PoolStats(16, 3072, 1, context + chunk if not sharing else (context + chunk) // 2),
        )
        took = float((rows(model, [Work.of(step)]) @ list(TRUE.values()))[0]) * (1 + noise * rng.standard_normal())
        found.append(replace(step, end_s=now + took))
        now += took + 0.0001
    found.append(replace(found[-1], start_s=now, end_s=now, batch_seqs=0))
    return RealRun(f"run{seed}", SUBJECT, model, "a machine", 2, "cpu, native", found)


def test_coefficients_are_found_and_lie_in_their_intervals() -> None:
    fit = calibrate([real_run(0, noise=0.02), real_run(1, noise=0.02)])
    found = fit.calibration
    assert found.between_s == pytest.approx(0.0001)
    for name, value in TRUE.items():
        low, high = fit.intervals[name]
        assert low <= value <= high or value == pytest.approx(low, rel=0.05, abs=1e-4)
    assert fit.steps == 600
    assert abs(fit.held_out.total) < 0.01
    assert 0.01 < fit.held_out.median < 0.02  # of the noise, whose median is 0.67 deviations
    works = [Work.of(step) for step in real_run(2).steps[:-1]]
    seconds = [step.end_s - step.start_s + 0.0001 for step in real_run(2).steps[:-1]]
    assert found.step_s(MODEL, works) == pytest.approx(seconds, rel=0.03)


def test_steps_that_were_held_up_count_little() -> None:
    run = real_run(0, noise=0.01)
    held_up = [replace(step, end_s=step.end_s + 0.5 * (step.index % 20 == 7)) for step in run.steps]
    fit = calibrate([replace(run, steps=held_up)])
    assert fit.calibration.coefficients["weights"] == pytest.approx(TRUE["weights"], rel=0.1)
    assert fit.residuals.median < 0.02


def test_what_was_not_seen_follows_from_what_was() -> None:
    fit = calibrate([real_run(0, sharing=False)], repeated_share=0.6)
    assert fit.unseen == ["repeated"]
    found = fit.calibration.coefficients
    assert found["read"] == pytest.approx(TRUE["read"], rel=1e-3)
    assert found["repeated"] == pytest.approx(0.6 * found["read"])


def test_a_window_limits_what_a_layer_reads() -> None:
    layers = tuple(
        replace(layer, sliding_window=100 if index % 2 else None) for index, layer in enumerate(MODEL.layers)
    )
    work = Work(sequences=2, tokens=2, sampled=2, context=1000, repeated=500, attended=1000)
    columns = dict(zip(NAMES, rows(replace(MODEL, layers=layers), [work])[0], strict=True))
    assert columns["read"] + columns["repeated"] == (1000 + 202) / 2
    assert columns["repeated"] == columns["read"]
    assert columns["pairs"] == 0


@cache
def written() -> str:
    return calibrate([real_run(0, steps=60)]).calibration.text()


class TestFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "calibration.yaml"
        path.write_text(written())
        return path

    def test_is_read_as_it_was_written(self, file: Path) -> None:
        found = Calibration.read(str(file))
        assert found.text() == file.read_text()
        assert found.subject == SUBJECT

    @pytest.mark.parametrize(
        "text",
        ["", "a: 1", "[", "\0", "subject: {}", "coefficients: {weights: -1}", "threads: many", "largest: {}"],
    )
    def test_another_or_a_spoiled_one_is_a_sentence(self, file: Path, text: str) -> None:
        key = text.partition(":")[0]
        whole = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(whole | yaml.safe_load(text)) if key in whole else text)
        with pytest.raises(ConfigError, match=r"is no file of kvlab calibrate, or not a whole one"):
            Calibration.read(str(file))

    @pytest.mark.parametrize(
        ("bytes_per_weight", "weights", "is_taken"),
        [(1.502, "auto", True), (1.502, "plain", False), (1.004, "auto", False), (2.0, "auto", True)],
    )
    def test_weights_of_auto_are_of_either_exact_form(
        self, file: Path, bytes_per_weight: float, weights: str, is_taken: bool
    ) -> None:
        whole = yaml.safe_load(file.read_text())
        whole["subject"]["bytes_per_weight"] = bytes_per_weight
        file.write_text(yaml.safe_dump(whole))
        model = yaml.safe_load((CONF / "model" / "qwen3_0_6b.yaml").read_text())
        timing = ExecutorConfig(kind="simulated", timing="fitted", timing_path=str(file), weights=weights)
        config = EngineConfig(
            ModelConfig(**model | {"max_seq_len": 96}),
            executor=timing,
            hardware=HardwareConfig(name="small", memory="4GiB"),
        )
        if is_taken:
            assert isinstance(plan_engine(config).timing, FittedTiming)
            return
        with pytest.raises(ConfigError, match="bytes per weight"):
            plan_engine(config)

    def test_times_the_steps_of_its_model_alone(self, file: Path) -> None:
        model = yaml.safe_load((CONF / "model" / "qwen3_0_6b.yaml").read_text())
        config = EngineConfig(
            ModelConfig(**model | {"name": "renamed", "max_seq_len": 96}),
            executor=ExecutorConfig(kind="simulated", timing="fitted", timing_path=str(file)),
            hardware=HardwareConfig(name="small", memory="4GiB"),
        )
        plan = plan_engine(config)
        assert isinstance(plan.timing, FittedTiming)
        assert plan.timing.description == "fitted on a machine, 2 threads"
        log = drive(build_engine(plan), traffic())
        computed = [step for step in log.steps if step.batch_seqs]
        wanted = Calibration.read(str(file)).step_s(MODEL, [Work.of(step) for step in computed])
        assert max(step.pool.shared_blocks for step in computed if step.pool) > 0
        assert [step.end_s - step.start_s for step in computed] == pytest.approx(wanted.tolist())
        assert plan.timing.remark(log.steps) is None
        longer = replace(computed[0], context_tokens=999_999)
        remark = plan.timing.remark([longer, *computed])
        assert remark == (
            f"1 of {len(computed) + 1} steps are larger than any that was fitted: up to 999,999 context tokens, "
            f"fitted to {plan.timing.calibration.largest['context']:,}"
        )
        eager = replace(config.framework, cuda_graphs=False, eager_layer_us=300.0)
        unread = plan.timing.unread(HardwareConfig(name="small", memory="4GiB"), eager)
        assert any(text.startswith("framework.eager_layer_us=300.0 has no effect here") for text in unread)
        config.executor.dtype = "float32"
        with pytest.raises(ConfigError, match=r"was fitted to qwen3_0_6b \(596 M parameters\) in bfloat16"):
            plan_engine(config)
