"""Mixtures of experts and latent attention on simulated devices: bytes, division, and how long steps take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.models.families import decoder_config
from kvlab.models.sparse import Division, SparseConfig
from kvlab.models.sparse_reader import read_sparse
from kvlab.planning.devices import plan_on_devices
from kvlab.planning.plan import MemoryPlan
from kvlab.planning.sparse import expert_bytes
from kvlab.simulation import operations
from kvlab.simulation.timings.roofline import RooflineTiming
from kvlab.simulation.timings.silicon import SiliconTiming
from tests.simulation.test_roofline import PLAIN, counts
from tests.support.plans import SPARSE_MODELS, composed

SIMULATED = ("executor=simulated", "hardware=h200_sxm")


def described(name: str) -> SparseConfig:
    model = decoder_config(composed(*SIMULATED, f"model={name}").model, simulated=True)
    assert isinstance(model, SparseConfig)
    return model


def planned(name: str, *settings: str) -> MemoryPlan:
    run = composed(*SIMULATED, f"model={name}", *settings)
    assert run.hardware is not None
    return plan_on_devices(run, run.hardware)


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "parameters", "active", "bytes_per_token"),
        [
            ("deepseek_v3", 671e9, 37e9, 61 * (512 + 64) * 2),
            ("glm4_5", 352.8e9, 32e9, 2 * 92 * 8 * 128 * 2),  # without the layer that predicts a token more
            ("glm4_5_air", 106.85e9, 12.8e9, 2 * 46 * 8 * 128 * 2),
            ("gpt_oss_120b", 116.83e9, 5.13e9, 2 * 36 * 8 * 64 * 2),
            ("gpt_oss_20b", 20.91e9, 3.61e9, 2 * 24 * 8 * 64 * 2),
            ("kimi_k2", 1026e9, 32e9, 61 * (512 + 64) * 2),
            ("kimi_k2_5", 1026e9, 32e9, 61 * (512 + 64) * 2),
            ("minimax_m2", 229e9, 10e9, 2 * 62 * 8 * 128 * 2),
            ("mixtral_8x7b", 46.7e9, 12.7e9, 2 * 32 * 8 * 128 * 2),
            ("qwen3_235b_a22b", 235e9, 22e9, 2 * 94 * 4 * 128 * 2),
            ("qwen3_30b_a3b", 30.5e9, 3.0e9, 2 * 48 * 4 * 128 * 2),
        ],
    )
    def test_are_those_that_were_published(
        self, name: str, parameters: float, active: float, bytes_per_token: int
    ) -> None:
        model = described(name)
        assert model.num_parameters == pytest.approx(parameters, rel=0.004)
        head = model.vocab_size * model.hidden_size
        assert model.active_parameters + head == pytest.approx(active, rel=0.05)
        assert model.kv_spec("bfloat16").bytes_per_token == bytes_per_token

    def test_every_preset_is_checked_above(self) -> None:
        checked = self.test_are_those_that_were_published.pytestmark[0].args[1]  # type: ignore[attr-defined]
        assert [row[0] for row in checked] == SPARSE_MODELS

    @pytest.mark.parametrize("name", SPARSE_MODELS)
    def test_have_as_many_parameters_as_transformers_gives_them(self, name: str) -> None:
        model = composed(f"model={name}").model
        fewer = {"num_hidden_layers": 4, "hidden_size": 256, "num_local_experts": 16, "n_routed_experts": 16}
        small = {key: value for key, value in fewer.items() if key in model.architecture}
        if "num_experts" in model.architecture:
            small["num_experts"] = 16
        few = replace(model, architecture={**model.architecture, **small})
        ours, theirs = decoder_config(few, simulated=True), decoder_config(few)
        assert ours.num_parameters == theirs.num_parameters
        assert type(ours) is not type(theirs)


class TestBytes:
    @pytest.mark.parametrize(("name", "size"), [("gpt_oss_20b", 13_761_264_768), ("gpt_oss_120b", 65_248_815_744)])
    def test_of_mxfp4_are_those_of_the_published_files(self, name: str, size: int) -> None:
        assert planned(name, "executor.dtype=bfloat16").weights.parameters == size

    def test_of_fp8_in_squares_counted_by_hand(self) -> None:
        plan = planned("minimax_m2", "executor.dtype=bfloat16", "executor.tensor_parallel=4")
        hidden, layers, experts, size = 3072, 62, 256, 1536
        q, kv = 48 * 128, 8 * 128
        attention = (q + 2 * kv) * hidden + hidden * q
        numbers = layers * (attention + experts * 3 * hidden * size)
        router = 4 * 2 * layers * experts * hidden  # in 16 bits, on each of 4 devices
        head = 2 * 200_064 * hidden
        assert plan.weights.matrices == numbers + router + head
        assert plan.weights.scales == 4 * numbers / 128**2
        norms = 2 * (layers * (2 * hidden + q + kv) + hidden) + 4 * layers * experts
        assert plan.weights.norms == 4 * norms

    def test_of_nvfp4_leave_attention_in_16_bits_counted_by_hand(self) -> None:
        plan = planned("minimax_m2", "executor.dtype=bfloat16", "executor.weights=nvfp4")
        hidden, layers, experts, size = 3072, 62, 256, 1536
        q, kv = 48 * 128, 8 * 128
        attention = (q + 2 * kv) * hidden + hidden * q
        chosen = layers * experts * 3 * hidden * size
        in_16_bits = layers * (attention + experts * hidden) + 200_064 * hidden  # with routers and output layer
        assert plan.weights.matrices == chosen // 2 + 2 * in_16_bits
        assert plan.weights.scales == chosen // 16 + 4 * 2 * layers * experts

    def test_of_nvfp4_hold_the_outputs_projection_alone_of_deepseeks_attention(self) -> None:
        plan = planned("deepseek_v3", "executor.dtype=bfloat16", "executor.weights=nvfp4", "hardware.memory=2TiB")
        hidden, layers, heads, experts, size = 7168, 61, 128, 256, 2048
        queries, latents = 1536 * hidden + heads * 192 * 1536, 576 * hidden + heads * 256 * 512
        in_16_bits = layers * (queries + latents) + 58 * experts * hidden + 129_280 * hidden
        quantised = layers * hidden * heads * 128 + 3 * hidden * (3 * 18_432 + 58 * (experts + 1) * size)
        assert plan.weights.matrices == quantised // 2 + 2 * in_16_bits

    def test_of_kimi_k2_5_are_those_of_the_published_files(self) -> None:
        plan = planned("kimi_k2_5", "executor.dtype=bfloat16", "hardware.memory=999GiB")
        experts = 60 * 384 * 3 * 7168 * 2048
        assert isinstance(plan.model, SparseConfig)
        assert expert_bytes(plan.model, plan.settings) == experts // 2 + 2 * experts // 32
        assert plan.weights.parameters == pytest.approx(594e9, rel=0.002)

    @pytest.mark.parametrize(
        ("name", "attention", "output"),
        [
            ("deepseek_v3", "bfloat16", "nvfp4"),
            ("kimi_k2_5", "bfloat16", "bfloat16"),
            ("qwen3_235b_a22b", "nvfp4", "nvfp4"),
            ("gpt_oss_120b", "bfloat16", "bfloat16"),
        ],
    )
    def test_of_nvfp4_are_as_checkpoints_store_each_part(self, name: str, attention: str, output: str) -> None:
        assert described(name).formats("nvfp4", "bfloat16") == (attention, output, "nvfp4", "nvfp4")

    def test_of_experts_are_all_but_what_every_token_meets(self) -> None:
        plan = planned("qwen3_30b_a3b", "executor.dtype=bfloat16")
        assert isinstance(plan.model, SparseConfig)
        chosen = expert_bytes(plan.model, plan.settings)
        assert chosen == 2 * 48 * 128 * 3 * 2048 * 768
        head, idle = 2 * 151_936 * 2048, chosen * (128 - 8) // 128
        assert plan.weights.body - idle == 2 * plan.model.active_parameters
        assert plan.weights.parameters == 2 * plan.model.num_parameters
        assert plan.weights.output == plan.weights.embedding == head

    def test_of_experts_have_their_scales_and_biases(self) -> None:
        plan = planned("gpt_oss_20b", "executor.dtype=bfloat16")
        assert isinstance(plan.model, SparseConfig)
        size = 2880  # of an expert as of the stream
        numbers, scales, biases = 3 * size * size // 2, 3 * size * size // 32, 2 * (2 * size + size)
        assert expert_bytes(plan.model, plan.settings) == 24 * 32 * (numbers + scales + biases)

    @pytest.mark.parametrize(
        ("settings", "copies"),
        [
            ("executor.tensor_parallel=8", 8),
            ("executor.tensor_parallel=2 executor.attention_data_parallel=4 executor.expert_parallel=8", 2),
            ("executor.attention_data_parallel=8 executor.expert_parallel=8", 1),
            ("executor.tensor_parallel=8 kv.dtype=fp8_e4m3", 4),
        ],
    )
    def test_of_latents_are_on_every_device_that_shares_a_sequence(self, settings: str, copies: int) -> None:
        plan = planned("deepseek_v3", *settings.split())
        assert plan.spec.bytes_per_token == copies * 61 * 576 * 2

    @pytest.mark.parametrize(("devices", "copies"), [(2, 1), (4, 1), (8, 2)])
    def test_of_kv_heads_are_copied_where_there_are_more_devices(self, devices: int, copies: int) -> None:
        plan = planned("qwen3_235b_a22b", "executor.weights=fp8", f"executor.tensor_parallel={devices}")
        assert plan.spec.bytes_per_token == copies * 2 * 94 * 4 * 128 * 2

    def test_of_what_all_tokens_meet_are_held_by_each_group_of_devices(self) -> None:
        one = planned("deepseek_v3", "executor.tensor_parallel=8")
        groups = ("executor.attention_data_parallel=8", "executor.expert_parallel=8")
        eight = planned("deepseek_v3", *groups)
        assert eight.weights.embedding == 8 * one.weights.embedding
        assert isinstance(eight.model, SparseConfig)
        assert expert_bytes(eight.model, eight.settings) < eight.weights.matrices < 8 * one.weights.matrices

    def test_of_a_step_is_that_of_one_group(self) -> None:
        one = planned("deepseek_v3", "executor.tensor_parallel=8")
        eight = planned("deepseek_v3", "executor.attention_data_parallel=8", "executor.expert_parallel=8")
        assert eight.working.logits == one.working.logits  # of the sequences of a group
        assert eight.working.layers > one.working.layers  # of the tokens of all groups, at the experts


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "settings", "message"),
        [
            ("qwen3_8b", "executor.expert_parallel=2", "executor.expert_parallel=2: is for mixtures of experts"),
            ("qwen3_8b", "executor.attention_data_parallel=2", "qwen3_8b has no experts; leave it at 1"),
            ("mixtral_8x7b", "executor.expert_parallel=3", "has to divide the 8 experts of mixtral_8x7b"),
            ("mixtral_8x7b", "executor.expert_parallel=4", "and the devices, of which there are 1"),
            ("deepseek_v3", "executor.tensor_parallel=3", "executor.tensor_parallel=3: deepseek_v3 has 128 query"),
            ("qwen3_30b_a3b", "executor.tensor_parallel=12", "32 query heads and 4 KV heads"),
            (
                "minimax_m2",
                "executor.tensor_parallel=8",
                "1536 .* 8 devices cannot divide into parts of 128.*=8 div",
            ),
            ("deepseek_v3", "executor.tensor_parallel=8 kv.dtype=int8", "one latent .* use fp8_e4m3 or auto"),
            (
                "deepseek_v3",
                "executor.tensor_parallel=8 kv.value_dtype=fp8_e4m3",
                "kv.value_dtype=fp8_e4m3: latent",
            ),
        ],
    )
    def test_name_the_setting(self, model: str, settings: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            planned(model, *settings.split())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"num_experts_per_tok": 99},
                "num_experts_per_tok=99: has to be a whole number of at least 1, and at most",
            ),
            ({"num_local_experts": None}, "num_local_experts=null: has to be a whole number"),
            ({"num_key_value_heads": 7}, "num_key_value_heads=7: does not divide num_attention_heads=32"),
            (
                {"quantization_config": {"quant_method": "awq"}},
                "quantization_config=awq: unknown; known: mxfp4, and fp8",
            ),
            (
                {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}},
                "quantization_config=compressed-tensors: known: experts alone in 4-bit integers, 128 or 32",
            ),
            ({"layer_types": ["linear"] * 32}, "has to name full_attention or sliding_attention for each"),
        ],
    )
    def test_of_files_name_the_key(self, changes: Mapping[str, Any], message: str) -> None:
        values = composed("model=mixtral_8x7b").model.architecture
        with pytest.raises(ConfigError, match=message):
            read_sparse({**values, "model_type": "mixtral", **changes})


class TestRoofline:
    def timing(self, name: str, division: Division, expert_bytes: float = 0.0) -> RooflineTiming:
        model = replace(described(name), division=division)
        device = replace(PLAIN, link_gb_s=1.0)
        kv_bytes = model.kv_spec("bfloat16").bytes_per_token
        return RooflineTiming(model, device, division.devices, "bfloat16", 100e9, 0, kv_bytes, None, expert_bytes)

    def test_a_step_reads_the_experts_that_its_tokens_meet(self) -> None:
        timing = self.timing("mixtral_8x7b", Division(), expert_bytes=80e9)
        for tokens, met in ((1, 2), (2, 8 - 8 * 0.75**2), (1000, 8)):
            step = timing.step(counts(*[1] * tokens), counts(*[1] * tokens), sampled=0)
            assert step.linear == pytest.approx(20 + 80 * met / 8)

    def test_latents_are_read_once_for_all_heads_and_met_in_decode(self) -> None:
        decode = self.timing("deepseek_v3", Division()).step(counts(1), counts(1001), sampled=0)
        operations = 61 * 128 * 2 * (576 + 512) * 1001
        assert decode.attention == pytest.approx(max(1002 * 70_272 / 1e9, operations / 1e12))
        prefill = self.timing("deepseek_v3", Division()).step(counts(10_000), counts(10_000), sampled=0)
        pairs = 10_000 * 10_001 / 2
        assert prefill.attention == pytest.approx(61 * 128 * 2 * (192 + 128) * pairs / 1e12)

    def test_groups_of_devices_exchange_for_the_experts_of_all(self) -> None:
        sent = 2 * 64 * 7168 / 1e9  # of 64 tokens, once
        for division, seconds in (
            (Division(8), 2 * 2 * 7 / 8 * sent),
            (Division(1, 8, 8), 2 * 7 / 8 * sent),
            (Division(2, 4, 8), 2 * 1 / 2 * sent / 4 + 2 * 7 / 8 * sent),
        ):
            step = self.timing("deepseek_v3", division).step(counts(*[1] * 64), counts(*[1] * 64), sampled=0)
            assert step.links == pytest.approx(61 * seconds)


@pytest.fixture(scope="module")
def tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")


@pytest.mark.usefixtures("tables")
class TestMeasured:
    def timing(self, *settings: str) -> SiliconTiming:
        timing = plan_engine(composed(*SIMULATED, "executor.timing=silicon", *settings)).timing
        assert isinstance(timing, SiliconTiming)
        return timing

    def test_operations_add_up_to_the_packages_own_steps_of_uniform_batches(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = pytest.importorskip("aiconfigurator_core.sdk.engine")
        monkeypatch.setattr(operations, "FEWEST", 1000)  # the package takes as many experts as were measured
        whole = engine.EngineHandle.compile("Qwen/Qwen3-30B-A3B", "h200_sxm", "vllm", tp_size=1)
        timing = self.timing("model=qwen3_30b_a3b", "framework.device_token_us=0")
        for batch, context in ((1, 100), (8, 1000), (200, 3000)):
            step = timing.device_s(np.full(batch, 1), np.full(batch, context), batch)
            assert step * 1e3 == pytest.approx(whole.predict_decode_latency(batch, context - 1), rel=0.01)
        step = timing.device_s(np.full(4, 1024), np.full(4, 1024), 4)
        assert step * 1e3 == pytest.approx(whole.predict_prefill_latency(4, 1024, 0), rel=0.01)

    @pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
    def test_latent_attention_is_timed_with_the_kernels_of_each_framework(self, framework: str) -> None:
        timing = self.timing("model=deepseek_v3", "executor.tensor_parallel=8", f"framework={framework}")
        for batch in (1, 32):
            contexts = [timing.device_s(np.full(batch, 1), np.full(batch, n), batch) for n in (1000, 4000, 16_000)]
            assert contexts == sorted(contexts)
            assert 0.003 < contexts[0] < 0.03

    def test_shared_experts_are_computed_beside_the_others_of_few_tokens(self) -> None:
        timing = self.timing("model=deepseek_v3", "executor.tensor_parallel=8", "framework=sglang")
        few, many = (timing._linear_s(rows) for rows in (256, 257))
        assert many > 1.01 * few

    def test_groups_wait_for_the_one_that_takes_longest(self) -> None:
        groups = ("executor.attention_data_parallel=8", "executor.expert_parallel=8", "framework=trtllm")
        timing = self.timing("model=deepseek_v3", *groups)
        even = timing.device_s(np.full(16, 1), np.full(16, 1000), 16)
        own = timing._group_s(np.full(2, 1), np.full((1, 2), 1000), 2)[0]
        assert even == pytest.approx(own + timing._experts_s(16))
        lengths = np.full(16, 1000)
        lengths[3] = 16_000
        assert timing.device_s(np.full(16, 1), lengths, 16) > even

    def test_tokens_take_as_much_longer_between_groups_as_all_reduces_of_the_version(self) -> None:
        two = "hardware=rtx_pro_6000_server executor.attention_data_parallel=2 executor.expert_parallel=2"
        of = {
            version: self.timing("model=qwen3_30b_a3b", *two.split(), f"framework.version={version}")
            for version in ("0.19.0", "0.24.0")
        }
        exchange, across = (of["0.19.0"]._specs[name] for name in ("exchange", "across"))
        older, newer = (timing._tables.exchange_seconds(exchange, across, 128) for timing in of.values())
        assert older / newer == pytest.approx(
            of["0.19.0"]._tables.link_seconds(across, 128) / of["0.24.0"]._tables.link_seconds(across, 128)
        )
        assert older > 2 * newer  # it had no peer access over PCIe
        assert of["0.19.0"]._experts_s(256) - of["0.24.0"]._experts_s(256) == pytest.approx(older - newer)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                "model=deepseek_v3 executor.tensor_parallel=8 executor.expert_parallel=4",
                "executor.expert_parallel=4: vllm .* divided so; .* it was with 1 or 8; or take",
            ),
            ("model=mixtral_8x7b executor.weights=int8", "with experts of mixtral_8x7b in int8_wo on 1 devices"),
            ("model=minimax_m2 hardware=h100_sxm executor.weights=int8 executor.tensor_parallel=8", "minimax_m2"),
        ],
    )
    def test_what_the_tables_lack_is_named(self, settings: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.timing(*settings.split())
