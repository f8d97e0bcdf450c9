"""int8 as a setting: what it takes, what it refuses, and a whole run of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.lab.results import quality
from kvlab.lab.results.quality import compare, quality_metrics
from kvlab.lab.run.execute import execute
from kvlab.lab.terminal import Terminal
from kvlab.lab.tracking import RunStatus
from kvlab.models.ops import select_ops
from tests.support.plans import compose_run
from tests.support.runs import context_of

TINY = ("model=qwen3_tiny", "executor=cpu", "kv.memory=1MiB", "model.max_seq_len=256")


class TestCache:
    def test_holds_nearly_twice_the_tokens_in_the_same_bytes(self) -> None:
        half, int8 = (plan_engine(compose_run(*TINY, f"kv.dtype={dtype}")).pool for dtype in ("auto", "int8"))
        assert (half.bytes_per_token, int8.bytes_per_token) == (512, 2 * 2 * 2 * (32 + 4))
        assert half.num_blocks == 2**20 // (512 * 16)
        assert int8.num_blocks == 2**20 // (288 * 16)

    def test_another_dtype_is_refused(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"kv\.dtype=int2: unknown; known: auto, int8, fp8_e4m3, fp8_e5m2, int4",
        ):
            compose_run("kv.dtype=int2")

    def test_heads_too_small_to_gain_are_refused(self) -> None:
        config = compose_run(*TINY, "kv.dtype=int8", "model.architecture.head_dim=4")
        with pytest.raises(ConfigError, match=r"kv\.dtype=int8: .*heads of 4 numbers take 64 bytes per token"):
            plan_engine(config)

    def test_triton_is_refused_by_name(self) -> None:
        with pytest.raises(Exception, match=r"attention=triton cannot run here: .*(int8|not installed)"):
            plan_engine(compose_run(*TINY, "kv.dtype=int8", "attention=triton"))


class TestWeights:
    def test_are_counted_to_the_byte(self) -> None:
        """qwen3_tiny: per layer q, k, v of 128 + 64 + 64 outputs, o 64, gate and up 256, down 64; 512 tokens."""
        plan = plan_engine(compose_run(*TINY, "executor.weights=int8"))
        matrices = 2 * (64 * 256 + 128 * 64 + 64 * 256 + 128 * 64) + 512 * 64
        outputs = 2 * (256 + 64 + 256 + 64) + 512
        norms = 2 * (2 * 64 + 2 * 32) + 64
        assert plan.model.num_parameters == matrices + norms
        assert plan.weights.parameters == matrices + 4 * outputs + 2 * norms

    def test_activations_in_int8_take_no_bytes_of_the_weights(self) -> None:
        one, other = (plan_engine(compose_run(*TINY, f"executor.weights={name}")) for name in ("int8", "int8_w8a8"))
        assert one.weights == other.weights
        assert (one.weights_format, other.weights_format) == ("int8", "int8_w8a8")

    def test_its_roofline_is_that_of_products_in_integers(self) -> None:
        names = [compose_run(*TINY, f"executor.weights={name}").executor.products for name in ("int8", "int8_w8a8")]
        assert names == ["bfloat16", "int8_w8a8"]

    def test_an_embedding_of_its_own_stays_in_bfloat16(self) -> None:
        tied, untied = (
            plan_engine(
                compose_run(*TINY, "executor.weights=int8", f"model.architecture.tie_word_embeddings={tied}")
            ).weights.parameters
            for tied in ("true", "false")
        )
        assert untied - tied == 512 * 64 * 2

    @pytest.mark.parametrize(
        ("override", "reason"),
        [
            ("executor.dtype=float32", "is for executor.dtype=bfloat16, not float32"),
            ("executor.dtype=float16", "is for executor.dtype=bfloat16, not float16"),
            ("executor.kernels=false", "executor.kernels=false allows none"),
        ],
    )
    def test_where_it_cannot_be_computed_it_is_refused(self, override: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=rf"executor\.weights=int8: .*{reason}"):
            plan_engine(compose_run(*TINY, "executor.weights=int8", override))

    def test_a_gpu_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"executor\.weights=int8: runs on a CPU, not on cuda"):
            select_ops(torch.bfloat16, "cuda", weights="int8")

    def test_another_format_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"executor\.weights=int4: unknown; known: auto, plain, compact"):
            compose_run("executor.weights=int4")


class TestQuality:
    @pytest.mark.parametrize(
        "settings",
        [
            ("kv.dtype=int8",),
            ("executor.weights=int8",),
            ("executor.weights=int8_w8a8",),
            ("kv.dtype=int8", "executor.weights=int8"),
        ],
    )
    def test_a_run_serves_its_requests_and_logs_what_int8_costs(
        self, settings: tuple[str, ...], tmp_path: Path
    ) -> None:
        small = (
            "workload.num_requests=5",
            "workload.prompt_len={min: 20, max: 60}",
            "workload.output_len={min: 2, max: 9}",
        )
        config = compose_run(*TINY, "tracking=off", "figures=false", *small, *settings)
        result = execute(context_of(config, tmp_path, Terminal(quiet=True)))
        assert result.status is RunStatus.FINISHED
        assert result.metrics["requests/completed"] == 5
        assert 0 < result.metrics["quality/logit_error_mean"] < result.metrics["quality/logit_error_max"] < 1
        assert result.metrics["quality/top1_agreement"] > 0.7
        assert 0 < result.metrics["quality/kl_mean"] < 0.1
        ratio = result.metrics["quality/perplexity"] / result.metrics["quality/reference_perplexity"]
        assert ratio == pytest.approx(1, abs=0.1)

    def test_logits_that_are_known(self) -> None:
        found = compare(torch.tensor([[1.0, 2.0], [5.0, 0.0]]), torch.tensor([[1.0, 2.5], [3.0, 4.0]]))
        assert found == {
            "quality/logit_error_mean": (0 + 0.5 + 2 + 4) / 4,
            "quality/logit_error_max": 4.0,
            "quality/top1_agreement": 0.5,
            "quality/kl_mean": pytest.approx(1.55022, abs=1e-5),
        }

    def test_perplexity_is_that_of_the_tokens_that_follow(self) -> None:
        even, sure = torch.zeros(3, 4), torch.tensor([[9.0, 0, 0, 0]] * 3)
        found = compare(even, sure, [0, 1, None])
        assert found["quality/perplexity"] == pytest.approx(4)
        sharp = math.exp(4.5 + math.log(1 + 3 * math.exp(-9)))
        assert found["quality/reference_perplexity"] == pytest.approx(sharp)
        assert compare(even, even, [0])["quality/kl_mean"] == 0

    def test_no_memory_for_the_reference_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quality, "available_memory", lambda device: 1000)
        metrics, problem = quality_metrics(plan_engine(compose_run(*TINY, "kv.dtype=int8")), [])
        assert metrics == {}
        assert problem.startswith("quality/*: not measured, as the model in bfloat16 needs 512.")
