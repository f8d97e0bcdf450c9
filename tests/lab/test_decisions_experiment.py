"""The comparisons with other engines' schedulers, as far as they need none of these."""

from __future__ import annotations

from copy import deepcopy

import pytest

from experiments.decisions import compare, in_words, table
from experiments.decisions_vs_sglang import run as beside_sglang
from experiments.decisions_vs_tensorrt_llm import run as beside_tensorrt_llm
from experiments.decisions_vs_tensorrt_llm.block_manager import KVCacheManager
from experiments.decisions_vs_tensorrt_llm.tensorrt_llm_scheduler import Request as TrtRequest
from experiments.decisions_vs_tensorrt_llm.tensorrt_llm_scheduler import State
from experiments.decisions_vs_vllm.run import WORKLOADS, ours


def test_what_differs_is_found_and_told() -> None:
    trace, steps = ours([*WORKLOADS["burst, little memory"], "workload.num_requests=12", "kv.num_blocks=60"])
    assert trace["num_blocks"] == 60
    lengths = {each["id"]: len(each["output"]) for each in trace["requests"]}
    assert sum(len(step["admitted"]) for step in steps) == len(lengths) == 12
    assert sum(len(step["preempted"]) for step in steps) == sum(len(step["resumed"]) for step in steps) > 0
    assert all(sum(step["tokens"].values()) <= trace["max_num_batched_tokens"] for step in steps)
    same = compare(steps, deepcopy(steps))
    assert same["differ"] == 0
    chunked = next(number for number, step in enumerate(steps) if step["partial"])
    other = deepcopy(steps)
    other[chunked]["evicted"] += 3
    other[-1]["preempted"].append("r1")
    found = compare(steps, other)
    assert (found["differ"], found["chunks"], found["by_field"]["evicted"]) == (2, 1, 1)
    total = sum(step["evicted"] for step in steps)
    assert f"| {total:,} / {total + 3:,} | 2, with a prompt in chunks 1 | preempted 1, evicted 1 |" in table(
        {"x": found}
    )


def test_requests_for_more_than_they_produce_end_by_a_stop_token() -> None:
    small = ["workload.num_requests=6", "workload.output_len={min: 5, max: 9}"]
    workload = beside_sglang.WORKLOADS["asked for 512, little memory"]
    trace, steps = beside_sglang.ours(workload._replace(overrides=[*workload.overrides, *small]))
    assert (trace["num_tokens"], trace["page_size"]) == (150 * 16, 1)
    assert {(each["max_tokens"], each["ignore_eos"]) for each in trace["requests"]} == {(512, False)}
    assert all(5 <= len(each["output"]) <= 9 for each in trace["requests"])
    assert all(each["output"][-1] in each["stop"] for each in trace["requests"])
    other = deepcopy(steps)
    other[2]["kind"] = "none"
    told = in_words(2, steps, other, "SGLang", beside_sglang.FIELDS)
    assert f"kind: kvlab {steps[2]['kind']}, SGLang none" in told


