"""The planner's figures are those of the tensors that a run makes: to the byte, for every model there is."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from ctypes import c_int, c_int64
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.backends.concat import ConcatAttention
from kvlab.config import RunConfig
from kvlab.engine.build import EnginePlan, build_engine, plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.engine.memory import matrices, weight_bytes
from kvlab.errors import CapacityError, ConfigError, OutOfBlocksError
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import load
from kvlab.kv.sizing import PoolSize
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.lab import build
from kvlab.lab.build import RunPlan, planned_metrics
from kvlab.lab.capacity import (
    CapacityPlan,
    capacity_curve,
    default_lengths,
    plan_capacity,
    sequences_that_fit,
)
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.rope import RotaryEmbedding
from kvlab.models.weights import DummyWeights
from tests.lab.test_compose import MODELS, compose_run
from tests.support.engines import sampling_batch

GIB = 2**30
SMALL = [name for name in MODELS if name.endswith("_tiny")]
kv_dtypes = pytest.mark.parametrize("kv_dtype", ["auto", "int8"])


@cache
def composed(*overrides: str) -> RunConfig:
    return compose_run(*overrides)


def planned(*overrides: str, memory: int | None = 16 * GIB, device: str = "cpu") -> CapacityPlan:
    return plan_capacity(composed(*overrides), device=device, memory=memory)


class TestCache:
    @kv_dtypes
    @pytest.mark.parametrize("backend", ["contiguous", "paged"])
    @pytest.mark.parametrize("name", MODELS)
    def test_equals_the_tensors_of_the_pool(self, name: str, backend: str, kv_dtype: str) -> None:
        plan = planned(f"model={name}", f"kv.dtype={kv_dtype}")
        pool = plan.pools[backend]
        assert pool is not None
        storage = KVStorage(plan.spec, pool.num_blocks, pool.block_size, "meta")
        assert pool.num_bytes == storage.num_bytes == pool.token_slots * plan.spec.bytes_per_token
        kv_heads, head_dim = plan.model.num_kv_heads, plan.model.head_dim
        shape = (plan.model.num_layers, pool.num_blocks, kv_heads, pool.block_size, head_dim)
        assert storage.keys.shape == storage.values.shape == shape
        scales = 0
        if kv_dtype == "int8":
            assert storage.key_scales is not None
            assert storage.value_scales is not None
            scales = storage.key_scales.nbytes + storage.value_scales.nbytes
        assert storage.keys.nbytes + storage.values.nbytes + scales == pool.num_bytes
        # As much as fits, and no more.
        left = 16 * GIB - plan.weights.total - plan.working.peak
        assert 0 <= left - pool.num_bytes < pool.block_size * plan.spec.bytes_per_token

    @kv_dtypes
    @pytest.mark.parametrize("backend", ["contiguous", "paged"])
    @pytest.mark.parametrize("name", MODELS)
    def test_equals_the_pool_of_a_run_with_those_bytes(self, name: str, backend: str, kv_dtype: str) -> None:
        plan = planned(f"model={name}", f"kv.dtype={kv_dtype}")
        config = composed(f"model={name}", f"kv.dtype={kv_dtype}", f"kv={backend}")
        left = 16 * GIB - plan.weights.total - plan.working.peak
        run = plan_engine(replace(config, kv=replace(config.kv, memory=f"{left}B")))
        assert run.pool == plan.pools[backend]
        assert run.weights == plan.weights

    @kv_dtypes
    @pytest.mark.parametrize("backend", ["contiguous", "paged"])
    @pytest.mark.parametrize("name", SMALL)
    def test_equals_what_an_engine_allocates(self, name: str, backend: str, kv_dtype: str) -> None:
        memory = 80 * 2**20
        plan = planned(f"model={name}", f"kv.dtype={kv_dtype}", memory=memory)
        left = memory - plan.weights.total - plan.working.peak
        config = composed(f"model={name}", f"kv.dtype={kv_dtype}", f"kv={backend}", "executor=cpu")
        engine = build_engine(plan_engine(replace(config, kv=replace(config.kv, memory=f"{left}B"))))
        pool, stats = plan.pools[backend], engine.pool.stats()
        assert pool is not None
        storage: KVStorage = engine.pool.storage  # type: ignore[attr-defined]
        assert storage.num_bytes == pool.num_bytes
        assert (stats.blocks_total, stats.block_size) == (pool.num_blocks, pool.block_size)

    def test_kv_heads_count_and_query_heads_do_not(self) -> None:
        """Qwen3 4B has 32 query heads over 8 KV heads of 128: 2 x 36 x 8 x 128 x 2 bytes."""
        plan = planned("model=qwen3_4b")
        assert plan.spec.bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456
        assert planned("model=qwen3_4b", "kv.dtype=int8").spec.bytes_per_token == 2 * 36 * 8 * (128 + 4)
        more_queries = planned("model=qwen3_tiny", "model.architecture.num_attention_heads=8")
        assert more_queries.spec == planned("model=qwen3_tiny").spec
        more_kv = planned("model=qwen3_tiny", "model.architecture.num_key_value_heads=4")
        assert more_kv.spec.bytes_per_token == 2 * more_queries.spec.bytes_per_token

    def test_is_as_large_as_the_configuration_says(self) -> None:
        plan = planned("model=qwen3_4b", "kv.num_blocks=100", memory=None)
        assert plan.pools["paged"] == PoolSize(100, 16, 147_456)
        assert plan.pools["contiguous"] == PoolSize(1, 1024, 147_456)


class TestWeights:
    @pytest.mark.parametrize("kernels", ["true", "false"])
    @pytest.mark.parametrize(
        ("dtype", "weights"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "auto"), ("float16", "auto")]
    )
    @pytest.mark.parametrize("name", SMALL)
    def test_equal_the_tensors_of_a_loaded_model(self, name: str, dtype: str, weights: str, kernels: str) -> None:
        if weights == "int8" and kernels == "false":
            pytest.skip("int8 is computed by kernels")
        overrides: tuple[str, ...] = (f"model={name}", f"executor.dtype={dtype}", f"executor.weights={weights}")
        overrides += (f"executor.kernels={kernels}", "executor=cpu")
        plan = planned(*overrides)
        parameters, rotary = loaded_bytes(build_decoder(plan_engine(composed(*overrides))))
        assert plan.weights.parameters == parameters
        assert plan.weights.rotary == rotary

    @pytest.mark.parametrize("name", MODELS)
    def test_equal_the_tensors_of_every_model_on_a_device_that_packs_nothing(self, name: str) -> None:
        plan = planned(f"model={name}", device="cuda")
        config = plan.model
        weights = DummyWeights(torch.bfloat16, "meta")
        weights.take = lambda name, shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # type: ignore[method-assign]
        specs = attention_specs(config, "bfloat16", "meta")
        parameters, rotary = loaded_bytes(Decoder(config, weights, ConcatAttention(), specs, 1024))
        assert plan.weights.parameters == parameters
        assert plan.weights.rotary == rotary

    @pytest.mark.parametrize("name", MODELS)
    def test_are_the_parameters_in_their_dtype(self, name: str) -> None:
        """But for Gemma's norms, which stay in float32."""
        model, weights = planned(f"model={name}").model, planned(f"model={name}").weights
        assert weights.stored == model.num_parameters
        wider = weights.norms // 2 if model.norm_offset else 0
        assert weights.parameters == 2 * model.num_parameters + wider

    @pytest.mark.parametrize("weights", ["auto", "int8"])
    @pytest.mark.parametrize("name", MODELS)
    def test_equal_what_the_kernels_pack_every_model_into(self, name: str, weights: str) -> None:
        plan = planned(f"model={name}", f"executor.weights={weights}")
        packed_bytes = load().kvlab_packed_linear_bytes
        packed_bytes.restype = c_int64
        packed = (
            matrix.times * packed_bytes(c_int(matrix.outputs), c_int(matrix.inputs), c_int(weights == "int8"))
            for matrix in matrices(plan.model)
        )
        assert plan.weights.matrices == sum(packed)

    def test_outputs_are_padded_as_they_are_packed(self) -> None:
        overrides = ("model=qwen3_tiny", "model.architecture.vocab_size=97", "executor=cpu")
        plan = planned(*overrides)
        packed = PackedWeight(torch.zeros(97, 64, dtype=torch.bfloat16))
        assert loaded_bytes(build_decoder(plan_engine(composed(*overrides))))[0] <= plan.weights.parameters
        assert packed.num_bytes <= 112 * 64 * 2


