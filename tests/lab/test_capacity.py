"""How many sequences a plan holds, what it refuses, and the same of a run before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.errors import CapacityError, ConfigError, OutOfBlocksError
from kvlab.kv.sizing import PoolSize
from kvlab.lab.capacity import (
    capacity_curve,
    default_lengths,
    plan_capacity,
    sequences_that_fit,
)
from kvlab.lab.run import plan as planning
from kvlab.lab.run import serve
from kvlab.lab.run.plan import RunPlan, planned_metrics
from tests.support.plans import GIB, composed, planned


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
        assert sequences_that_fit(PoolSize(31, 16, 1, parts=2), [33]) == 2 * (15 // 3)
        assert sequences_that_fit(PoolSize(30, 16, 1, parts=4), [100]) == 4

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

    def test_the_curve_of_layers_with_windows_is_the_table(self) -> None:
        plan = planned("model=gemma3_27b", "model.max_seq_len=8192", "kv.memory=20GiB", memory=None)
        size, lengths = plan.paged, tuple(row.length for row in plan.lengths)
        contiguous, paged = capacity_curve(
            size.num_bytes, size.bytes_per_token, max_seq_len=8192, lengths=lengths, groups=size.groups
        )
        assert list(paged.sequences) == [row.sequences["paged"] for row in plan.lengths]
        assert list(contiguous.sequences) == [row.sequences["contiguous"] for row in plan.lengths]
        less = planned(
            "model=gemma3_27b", "model.max_seq_len=8192", "kv.memory=20GiB", "kv.windows=false", memory=None
        )
        assert plan.lengths[-1].sequences["paged"] >= 3 * less.lengths[-1].sequences["paged"]

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
            CapacityError, match=r"memory=8\.0 GiB: a KV cache of 1023\.8 MiB needs 8\.6 GiB .* 639\.8 MiB more"
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
        return planned_metrics(planning.plan_run(composed("model=qwen3_tiny", "executor=cpu", *overrides)))

    @pytest.mark.parametrize(
        ("output", "framework", "fit"), [(13, "kvlab", 5), (14, "kvlab", 3), (12, "trtllm", 5), (13, "trtllm", 3)]
    )
    def test_every_sequence_counts_with_all_tokens_that_are_stored_and_so_many_run(
        self, output: int, framework: str, fit: int
    ) -> None:
        """Two blocks hold 32 tokens, and nobody computes the last of 33; for that TensorRT-LLM keeps room."""
        lengths = "workload.prompt_len={min: 20, max: 20}", f"workload.output_len={{min: {output}, max: {output}}}"
        simulated = "executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", f"framework={framework}"
        pool = "kv.num_blocks=10", "kv.block_size=16", "kv.prefix_sharing=false", "scheduler.reserve_output=true"
        settings = composed("model=qwen3_tiny", *simulated, *pool, *lengths, "scheduler.admission_reserve=0")
        plan = planning.plan_run(settings)
        found = planned_metrics(plan)
        assert (found["capacity/mean_length"], found["capacity/planned_sequences"]) == (20 + output, fit)
        assert max(step.running for step in serve.simulated(plan).steps) == fit

    @pytest.mark.parametrize(
        ("settings", "lengths", "fit"),
        [
            ((), 33, 5),  # as long as they get
            (("scheduler.reserve_output=true",), 60, 2),  # as long as they may get
            (("scheduler.reserve_output=true", "scheduler.conservativeness=1"), 33, 5),
            (("scheduler.reserve_output=true", "workload.max_tokens=9000"), 160, 1),  # what the pool holds, at most
            (("fleet.groups=[{count:1},{count:1,scheduler:{reserve_output:true}}]",), 33, 5 + 2),
        ],
    )
    def test_a_sequence_counts_with_the_output_that_memory_is_kept_for(
        self, settings: tuple[str, ...], lengths: int, fit: int
    ) -> None:
        fixed = ("workload.prompt_len={min: 20, max: 20}", "workload.output_len={min: 13, max: 13}")
        found = self.metrics(
            "workload.num_requests=6", "kv.num_blocks=10", *fixed, "workload.max_tokens=40", *settings
        )
        assert (found["capacity/mean_length"], found["capacity/planned_sequences"]) == (lengths, fit)

    @pytest.mark.parametrize(
        ("settings", "is_said"),
        [
            ("fleet.groups=[{count:1},{count:1,scheduler:{reserve_output:true}}]", True),
            ("fleet.groups=[{count:2,scheduler:{reserve_output:false}}] scheduler.reserve_output=true", False),
        ],
    )
    def test_that_a_trace_does_not_tell_what_was_asked_for_is_said_of_groups_that_go_by_it(
        self, tmp_path: Path, settings: str, is_said: bool
    ) -> None:
        trace = tmp_path / "trace.jsonl"
        trace.write_text('{"kvlab_trace": 1}\n{"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 4}\n')
        traffic = "workload=recorded", f"workload.path={trace}"
        plan = planning.plan_run(composed("model=qwen3_tiny", "executor=cpu", *traffic, *settings.split()))
        assert (planning.asked_note(plan) is not None) is is_said

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
        monkeypatch.setattr(planning, "available_memory", lambda device: available)
        return planning.plan_run(composed(*(overrides or self.CONFIG)))

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


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("attention.prefer=[concat]",),
        ("attention.prefer=[triton,online_softmax]",),  # the first that works here
        ("executor.kernels=false",),
        ("executor.dtype=float16", "attention.prefer=[cpu]"),  # which does not compute it
        ("executor.tensor_parallel=2", "executor.threads=1"),
    ],
)
def test_settings_of_a_plan_are_those_of_a_run(overrides: tuple[str, ...]) -> None:
    overrides = ("model=qwen3_tiny", "executor=cpu", *overrides)
    plan, run = planned(*overrides), planning.plan_run(composed(*overrides))
    assert run.computed_by.attention.name == plan.settings.attention
    assert run.working == plan.working
    assert run.weights == plan.weights


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ((), "triton"),
        (("attention.prefer=[sdpa]",), "sdpa"),
        (("attention.prefer=[cpu]",), "triton"),  # which runs on a CPU
        (("kv.dtype=int8",), "sdpa"),
    ],
)
def test_a_plan_for_a_gpu_needs_none(overrides: tuple[str, ...], backend: str) -> None:
    assert planned("model=qwen3_tiny", *overrides, device="cuda").settings.attention == backend


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=qwen3_8b", "hardware=h100_sxm"),
        ("model=llama3_1_70b", "hardware=h100_sxm", "executor.tensor_parallel=4", "executor.weights=fp8"),
        ("model=gemma3_27b", "hardware=h200_sxm", "model.max_seq_len=8192"),
    ],
)
def test_capacity_and_a_simulated_run_have_one_answer(overrides: tuple[str, ...]) -> None:
    overrides = ("executor=simulated", *overrides)
    plan, run = planned(*overrides, memory=None), planning.plan_run(composed(*overrides))
    assert plan.paged == run.pool
    assert (plan.weights, plan.working, plan.memory) == (run.weights, run.working, run.memory)
