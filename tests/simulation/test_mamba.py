"""Mamba-2 layers on simulated devices: what their states take, and how long steps take."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.lab.capacity import plan_capacity
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.remarks import remarks_on_devices
from kvlab.models.families import decoder_config
from kvlab.models.sparse_reader import read_sparse
from kvlab.planning.devices import plan_on_devices
from kvlab.simulation.timings.roofline import RooflineTiming
from kvlab.simulation.timings.silicon import SiliconTiming
from tests.simulation.test_roofline import counts
from tests.simulation.test_sparse import described
from tests.support.plans import MAMBA_MODELS, compose_run, composed

SIMULATED = ("executor=simulated", "hardware=h200_sxm", "executor.dtype=bfloat16")
NANO = (*SIMULATED, "model=nemotron3_nano_30b_a3b")
#: Bytes of one layer of Nemotron 3 Nano 30B-A3B: of each number of each head, and inputs of the convolution.
STATE = 64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2
#: What Nemotron 3 Nano 4B has otherwise, as far as its cache goes: of its layers 21 have Mamba-2, and 4 attention.
NANO_4B = (
    'model.architecture.hybrid_override_pattern="MMMMM*EMMMMM*EMMMMM*EMMMMM*EM"',
    "model.architecture.num_hidden_layers=29",
    "model.architecture.mamba_num_heads=96",
    "model.architecture.mamba_head_dim=80",
    "model.architecture.num_key_value_heads=8",
    "model.architecture.mamba_ssm_cache_dtype=float16",
)


def values(name: str) -> dict[str, Any]:
    model = composed(*SIMULATED, f"model={name}").model
    return {**model.architecture, "model_type": model.family}


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "parameters", "active", "bytes_per_token"),
        [
            ("nemotron3_nano_30b_a3b", 31.58e9, 3.58e9, 2 * 6 * 2 * 128 * 2),
            ("nemotron3_super_120b_a12b", 120.7e9, 12.7e9, 2 * 8 * 2 * 128 * 2),
            ("nemotron3_ultra_550b_a55b", 550e9, 55.5e9, 2 * 12 * 2 * 128 * 2),
            ("nemotron_h_56b", 56.3e9, 56.3e9, 2 * 10 * 8 * 128 * 2),
        ],
    )
    def test_are_those_that_were_published(
        self, name: str, parameters: float, active: float, bytes_per_token: int
    ) -> None:
        model = described(name)
        head = model.vocab_size * model.hidden_size
        assert model.num_parameters == pytest.approx(parameters, rel=0.002)
        assert model.active_parameters + 2 * head == pytest.approx(active, rel=0.015)
        assert model.kv_spec("bfloat16").bytes_per_token == bytes_per_token

    def test_every_preset_is_checked_above(self) -> None:
        checked = self.test_are_those_that_were_published.pytestmark[0].args[1]  # type: ignore[attr-defined]
        assert [row[0] for row in checked] == MAMBA_MODELS

    @pytest.mark.parametrize("name", MAMBA_MODELS)
    def test_have_as_many_parameters_as_transformers_gives_them(self, name: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        # transformers reads a pattern, too: a layer of each kind that the model has.
        pattern = "".join(kind for kind in "ME*-" if kind in values(name)["hybrid_override_pattern"])
        few = {**values(name), "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        del few["model_type"]
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **few))
        corrections = sum(weight.numel() for name, weight in theirs.named_buffers() if "correction" in name)
        ours = read_sparse({**few, "model_type": "nemotron_h"})
        assert ours.num_parameters == corrections + sum(weight.numel() for weight in theirs.parameters())

    def test_layers_are_named_as_newer_files_name_them(self) -> None:
        old = values("nemotron3_nano_30b_a3b")
        kinds = {"M": "mamba", "E": "moe", "*": "attention"}
        for others in ({}, {"M": "linear_attention", "*": "full_attention"}):  # those of transformers 5
            named = [(kinds | others)[letter] for letter in old["hybrid_override_pattern"]]
            new = {key: value for key, value in old.items() if key not in ("hybrid_override_pattern",)}
            assert read_sparse({**new, "layers_block_type": named}) == read_sparse(old)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hybrid_override_pattern": "MEX*" * 13}, "hybrid_override_pattern=.* has to name all .*E for moe"),
            (
                {"hybrid_override_pattern": "ME*"},
                "hybrid_override_pattern=ME.* has to name all of num_hidden_layers",
            ),
            ({"hybrid_override_pattern": "ME" * 26}, "some of them with Mamba-2 and some with attention"),
            ({"hybrid_override_pattern": None}, "hybrid_override_pattern=.*: has to name"),
            ({"layers_block_type": [["mamba"]] * 52}, "layers_block_type=.* has to name"),
            ({"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype=fp8: must be one of float32"),
            ({"use_bias": True}, "use_bias=True: products have no biases here"),
            ({"num_key_value_heads": 3}, "num_key_value_heads=3: does not divide num_attention_heads=32"),
            ({"num_experts_per_tok": 200}, "num_experts_per_tok=200: has to be a whole number"),
        ],
    )
    def test_a_file_with_others_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_sparse({**values("nemotron3_nano_30b_a3b"), **changes})

    def test_weights_in_nvfp4_leave_attention_in_16_bits(self) -> None:
        plans = [
            plan_on_devices(run, run.hardware)
            for run in (composed(*NANO, f"executor.weights={weights}") for weights in ("auto", "nvfp4"))
            if run.hardware
        ]
        model = plans[0].model
        kept = 6 * 2688 * 128 * (2 * 32 + 2 * 2) + 23 * 128 * 2688 + 2 * 131072 * 2688  # with routers and embedding
        body = model.num_parameters - kept
        saved = plans[0].weights.total - plans[1].weights.total
        assert saved == pytest.approx(body * (2 - 9 / 16), rel=0.001)


class TestMemory:
    @pytest.mark.parametrize(
        ("settings", "block", "blocks", "of_one", "tokens"),
        [
            # Nemotron Cascade 2 30B-A3B (of Nano's shapes), vLLM 0.20.1rc1 on a Blackwell with 3.72 GiB: 4.71x
            (("kv.memory=3.72GiB", "model.max_seq_len=256000"), 4176, 311, 62 + 4, 1_206_303),
            # the same, vLLM 0.19.1 on a Hopper with 68.97 GiB
            (("kv.memory=68.97GiB",), 4176, 5772, 63 + 4, 4_819_104),
            # Nemotron 3 Nano 4B, vLLM 0.13 with 11.15 GiB: 98.20x
            ((*NANO_4B, "kv.memory=11.15GiB", "model.max_seq_len=8192"), 992, 1473, 9 + 6, 208_320),
        ],
    )
    def test_is_that_of_servers_that_published_their_start(
        self, settings: tuple[str, ...], block: int, blocks: int, of_one: int, tokens: int
    ) -> None:
        run = compose_run(
            *NANO, "kv.dtype=fp8_e4m3", "executor.timing=roofline", "scheduler.ahead=false", *settings
        )
        pool, longest = plan_engine(run).pool, run.model.max_seq_len
        found = pool.block_size, pool.num_blocks, pool.blocks_of(longest)
        assert found == (block, blocks, of_one)
        # vLLM says it in tokens: so many requests of model.max_seq_len at once; until 0.19 the blocks of a group.
        older = blocks // len(pool.groups) * block
        assert tokens in (int(blocks / of_one * longest), older)

    @pytest.mark.parametrize(
        ("settings", "block"),
        [
            (("kv.dtype=fp8_e4m3",), 4176),  # as vLLM says at its start, also below
            (("executor.tensor_parallel=4",), 1056),  # vllm-project/vllm 37467
            (("model.architecture.mamba_ssm_cache_dtype=float16",), 1072),
            (("model.architecture.mamba_ssm_cache_dtype=float16", "kv.dtype=fp8_e4m3"), 2128),
            (
                # Nemotron Nano 9B v2, whose states had the type of the model (vllm-project/vllm 24280)
                (
                    "model.architecture.mamba_num_heads=128",
                    "model.architecture.mamba_head_dim=80",
                    "model.architecture.num_key_value_heads=8",
                    "model.architecture.mamba_ssm_cache_dtype=auto",
                ),
                672,
            ),
            (("model.architecture.mamba_ssm_cache_dtype=what",), 16),  # refused when it is read
        ],
    )
    def test_a_block_holds_a_state(self, settings: tuple[str, ...], block: int) -> None:
        assert composed(*NANO, *settings).kv.block_size == block

    def test_a_sequence_has_a_block_of_each_group_of_states_however_long_it_is(self) -> None:
        pool = plan_engine(composed(*NANO, "scheduler.ahead=false")).pool
        groups = [(len(group.layers), group.has_state) for group in pool.groups]
        assert groups == [(6, False), *[(6, True)] * 3, (5, True)]
        assert [pool.blocks_of(tokens) for tokens in (1, 2096, 2097, 10_000)] == [5, 5, 6, 9]
        assert pool.bytes_per_slot * pool.block_size >= 6 * STATE

    def test_a_single_group_of_heads_is_on_each_device(self) -> None:
        model = read_sparse({**values("nemotron3_nano_30b_a3b"), "n_groups": 1})
        assert model.states is not None
        convolved = [64 * 64 // devices + 2 * 128 for devices in (1, 4)]
        held = [64 * 64 * 128 * 4 // devices for devices in (1, 4)]
        found = [model.states.state_bytes(devices, 2) for devices in (1, 4)]
        assert found == [3 * 2 * inputs + numbers for inputs, numbers in zip(convolved, held, strict=True)]


class TestTime:
    def timing(self, *settings: str) -> Any:
        return plan_engine(composed(*NANO, *settings)).timing

    def test_kernels_of_states_take_as_long_as_measured_ones_that_move_as_much(self) -> None:
        pytest.importorskip("aiconfigurator_core")
        mamba = self.timing("executor.timing=silicon")
        other = plan_engine(composed(*SIMULATED, "model=qwen3_5_35b_a3b", "executor.timing=silicon")).timing
        assert isinstance(mamba, SiliconTiming)
        assert isinstance(other, SiliconTiming)
        for batch in (64, 256):  # of 23 and of 30 layers; states of both have 2 MiB
            ours, theirs = (timing._states_s(batch, 1) / layers for timing, layers in ((mamba, 23), (other, 30)))
            assert ours == pytest.approx(theirs, rel=0.2)
        assert "states of Mamba-2 take what moving them does; no deployment with Mamba-2" in (mamba.because or "")
        assert mamba._states_s(1, 8192) > 4 * mamba._states_s(1, 1024) > 0

    def test_a_step_has_a_norm_and_an_all_reduce_for_each_layer(self) -> None:
        pytest.importorskip("aiconfigurator_core")
        timing = self.timing("executor.timing=silicon", "executor.tensor_parallel=2")
        assert isinstance(timing, SiliconTiming)
        one = timing._tables.operations.CustomAllReduce("", 1, 2688, 2)
        each = timing._tables.link_seconds(timing._tables.compile([one]), 1000)
        links = timing._tables.link_seconds(timing._specs["links"], 1000)
        assert links == pytest.approx((52 + 1) * each, rel=0.001)

    @pytest.mark.parametrize(
        ("settings", "per_second"),
        [
            (("model=nemotron3_super_120b_a12b", "executor.weights=nvfp4"), 23.2),  # vLLM's guide to a DGX Spark
            (("model=nemotron3_nano_30b_a3b",), 31.0),  # eugr/spark-vllm-docker 123, of Nemotron Cascade 2
        ],
    )
    def test_tokens_of_one_request_come_as_was_published(
        self, settings: tuple[str, ...], per_second: float
    ) -> None:
        own = ("executor=simulated", "hardware=gb10", "executor.dtype=bfloat16", "model.max_seq_len=32768")
        timing = plan_engine(composed(*own, "executor.timing=roofline", *settings)).timing
        assert isinstance(timing, RooflineTiming)
        assert 1 / timing.device_s(counts(1), counts(1000), 1) == pytest.approx(per_second, rel=0.08)

    def test_experts_have_two_matrices_each(self) -> None:
        timing = self.timing("executor.timing=roofline")
        assert isinstance(timing, RooflineTiming)
        assert timing.expert_bytes == 23 * 128 * 2 * 2688 * 1856 * 2
        wide = plan_engine(composed(*SIMULATED, "model=nemotron3_super_120b_a12b", *_EIGHT)).timing
        assert isinstance(wide, RooflineTiming)
        assert wide.expert_bytes == 40 * 512 * 2 * 1024 * 2688 * 2

    def test_a_roofline_reads_and_writes_the_states_of_each_sequence(self) -> None:
        timing = self.timing("executor.timing=roofline")
        assert isinstance(timing, RooflineTiming)
        hardware = timing.hardware
        state_s = 23 * 2 * STATE / (hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency)
        apart = timing.step(counts(100, 100), counts(100, 100), 1)
        together = timing.step(counts(200), counts(200), 1)
        assert apart.linear - together.linear == pytest.approx(state_s)
        longer, shorter = (timing.step(counts(1), counts(length), 1).attention for length in (2000, 1000))
        kv_s = 1000 * 6144 / (hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency)
        assert longer - shorter == pytest.approx(kv_s)


_EIGHT = ("executor.tensor_parallel=8", "executor.timing=roofline")


def test_a_plan_and_a_run_name_what_keeps_the_states() -> None:
    run = composed(*NANO, "executor.timing=roofline", "framework.version=0.25.1", "kv.prefix_sharing=true")
    plan = plan_run(run)
    assert plan.timing is not None
    said = " ".join(remarks_on_devices(plan, plan.timing))
    assert "Mamba-2 of nemotron3_nano_30b_a3b: vLLM 0.25.1 finds no prefixes" in said
    assert "linear attention" not in said
    assert plan_capacity(run, device="cuda", lengths=[256]).model.states_called == "Mamba-2"


def test_an_engine_of_this_machine_says_that_it_does_not_compute_them() -> None:
    with pytest.raises(ConfigError, match="layers with Mamba-2, which simulated devices alone have; set hardware="):
        decoder_config(composed(*NANO).model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("framework=sglang",), "framework=sglang: keeps the states of .*'s Mamba-2 in a pool of their own"),
        (("kv.block_size=16",), r"kv.block_size=16: a state of .*'s Mamba-2 takes 2.0 MiB .* kv.block_size=2096"),
        (("kv.windows=false",), "kv.windows=False: Mamba-2 of .* use kv.windows=true"),
        (("executor.tensor_parallel=16",), "executor.tensor_parallel=16: .* 64 heads in 8 groups of Mamba-2"),
        (("executor.tensor_parallel=3",), "executor.tensor_parallel=3: .* 32 query heads and 2 KV heads"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_engine(compose_run(*NANO, *settings))