class TestWorkingMemory:
    @pytest.mark.parametrize("kernels", ["true", "false"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("shape", ["wide", "vocabulary", "heads"])
    def test_is_what_the_largest_step_takes(self, shape: str, temperature: float, kernels: str) -> None:
        """Not twice as much; what else is allocated is small, and counted as such."""
        changed = {
            "wide": ["model.architecture.intermediate_size=4096"],
            "vocabulary": ["model.architecture.vocab_size=32000"],
            "heads": ["model.architecture.num_attention_heads=32", "model.architecture.num_key_value_heads=8"],
        }[shape]
        plan = plan_engine(
            composed(
                "model=qwen3_tiny",
                "executor=cpu",
                "executor.dtype=float32",
                f"executor.kernels={kernels}",
                "model.max_seq_len=256",
                *changed,
            ),
            random_sampling=temperature > 0,
        )
        taken, estimate = largest_step(plan, temperature), plan.working.peak - plan.working.small
        assert taken <= 1.05 * estimate <= 2 * taken

    def test_of_a_plugin_s_attention_is_planned_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As that of a backend that copies a sequence, unless it is a kernel or names its own bytes."""
        kinds: dict[str, dict[str, object]] = {
            "copying": {},
            "kernel": {"is_kernel": True},
            "counted": {"working_bytes": staticmethod(lambda model, settings: model.head_dim)},
        }
        for name, attributes in kinds.items():
            backend = type(name, (ConcatAttention,), {"name": name, **attributes})
            monkeypatch.setitem(ATTENTION_BACKENDS._entries, name, backend)
        found = {
            name: plan_engine(composed("model=qwen3_tiny", f"attention.backend={name}")).working.attention
            for name in ("concat", *kinds)
        }
        assert found == {"concat": found["concat"], "copying": found["concat"], "kernel": 0, "counted": 32}
        assert found["concat"] > 0


class TestSequences:
    def test_of_one_length_fill_the_pools_and_one_more_does_not_fit(self) -> None:
        """The real ledgers, at every length of the table."""
        from kvlab.kv.pools.contiguous import ContiguousKVCachePool
        from kvlab.kv.pools.paged import PagedKVCachePool

        plan = plan_capacity(
            composed("model=qwen3_mini", "model.max_seq_len=600", "kv.num_blocks=201"),
            device="cpu",
            lengths=[1, 15, 16, 17, 100, 256, 599, 600],
        )
        for row in plan.lengths:
            pages = PagedKVCachePool(201, 16, 600, None, prefix_sharing=False)
            slots = ContiguousKVCachePool(5, 600, None)
            for pool, expected in ((pages, row.sequences["paged"]), (slots, row.sequences["contiguous"])):
                for _ in range(expected):
                    pool.allocate_slot(row.length)
                with pytest.raises(OutOfBlocksError):
                    pool.allocate_slot(row.length)

    def test_advantage_is_what_a_slot_wastes(self) -> None:
        plan = planned("model=qwen3_4b", "model.max_seq_len=4096")
        assert [row.length for row in plan.lengths] == [256, 512, 1024, 2048, 4096]
        assert plan.lengths[0].advantage == pytest.approx(16, rel=0.1)
        assert plan.lengths[-1].advantage == 1
        assert plan.lengths[0].unused["contiguous"] == 1 - 256 / 4096
        assert plan.lengths[0].unused["paged"] == 7.5 / (256 + 7.5)

    def test_of_mixed_lengths_take_the_mean_of_their_blocks(self) -> None:
        assert sequences_that_fit(PoolSize(30, 16, 1), [16, 32]) == 20
        assert sequences_that_fit(PoolSize(30, 16, 1), [17]) == 15
        assert sequences_that_fit(PoolSize(0, 16, 1), [17]) == 0

    def test_no_slot_fits_where_pages_do(self) -> None:
        plan = planned("model=qwen3_4b", "kv.num_blocks=10", memory=None)
        assert plan.pools["contiguous"] is None
        assert [row.sequences["contiguous"] for row in plan.lengths] == [0, 0, 0]
        assert [row.advantage for row in plan.lengths] == [None] * 3
        assert plan.as_dict()["pools"]["contiguous"] is None

    @pytest.mark.parametrize(
        ("longest", "lengths"),
        [
            (1024, (256, 512, 1024)),
            (1000, (256, 512, 1000)),
            (256, (32, 64, 128, 256)),
            (1, (1,)),
            (5, (1, 2, 4, 5)),
        ],
    )
    def test_default_lengths_end_with_the_longest(self, longest: int, lengths: tuple[int, ...]) -> None:
        assert default_lengths(longest) == lengths

    def test_the_curve_is_the_table(self) -> None:
        plan = planned("model=qwen3_0_6b", "model.max_seq_len=2048")
        contiguous, paged = capacity_curve(
            plan.paged.num_bytes, plan.spec.bytes_per_token, max_seq_len=2048, block_size=16
        )
        assert (contiguous.backend, paged.backend) == ("contiguous", "paged")
        assert contiguous.lengths == paged.lengths == tuple(row.length for row in plan.lengths)
        assert contiguous.sequences == tuple(row.sequences["contiguous"] for row in plan.lengths)
        assert paged.sequences == tuple(row.sequences["paged"] for row in plan.lengths)


class TestRefusals:
    def test_memory_smaller_than_the_weights_says_what_is_missing_and_what_would_do(self) -> None:
        with pytest.raises(CapacityError) as caught:
            planned("model=qwen3_4b", memory=6 * GIB)
        message = str(caught.value)
        assert "memory=6.0 GiB: qwen3_4b needs 7.5 GiB for weights in bfloat16" in message
        assert "2.2 GiB more" in message
        assert "executor.weights=int8 takes 3.8 GiB and would fit" in message
        assert planned("model=qwen3_4b", "executor.weights=int8", memory=6 * GIB).paged.num_blocks > 0

    def test_the_advised_memory_holds_a_block_and_a_mebibyte_less_does_not(self) -> None:
        with pytest.raises(CapacityError, match=r"memory=\d+MiB would do") as caught:
            planned("model=qwen3_mini", memory=2**20)
        advised = int(str(caught.value).split("MiB would do")[0].rpartition("=")[2])
        assert planned("model=qwen3_mini", memory=advised * 2**20).paged.num_blocks >= 1
        with pytest.raises(CapacityError):
            planned("model=qwen3_mini", memory=(advised - 1) * 2**20)

    def test_a_cache_that_does_not_fit_beside_the_weights(self) -> None:
        with pytest.raises(
            CapacityError, match=r"memory=8\.0 GiB: a KV cache of 1023\.8 MiB needs 8\.6 GiB .* 607\.0 MiB more"
        ):
            planned("model=qwen3_4b", "kv.memory=1GiB", memory=8 * GIB)

    def test_a_pool_of_less_than_a_block_says_so(self) -> None:
        with pytest.raises(CapacityError, match="less than one block of 16"):
            planned("model=qwen3_4b", "kv.memory=1MiB", memory=None)

    @pytest.mark.parametrize(
        ("override", "device", "reason"),
        [
            ("executor.dtype=float32", "cpu", "is for executor.dtype=bfloat16"),
            ("executor.kernels=false", "cpu", "executor.kernels=false allows none"),
            ("executor.dtype=bfloat16", "cuda", "runs on a CPU, not on cuda"),
        ],
    )
    def test_int8_weights_where_a_run_has_none(self, override: str, device: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=rf"executor\.weights=int8: .*{reason}"):
            planned("model=qwen3_mini", "executor.weights=int8", override, device=device)

    def test_a_length_that_is_not_served(self) -> None:
        with pytest.raises(ConfigError, match=r"lengths=2000: .* model\.max_seq_len=1024"):
            plan_capacity(composed("model=qwen3_4b"), device="cpu", memory=16 * GIB, lengths=[2000])


class TestPlanOfARun:
    def metrics(self, *overrides: str) -> dict[str, float]:
        return planned_metrics(build.plan_run(composed("model=qwen3_tiny", "executor=cpu", *overrides)))

    def test_every_sequence_counts_at_its_full_length(self) -> None:
        fixed = ("workload.prompt_len={min: 20, max: 20}", "workload.output_len={min: 13, max: 13}")
        found = self.metrics("workload.num_requests=4", "kv.num_blocks=10", *fixed)
        assert (found["capacity/mean_length"], found["capacity/planned_sequences"]) == (33, 3)

    def test_samples_are_sequences_of_their_own(self) -> None:
        found = self.metrics("workload=parallel_sampling", "workload.num_requests=2", "kv.num_blocks=1000")
        assert found["capacity/planned_running"] == 8 < found["capacity/planned_sequences"]

    def test_a_later_turn_has_the_earlier_ones_before_it(self) -> None:
        fixed = ("workload.prompt_len={min: 20, max: 20}", "workload.output_len={min: 10, max: 10}")
        found = self.metrics("workload=multi_turn", "workload.turns=3", "workload.system_len=0", *fixed)
        assert found["capacity/mean_length"] == (30 + 60 + 90) / 3

    def test_no_more_run_than_the_scheduler_lets(self) -> None:
        found = self.metrics("scheduler.max_batch_size=5", "kv.num_blocks=1000")
        assert found["capacity/planned_running"] == 5 < found["capacity/planned_sequences"]

    def test_bytes_are_those_of_the_plan(self) -> None:
        plan = planned("model=qwen3_tiny", "executor=cpu")
        found = self.metrics()
        assert found["capacity/weight_bytes"] == plan.weights.total
        assert found["capacity/working_bytes"] == plan.working.peak


class TestRunThatDoesNotFit:
    """The run's own check before it starts, on machines of several sizes."""

    CONFIG = ("model=qwen3_mini", "kv.memory=512MiB", "executor=cpu")

    def plan(self, monkeypatch: pytest.MonkeyPatch, available: int, *overrides: str) -> RunPlan:
        monkeypatch.setattr(build, "available_memory", lambda device: available)
        return build.plan_run(composed(*(overrides or self.CONFIG)))

    def test_what_it_advises_fits_and_a_mebibyte_more_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            CapacityError, match=r"cpu has 600\.0 MiB available; kv\.memory=\d+MiB would fit"
        ) as caught:
            self.plan(monkeypatch, 600 * 2**20)
        advised = int(str(caught.value).rpartition("kv.memory=")[2].split("MiB")[0])
        less = ("model=qwen3_mini", f"kv.memory={advised}MiB", "executor=cpu")
        assert self.plan(monkeypatch, 600 * 2**20, *less).pool.num_bytes <= advised * 2**20
        with pytest.raises(CapacityError):
            self.plan(monkeypatch, 600 * 2**20, "model=qwen3_mini", f"kv.memory={advised + 1}MiB", "executor=cpu")

    def test_weights_that_do_not_fit_leave_no_room_for_a_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(CapacityError, match="no KV cache fits beside these weights: take a smaller model"):
            self.plan(monkeypatch, 50 * 2**20)

    def test_with_room_for_all_it_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = self.plan(monkeypatch, 4 * GIB)
        needed = plan.weights.total + plan.pool.num_bytes + plan.working.peak
        assert 0 < needed < GIB


def loaded_bytes(model: Decoder) -> tuple[int, int]:
    """Bytes of a model's parameters and of its rotary tables, each tensor once, wherever it is kept."""
    rotary = [table for part in model._rotary for table in (part.cos, part.sin)]
    mine = {id(table) for table in rotary}
    parameters = {id(tensor): tensor.nbytes for tensor in _tensors(model, set()) if id(tensor) not in mine}
    return sum(parameters.values()), sum(table.nbytes for table in rotary)


def _tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in seen or isinstance(thing, str | int | float | type | KVSpec | RotaryEmbedding):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif type(thing).__module__.startswith("kvlab.") or isinstance(thing, list | tuple | dict):
        for part in gc.get_referents(thing):
            yield from _tensors(part, seen)
    elif callable(thing):  # a partial or a bound method
        for part in (getattr(thing, "keywords", None), getattr(thing, "__self__", None)):
            yield from _tensors(part, seen)


def largest_step(plan: EnginePlan, temperature: float) -> int:
    """The most bytes that PyTorch had allocated at once during a full step, above those it had before."""
    from torch.profiler import ProfilerActivity, profile

    from kvlab.core import Request, SamplingParams, Sequence
    from kvlab.engine.sampler import Sampler
    from kvlab.kv.pools.contiguous import ContiguousKVCachePool

    model = build_decoder(plan)
    settings = plan.config.scheduler
    batch = settings.max_batch_size
    each = settings.max_batched_tokens // batch
    storage = KVStorage(plan.model.kv_spec("float32"), batch, 256)
    pool = ContiguousKVCachePool(batch, 256, storage)
    slots = [pool.allocate_slot(each) for _ in range(batch)]
    sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=1)
    sequences = [
        Sequence(Request(f"r{i}", tuple(range(each)), sampling), token_ids=list(range(each))) for i in range(batch)
    ]
    token_ids = torch.zeros(each * batch, dtype=torch.int64)
    rows = torch.arange(each - 1, each * batch, each)
    view, sampler = pool.view(slots, [each] * batch), Sampler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        result = sampler(model.forward(token_ids, view, rows), sampling_batch(*sequences))
    assert len(result.token_ids) == batch
    events = [event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())))


def test_settings_of_a_plan_are_those_of_a_run() -> None:
    plan = planned("model=qwen3_tiny", "executor=cpu")
    run = build.plan_run(composed("model=qwen3_tiny", "executor=cpu"))
    assert run.attention.name == plan.settings.attention
    assert run.working == plan.working
    assert weight_bytes(run.model, plan.settings) == run.weights