class TestReadingOfBlocks:
    """What TensorRT-LLM's block manager answers, as read from its source: blocks of four tokens."""

    @staticmethod
    def manager(blocks: int = 8, *, reuse: bool = True, partial: bool = False) -> KVCacheManager:
        return KVCacheManager(blocks, 4, 64, reuse=reuse, partial=partial)

    @staticmethod
    def request(number: int, prompt: list[int], most: int = 4) -> TrtRequest:
        job = {"id": f"r{number}", "prompt": prompt, "output": [90 + number] * most, "max_tokens": most}
        return TrtRequest(number, job | {"ignore_eos": True, "stop": []})

    def run(self, manager: KVCacheManager, request: TrtRequest) -> None:
        """Its prompt is computed, then all its tokens."""
        request.context_chunk_size = request.prompt_len
        manager.add_sequence_batch([request])
        request.move_to_next_context_chunk()
        request.state = State.GENERATION_IN_PROGRESS
        manager.store_context_blocks(request)
        while True:
            request.add_token()
            if request.state is State.GENERATION_COMPLETE:
                break
            manager.add_token(request.py_request_id)
        manager.remove_sequence(request)

    def test_counts_all_that_a_request_asks_for_but_what_others_hold(self) -> None:
        manager = self.manager()
        first = self.request(0, list(range(9)), most=4)
        assert manager.get_remaining_blocks_to_completion(first, 64) == 4  # of 13 tokens, the last included
        first.context_chunk_size = 9
        manager.add_sequence_batch([first])
        assert manager.get_remaining_blocks_to_completion(first, 64) == 1
        first.move_to_next_context_chunk()
        manager.store_context_blocks(first)
        second = self.request(1, [*range(8), 50])
        assert manager.analyze_prefix_reuse(second.tokens, second) == (None, 2, 2)
        assert manager.get_remaining_blocks_to_completion(second, 64) == 2
        assert second.estimated_reusable_tokens == 8
        first.tokens.append(9)
        manager.remove_sequence(first)
        assert manager.get_remaining_blocks_to_completion(second, 64) == 4  # nobody holds them: they are free ones
        assert second.estimated_reusable_tokens == 8

    def test_takes_free_blocks_in_the_order_in_which_they_were_given_back(self) -> None:
        manager = self.manager(4)
        self.run(manager, self.request(0, [1, 2, 3, 4, 5, 6, 7, 8]))  # and four tokens, of which one is not stored
        assert manager.analyze_prefix_reuse([*range(1, 9), 0], None) == (None, 2, 0)
        self.run(manager, self.request(1, [11, 12, 13, 14], most=1))  # the block that had none
        self.run(manager, self.request(2, [21, 22, 23, 24], most=1))  # the last of the first's, of a part
        assert (manager.evicted, manager.analyze_prefix_reuse(list(range(1, 9)), None)) == (0, (None, 2, 0))
        self.run(manager, self.request(3, [31, 32, 33, 34], most=1))
        assert manager.evicted == 1
        assert manager.analyze_prefix_reuse(list(range(1, 9)), None) == (tuple(range(1, 9)), 1, 0)

    @pytest.mark.parametrize(("partial", "hits"), [(False, 4), (True, 6)])
    def test_finds_parts_of_blocks_where_it_may(self, partial: bool, hits: int) -> None:
        manager = self.manager(partial=partial)
        self.run(manager, self.request(0, [1, 2, 3, 4, 5, 6, 7, 8]))
        later = self.request(1, [1, 2, 3, 4, 5, 6, 70, 80, 90])
        manager.add_sequence_batch([later])
        assert later.prepopulated_prompt_len == hits

    def test_a_step_ahead_takes_a_prompt_whole(self) -> None:
        manager = self.manager()
        first = self.request(0, list(range(9)), most=4)
        assert manager.get_needed_blocks_one_step(first, False, 64) == 3
        manager.add_sequence_batch([first])
        first.move_to_next_context_chunk()
        first.state = State.GENERATION_IN_PROGRESS
        needed = []
        for _ in range(4):
            needed.append(manager.get_needed_blocks_one_step(first, False, 64))
            first.add_token()
            manager.add_token(0)
        assert needed == [0, 0, 0, 1]
        manager.start_scheduling()
        assert (manager.scheduling_free, len(manager.free)) == (4, 4)
        manager.scheduling_remove_sequence(0)
        assert (manager.scheduling_free, len(manager.free)) == (8, 4)


@pytest.mark.parametrize("name", ["shared prefixes, a burst", "MAX_UTILIZATION: burst, little memory"])
def test_tensorrt_llms_trace_says_what_is_compared(name: str) -> None:
    workload = beside_tensorrt_llm.WORKLOADS[name]
    trace, steps = beside_tensorrt_llm.ours(
        workload._replace(overrides=[*workload.overrides, "workload.num_requests=12"])
    )
    assert (trace["block_size"], trace["num_blocks"]) == (32, workload.blocks)
    assert trace["policy"] == ("MAX_UTILIZATION" if "MAX" in name else "GUARANTEED_NO_EVICT")
    assert sum(len(step["admitted"]) for step in steps) == len(trace["requests"]) == 12
