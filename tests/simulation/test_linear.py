"""Linear attention on simulated devices: what its states take, and how long steps take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.kv.groups import LayerGroup
from kvlab.lab.advise.parts import changed
from kvlab.lab.capacity import plan_capacity
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.remarks import remarks_on_devices
from kvlab.models.families import decoder_config
from kvlab.models.sparse_reader import read_sparse
from kvlab.simulation.timings.roofline import RooflineTiming
from kvlab.simulation.timings.silicon import SiliconTiming
from tests.simulation.test_roofline import counts
from tests.simulation.test_sparse import described
from tests.support.plans import LINEAR_MODELS, compose_run, composed

SIMULATED = ("executor=simulated", "hardware=h200_sxm", "executor.dtype=bfloat16")
STATE = 32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2  # bytes of one layer of Qwen3.5 35B-A3B


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "parameters", "active", "bytes_per_token"),
        [
            ("qwen3_5_122b_a10b", 122.1e9, 9.01e9, 2 * 12 * 2 * 256 * 2),
            ("qwen3_5_27b", 26.9e9, 26.9e9, 2 * 16 * 4 * 256 * 2),
            ("qwen3_5_35b_a3b", 34.66e9, 2.95e9, 2 * 10 * 2 * 256 * 2),
            ("qwen3_5_397b_a17b", 396.3e9, 16.3e9, 2 * 15 * 2 * 256 * 2),
            ("qwen3_next_80b_a3b", 79.67e9, 3.56e9, 2 * 12 * 2 * 256 * 2),
        ],
    )
    def test_are_those_that_were_published(
        self, name: str, parameters: float, active: float, bytes_per_token: int
    ) -> None:
        model = described(name)
        head = model.vocab_size * model.hidden_size
        assert model.num_parameters == pytest.approx(parameters, rel=0.004)
        all_active = model.active_parameters + head * (1 if model.experts.layers else 2)
        assert all_active == pytest.approx(active, rel=0.02)
        assert model.kv_spec("bfloat16").bytes_per_token == bytes_per_token

    def test_every_preset_is_checked_above(self) -> None:
        checked = self.test_are_those_that_were_published.pytestmark[0].args[1]  # type: ignore[attr-defined]
        assert [row[0] for row in checked] == LINEAR_MODELS

    @pytest.mark.parametrize("name", LINEAR_MODELS)
    def test_have_as_many_parameters_as_transformers_gives_them(self, name: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = composed(*SIMULATED, f"model={name}").model
        small = {"num_hidden_layers": 4, "hidden_size": 256}
        few: dict[str, Any] = {**model.architecture, **small}
        if "num_experts" in few:
            few["num_experts"] = 16
        kind = model.family if model.family == "qwen3_next" else f"{model.family}_text"
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **few))
        ours = read_sparse({**few, "model_type": model.family})
        assert ours.num_parameters == sum(weight.numel() for weight in theirs.parameters())

    def test_a_multimodal_checkpoint_has_its_language_model(self) -> None:
        model = composed(*SIMULATED, "model=qwen3_5_35b_a3b").model
        inner = {**model.architecture, "layer_types": ["linear_attention"] * 30 + ["full_attention"] * 10}
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        whole = {"model_type": model.family, "text_config": inner, "quantization_config": fp8}
        found = read_sparse(whole)
        assert (found.state_layers, found.layers[0].has_state, found.quantization) == (30, True, "fp8_block")
        assert found.num_parameters == described("qwen3_5_35b_a3b").num_parameters

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer_types": ["mamba"] * 64}, r"layer_types=.* has to name linear_attention or full_attention"),
            ({"layer_types": [["full_attention"]] * 64}, r"layer_types=.* has to name linear_attention"),
            ({"layer_types": ["linear_attention"] * 64}, r"layer_types=.* has to name linear_attention"),
            (
                {"rope_parameters": {"partial_rotary_factor": "much"}},
                "partial_rotary_factor=much: has to be a number",
            ),
            ({"rope_parameters": {"partial_rotary_factor": -1}}, "partial_rotary_factor=-1: has to be a number"),
            ({"linear_num_key_heads": 0}, "linear_num_key_heads=0: has to be a whole number"),
        ],
    )
    def test_a_file_with_others_is_refused(self, changes: dict[str, Any], message: str) -> None:
        values = {**composed(*SIMULATED, "model=qwen3_5_27b").model.architecture, "model_type": "qwen3_5"}
        with pytest.raises(ConfigError, match=message):
            read_sparse({**values, **changes})

    def test_a_file_of_the_language_model_alone_is_read(self) -> None:
        for name in ("qwen3_5_27b", "qwen3_5_35b_a3b"):
            model = composed(*SIMULATED, f"model={name}").model
            text = replace(model, family=f"{model.family}_text")
            found = decoder_config(text, simulated=True)
            assert found.num_parameters == described(name).num_parameters


class TestMemory:
    @pytest.mark.parametrize(
        ("settings", "block", "blocks", "of_one", "tokens"),
        [
            # Qwen3.6 35B-A3B, vLLM 0.24 on an RTX 5090 with 5.98 and 6.01 GiB (noonghunna/club-3090 612, 652)
            (("model=qwen3_5_35b_a3b", "kv.memory=5.98GiB"), 2096, 299, 63 + 3 * 2, 567_978),
            (("model=qwen3_5_35b_a3b", "kv.memory=6.01GiB"), 2096, 300, 63 + 3 * 2, 569_878),
            # Qwen3.8 27B on two RTX 3090 with 4.99 GiB each (mitchross/talos-argocd-proxmox 1995)
            (
                ("model=qwen3_5_27b", "executor.tensor_parallel=2", "kv.memory=9.98GiB"),
                *(1568, 208, 84 + 3 * 2, 302_921),
            ),
        ],
    )
    def test_is_that_of_servers_that_published_their_start(
        self, settings: tuple[str, ...], block: int, blocks: int, of_one: int, tokens: int
    ) -> None:
        limits = ("model.max_seq_len=131072", "kv.dtype=fp8_e4m3", "executor.timing=roofline")
        plan = plan_engine(compose_run(*SIMULATED, "framework.version=0.24", *limits, *settings))
        # vLLM counts two blocks of states of each group, the one that a step reads and the one that it writes.
        counted = plan.pool.blocks_of(131_072) + sum(group.has_state for group in plan.pool.groups)
        assert (plan.pool.block_size, plan.pool.num_blocks, counted) == (block, blocks, of_one)
        # As vLLM says it: so many requests of model.max_seq_len at once, in tokens.
        assert int(blocks / of_one * 131_072) == tokens

    @pytest.mark.parametrize(
        ("settings", "block"),
        [
            (("model=qwen3_5_35b_a3b", "framework.version=0.32"), 1056),  # as vLLM says at its start
            (("model=qwen3_5_35b_a3b", "hardware=l40s"), 1056),
            (("model=qwen3_5_35b_a3b", "kv.prefix_sharing=false"), 1056),
            (("model=qwen3_5_35b_a3b",), 1088),  # a multiple of what FlashInfer's kernels compute at once
            (("model=qwen3_5_35b_a3b", "kv.dtype=fp8_e4m3"), 2112),
            (("model=qwen3_5_35b_a3b", "executor.tensor_parallel=2"), 1088),
            (("model=qwen3_5_35b_a3b", "executor.tensor_parallel=4"), 576),  # of two KV heads each device has one
            (("model=qwen3_5_27b", "executor.tensor_parallel=2", "kv.dtype=fp8_e4m3"), 1600),
            (("model=qwen3_30b_a3b",), 16),
            (("model=qwen3_5_27b", "kv.block_size=2048"), 2048),
            (
                ("model=qwen3_5_27b", "~model.architecture.head_dim", "model.architecture.num_attention_heads=20"),
                832,
            ),
        ],
    )
    def test_a_block_holds_a_state(self, settings: tuple[str, ...], block: int) -> None:
        assert composed(*SIMULATED, *settings).kv.block_size == block

    def test_a_sequence_has_a_block_of_each_group_of_states_however_long_it_is(self) -> None:
        pool = plan_engine(composed(*SIMULATED, "model=qwen3_5_35b_a3b", "scheduler.ahead=false")).pool
        assert [(len(group.layers), group.has_state) for group in pool.groups] == [
            (10, False),
            *[(10, True)] * 3,
        ]
        assert [pool.blocks_of(tokens) for tokens in (1, 1088, 1089, 10_000)] == [4, 4, 5, 13]
        assert pool.bytes_per_slot == 10 * 2 * 2 * 256 * 2
        assert pool.bytes_per_slot * pool.block_size >= 10 * STATE

    def test_a_state_fills_its_block(self) -> None:
        run = composed("model=qwen3_5_35b_a3b", "hardware=h200_sxm", "executor.dtype=bfloat16")
        (row,) = plan_capacity(run, device="cuda", lengths=[1088]).lengths
        # Half a block behind the last token of a length that varies is not used, of four blocks and that half.
        assert row.unused["paged"] == pytest.approx(543.5 / (4 * 1088 + 543.5))

    def test_a_group_of_states_needs_as_many_blocks_whatever_a_step_computes(self) -> None:
        group = LayerGroup((0,), 2, states=2)
        assert [group.most_blocks(10_000, 1000, step) for step in (1, 1000, 1001, 8000)] == [2, 2, 2, 2]
        assert group.most_blocks(1000, 1000, 8000) == 1


class TestTime:
    def test_measured_kernels_of_all_such_layers_are_added(self) -> None:
        pytest.importorskip("aiconfigurator_core")
        plan = plan_engine(composed(*SIMULATED, "model=qwen3_5_35b_a3b", "executor.timing=silicon"))
        timing = plan.timing
        assert isinstance(timing, SiliconTiming)
        one, other = (timing.device_s(counts(*[1] * 16), counts(*[length] * 16), 16) for length in (500, 20_000))
        states = timing._states_s(16, 1)
        assert 0 < states < one
        # Of 40 layers ten have K and V: a longer context costs as much as theirs cost more.
        longer = 10 * (timing._decode_s(16, 19_968) - timing._decode_s(16, 500))
        assert other - one == pytest.approx(longer, rel=0.01)
        assert timing._states_s(1, 4096) > timing._states_s(1, 512) > 0

    def test_kernels_that_were_not_measured_are_not_taken_for_such(self) -> None:
        pytest.importorskip("aiconfigurator_core")
        settings = ("executor=simulated", "hardware=a100_sxm", "executor.dtype=bfloat16", "model=qwen3_5_27b")
        with pytest.raises(ConfigError, match=r"on a100_sxm was not measured with linear attention of its shape"):
            plan_engine(composed(*settings, "executor.tensor_parallel=2", "executor.timing=silicon"))
        assert isinstance(plan_engine(composed(*settings, "executor.tensor_parallel=2")).timing, RooflineTiming)

    def test_a_roofline_reads_and_writes_the_states_of_each_sequence(self) -> None:
        plan = plan_engine(composed(*SIMULATED, "model=qwen3_5_35b_a3b", "executor.timing=roofline"))
        timing = plan.timing
        assert isinstance(timing, RooflineTiming)
        hardware = timing.hardware
        state_s = 30 * 2 * STATE / (hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency)
        apart, together = (
            timing.step(counts(100, 100), counts(100, 100), 1),
            timing.step(counts(200), counts(200), 1),
        )
        assert apart.linear - together.linear == pytest.approx(state_s)
        few = timing.step(counts(1), np.array([1000]), 1).attention
        many = timing.step(counts(1), np.array([2000]), 1).attention
        kv_s = 1000 * 20_480 / (hardware.bandwidth_gb_s * 1e9 * hardware.bandwidth_efficiency)
        assert many - few == pytest.approx(kv_s)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ("framework.version=0.25.1",),
            "vLLM 0.25.1 finds no prefixes of such a model by default; set kv.prefix_sharing",
        ),
        (("framework.version=0.26.0",), None),
        (("framework.version=0.25.1", "kv.prefix_sharing=false"), None),
    ],
)
def test_a_run_says_where_a_server_finds_prefixes(settings: tuple[str, ...], says: str | None) -> None:
    plan = plan_run(composed(*SIMULATED, "executor.timing=roofline", "model=qwen3_5_27b", *settings))
    assert plan.timing is not None
    said = [text for text in remarks_on_devices(plan, plan.timing) if "prefixes" in text]
    assert (len(said) == 1 and says in said[0]) if says else not said


def test_advice_takes_the_block_that_holds_a_state_with_other_settings() -> None:
    today = composed(*SIMULATED, "model=qwen3_5_27b")
    other = changed(today, {"kv.dtype": "fp8_e4m3"})
    assert (today.kv.block_size, other.kv.block_size) == (832, 1600)
    own = changed(compose_run(*SIMULATED, "model=qwen3_5_27b", "kv.block_size=2048"), {"kv.dtype": "fp8_e4m3"})
    assert own.kv.block_size == 2048


def test_an_engine_of_this_machine_says_that_it_does_not_compute_them() -> None:
    with pytest.raises(ConfigError, match="linear attention, which simulated devices alone have; set hardware="):
        decoder_config(composed(*SIMULATED, "model=qwen3_5_27b").model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("framework=sglang",), "framework=sglang: keeps the states of .* in a pool of their own"),
        (
            ("kv.block_size=16",),
            r"kv.block_size=16: a state .* takes 2.0 MiB of each device, .* take kv.block_size=1088,2176, as",
        ),
        (("kv.windows=false",), "kv.windows=False: linear attention .* use kv.windows=true"),
        (("kv=contiguous",), "kv.backend=contiguous: linear attention .* use kv.backend=paged"),
        (("kv.pinned_share=0.5",), "kv.pinned_share=0.5: .* keeps one state .* kv.pinned_share=0"),
        (("model=qwen3_5_27b", "executor.expert_parallel=2"), "expert_parallel=2: .* qwen3_5_27b has no experts"),
        (("model=qwen3_5_27b", "executor.tensor_parallel=3"), "tensor_parallel=3: .*24 query heads and 4 KV"),
        (("executor.tensor_parallel=0",), "executor.tensor_parallel=0: must be a number, at least 1"),
        (
            ("executor.tensor_parallel=32", "model.architecture.num_attention_heads=32"),
            "executor.tensor_parallel=32: .* 16 key heads and 32 value heads",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_engine(compose_run(*SIMULATED, "model=qwen3_5_35b_a3b", *settings))
