"""The planner's bytes are those of the tensors that a run makes, for every model there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.backends.concat import ConcatAttention
from kvlab.config.executor import PACKED_WEIGHTS
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.engine.plan import EnginePlan
from kvlab.engine.ranks import RankGroup
from kvlab.kernels.cpu.interface import WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.native import load
from kvlab.kv.sizing import PoolSize
from kvlab.kv.storage import KVStorage
from kvlab.models.config import attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.ops.cpu_layers import NativeStack
from kvlab.models.weights import DummyWeights
from kvlab.planning.memory import matrices
from tests.support.engines import sampling_batch
from tests.support.loaded import loaded_bytes
from tests.support.plans import GIB, MODELS, composed, planned
from tests.support.processors import as_on_a_processor

SMALL = [name for name in MODELS if name.endswith("_tiny")]
kv_dtypes = pytest.mark.parametrize("kv_dtype", ["auto", "int8"])


class TestCache:
    @kv_dtypes
    @pytest.mark.parametrize("backend", ["contiguous", "paged"])
    @pytest.mark.parametrize("name", MODELS)
    def test_equals_the_tensors_of_the_pool(self, name: str, backend: str, kv_dtype: str) -> None:
        plan = planned(f"model={name}", f"kv.dtype={kv_dtype}", memory=256 * GIB)
        pool = plan.pools[backend]
        assert pool is not None
        spec = replace(plan.spec, groups=pool.groups)
        storage = KVStorage(spec, pool.num_blocks, pool.block_size, "meta")
        assert pool.num_bytes == storage.num_bytes == pool.token_slots * spec.bytes_per_slot
        kv_heads, head_dim = plan.model.num_kv_heads, plan.model.head_dim
        shape = (spec.layers_per_block, pool.num_blocks, kv_heads, pool.block_size, head_dim)
        assert storage.keys.shape == storage.values.shape == shape
        scales = 0
        if kv_dtype == "int8":
            assert storage.key_scales is not None
            assert storage.value_scales is not None
            scales = storage.key_scales.nbytes + storage.value_scales.nbytes
        assert storage.keys.nbytes + storage.values.nbytes + scales == pool.num_bytes
        # As much as fits, and no more.
        left = 256 * GIB - plan.weights.total - plan.working.peak
        assert 0 <= left - pool.num_bytes < pool.block_size * plan.spec.bytes_per_token

    @pytest.mark.parametrize(
        ("name", "backend", "kv_dtype"),
        [
            (name, backend, ("auto", "int8")[(number + at) % 2])
            for number, name in enumerate(MODELS)
            for at, backend in enumerate(("contiguous", "paged"))
        ],
    )
    def test_equals_the_pool_of_a_run_with_those_bytes(self, name: str, backend: str, kv_dtype: str) -> None:
        plan = planned(f"model={name}", f"kv.dtype={kv_dtype}", memory=256 * GIB)
        config = composed(f"model={name}", f"kv.dtype={kv_dtype}", f"kv={backend}")
        left = 256 * GIB - plan.weights.total - plan.working.peak
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
        ("dtype", "weights"),
        [
            ("bfloat16", "plain"),
            ("bfloat16", "compact"),
            ("bfloat16", "int8"),
            ("bfloat16", "int8_w8a8"),
            ("float32", "auto"),
            ("float16", "auto"),
        ],
    )
    @pytest.mark.parametrize("name", SMALL)
    def test_equal_the_tensors_of_a_loaded_model(self, name: str, dtype: str, weights: str, kernels: str) -> None:
        if weights in PACKED_WEIGHTS and kernels == "false":
            pytest.skip("computed by kernels")
        if weights == "compact" and not load().kvlab_packed_linear_bytes(1, 32, WeightFormat.COMPACT, 2):
            pytest.skip("needs AVX-512")
        overrides: tuple[str, ...] = (f"model={name}", f"executor.dtype={dtype}", f"executor.weights={weights}")
        overrides += (f"executor.kernels={kernels}", "executor=cpu")
        plan = planned(*overrides)
        parameters, rotary = loaded_bytes(build_decoder(plan_engine(composed(*overrides))))
        assert plan.weights.parameters == parameters
        assert plan.weights.rotary == rotary

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["llama_tiny", "qwen2_tiny"])
    def test_equal_the_tensors_of_all_ranks(self, name: str, dtype: str) -> None:
        overrides: tuple[str, ...] = (f"model={name}", f"executor.dtype={dtype}", "executor.weights=plain")
        overrides += ("executor=cpu", "executor.tensor_parallel=2", "executor.threads=1")
        plan, run = planned(*overrides), plan_engine(composed(*overrides))
        parts = [loaded_bytes(build_decoder(run, ranks=RankGroup(rank, 2))) for rank in range(2)]
        assert [sum(each) for each in zip(*parts, strict=True)] == [plan.weights.parameters, plan.weights.rotary]

    @pytest.mark.parametrize("packs", [True, False])
    @pytest.mark.parametrize("name", SMALL)
    def test_equal_the_tensors_of_pytorchs_model_on_either_processor(
        self, name: str, packs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tied embedding that oneDNN has packed is held twice; where nothing packs it, once."""
        as_on_a_processor(monkeypatch, packs=packs)
        overrides = (f"model={name}", "executor.dtype=bfloat16", "executor.kernels=false", "executor=cpu")
        run = plan_engine(composed(*overrides))
        parameters, rotary = loaded_bytes(build_decoder(run))
        assert run.weights == planned(*overrides).weights
        assert (run.weights.parameters, run.weights.rotary) == (parameters, rotary)
        assert (run.weights.embedding > 0) == (packs or not run.model.tie_word_embeddings)

    def test_of_another_device_do_not_depend_on_this_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plans = []
        for packs in (True, False):
            as_on_a_processor(monkeypatch, packs=packs)
            gpu = planned("model=qwen3_tiny", "executor.kernels=false", device="cuda")
            simulated = planned(
                "model=qwen3_tiny", "executor=simulated", "hardware=h100_sxm", device="cuda", memory=None
            )
            plans.append((gpu, simulated))
        assert plans[0] == plans[1]

    @pytest.mark.parametrize("name", MODELS)
    def test_equal_the_tensors_of_every_model_on_a_device_that_packs_nothing(self, name: str) -> None:
        plan = planned(f"model={name}", device="cuda", memory=256 * GIB)
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
        plan = planned(f"model={name}", memory=256 * GIB)
        model, weights = plan.model, plan.weights
        assert weights.stored == model.num_parameters
        wider = weights.norms // 2 if model.norm_offset else 0
        assert weights.parameters == 2 * model.num_parameters + wider

    @pytest.mark.parametrize("weights", ["plain", "compact", "int8", "int8_w8a8"])
    @pytest.mark.parametrize("name", MODELS)
    def test_equal_what_the_kernels_pack_every_model_into(self, name: str, weights: str) -> None:
        plan = planned(f"model={name}", f"executor.weights={weights}", memory=256 * GIB)
        packed_bytes, format = load().kvlab_packed_linear_bytes, WeightFormat[weights.upper()]
        if not packed_bytes(1, 32, format, 2):
            pytest.skip("needs AVX-512")
        packed = (
            matrix.times * packed_bytes(matrix.outputs, matrix.inputs, format, 2) for matrix in matrices(plan.model)
        )
        assert plan.weights.matrices == sum(packed)

    def test_outputs_are_padded_as_they_are_packed(self) -> None:
        overrides = ("model=qwen3_tiny", "model.architecture.vocab_size=97", "executor=cpu")
        plan = planned(*overrides)
        packed = PackedWeight(torch.zeros(97, 64, dtype=torch.bfloat16))
        assert loaded_bytes(build_decoder(plan_engine(composed(*overrides))))[0] <= plan.weights.parameters
        assert packed.num_bytes <= 112 * 64 * 2


