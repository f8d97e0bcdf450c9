"""What deployments of mixtures on many devices showed of steps: kernels of experts, norms over all heads, hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlab.config import FrameworkConfig
from kvlab.core import SamplingParams
from kvlab.core.sequence import SequenceSpec
from kvlab.engine.build import plan_engine
from kvlab.engine.executors.simulated import SimulatedExecutor
from kvlab.models.sparse import Division, SparseConfig
from kvlab.simulation.operations import measured_experts
from kvlab.simulation.timings.base import Counts, Deployment, StepTiming
from kvlab.simulation.timings.silicon import SiliconTiming
from tests.simulation.test_sparse import SIMULATED, described
from tests.support.plans import composed


class Instant(StepTiming):
    """Of a device that takes no time."""

    @classmethod
    def of(cls, deployment: Deployment) -> Instant:
        return cls()

    @property
    def description(self) -> str:
        return "instant"

    def device_s(self, new_tokens: Counts, lengths: Counts, sampled: int) -> float:
        return 0.0


def test_groups_that_share_the_sequences_have_a_host_each() -> None:
    def host_s(division: Division) -> float:
        model = replace(described("deepseek_v3"), division=division)
        executor = SimulatedExecutor(model, Instant(), FrameworkConfig(step_us=0, sequence_us=1000))
        names = tuple(SequenceSpec(str(at), 0, SamplingParams(max_tokens=1)) for at in range(16))
        ones = np.ones(16, np.int64)
        found = executor.run(names, ones, ones, ones[None])
        assert found is not None
        return found[1][0]

    assert host_s(Division(8)) == pytest.approx(0.016)
    assert host_s(Division(1, 8, 8)) == pytest.approx(0.002)


@pytest.fixture(scope="module")
def tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")


def timed(*settings: str) -> tuple[SiliconTiming, SparseConfig]:
    plan = plan_engine(composed(*SIMULATED, "executor.timing=silicon", *settings))
    assert isinstance(plan.timing, SiliconTiming)
    assert isinstance(plan.model, SparseConfig)
    return plan.timing, plan.model


@pytest.mark.usefixtures("tables")
class TestMeasured:
    @pytest.mark.parametrize(
        ("model", "least"),
        [
            ("gpt_oss_120b framework=vllm", 1.1),
            ("gpt_oss_120b framework=trtllm", 2.0),
            ("deepseek_v3 executor.tensor_parallel=8 framework=trtllm", 1.3),
        ],
    )
    def test_generated_kernels_are_faster_than_those_of_the_tables(self, model: str, least: float) -> None:
        def step_s(kernels: str, device: str = "b200_sxm") -> float:
            settings = f"model={model} hardware={device} framework.expert_kernels={kernels}"
            return timed(*settings.split())[0].device_s(np.full(64, 1), np.full(64, 1500), 64)

        assert step_s("tables") > least * step_s("trtllm_gen")
        if "gpt_oss" in model:  # a Hopper has none
            assert step_s("tables", "h200_sxm") == step_s("trtllm_gen", "h200_sxm")

    def test_norms_over_all_heads_exchange_their_variances(self) -> None:
        timing, model = timed("model=minimax_m2", "executor.tensor_parallel=4")
        of_heads, of_all = (
            SiliconTiming(timing._tables, replace(model, family=family), 4, "fp8_block", "bfloat16")
            for family in ("qwen3_moe", "minimax_m2")
        )
        # The smallest all-reduce that was measured takes 5 us, and two norms 3 each.
        for rows in (1, 16):
            assert 62 * 10e-6 < of_all._linear_s(rows) - of_heads._linear_s(rows) < 62 * 20e-6

    @pytest.mark.parametrize(
        ("model", "load"), [("minimax_m2", "power_law_1.01"), ("gpt_oss_120b", "power_law_1.2")]
    )
    def test_routers_that_are_corrected_load_experts_more_evenly(self, model: str, load: str) -> None:
        timing, sparse = timed(f"model={model}", "executor.tensor_parallel=4")
        stored = {"minimax_m2": "fp8_block"}.get(model, "mxfp4")
        assert measured_experts(timing._tables, sparse, stored)._workload_distribution == load

    def test_latent_attention_that_was_measured_with_its_launches_is_that_of_another_framework(self) -> None:
        settings = ("model=kimi_k2_5", "executor.tensor_parallel=8", "executor.weights=nvfp4")
        b200, b300 = (timed(*settings, f"hardware={device}")[0] for device in ("b200_sxm", "b300_sxm"))
        assert "latent attention" not in b200.description
        assert b300.description.endswith(", latent attention of trtllm 1.3.0rc20)")
        assert b300._decode_s(1, 2048) < b200._decode_s(1, 2048)  # 87 us in vLLM's tables, and 45
