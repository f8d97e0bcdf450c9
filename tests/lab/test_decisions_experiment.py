"""The comparison with vLLM's scheduler, as far as it needs no vLLM."""

from __future__ import annotations

from copy import deepcopy

from experiments.decisions import compare, table
from experiments.decisions_vs_sglang import run as beside_sglang
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
    assert f"kind: kvlab {steps[2]['kind']}, SGLang none" in beside_sglang.in_words(2, steps, other)