class TestWorkingMemory:
    @pytest.mark.parametrize(
        ("dtype", "kernels"), [("float32", "true"), ("float32", "false"), ("bfloat16", "false")]
    )
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("shape", ["wide", "vocabulary", "heads"])
    def test_is_what_the_largest_step_takes(
        self, shape: str, temperature: float, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not twice as much; what else is allocated is small, and counted as such. In bfloat16 with the most that
        PyTorch needs: where it has no product for it.
        """
        as_on_a_processor(monkeypatch, packs=False)
        changed = {
            "wide": ["model.architecture.intermediate_size=4096"],
            "vocabulary": ["model.architecture.vocab_size=32000"],
            "heads": ["model.architecture.num_attention_heads=32", "model.architecture.num_key_value_heads=8"],
        }[shape]
        plan = plan_engine(
            composed(
                "model=qwen3_tiny",
                "executor=cpu",
                f"executor.dtype={dtype}",
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


def largest_step(plan: EnginePlan, temperature: float) -> int:
    """The most bytes that PyTorch had allocated at once during a full step, above those it had before; and those
    that native layers keep from step to step.
    """
    from torch.profiler import ProfilerActivity, profile

    from kvlab.core import Request, SamplingParams, Sequence
    from kvlab.engine.sampler import Sampler
    from kvlab.kv.pools.contiguous import ContiguousKVCachePool

    model = build_decoder(plan)
    settings = plan.config.scheduler
    batch = settings.max_batch_size
    each = settings.max_batched_tokens // batch
    storage = KVStorage(plan.model.kv_spec(plan.config.executor.dtype), batch, 256)
    pool = ContiguousKVCachePool(batch, 256, storage)
    slots = [pool.allocate_slot(each) for _ in range(batch)]
    sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=1)
    sequences = [Sequence(Request(f"r{i}", tuple(range(each)), sampling)) for i in range(batch)]
    token_ids = torch.zeros(each * batch, dtype=torch.int64)
    rows = torch.arange(each - 1, each * batch, each)
    view, sampler = pool.view(slots, [each] * batch), Sampler()
    model.forward(token_ids, view, rows)
    stack = model._stack if isinstance(model, Decoder) else None
    kept = stack._layers._memory.nbytes if isinstance(stack, NativeStack) else 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        result = sampler(model.forward(token_ids, view, rows), sampling_batch(*sequences))
    assert len(result.token_ids) == batch
    events = [event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"]
    return kept + max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())))
