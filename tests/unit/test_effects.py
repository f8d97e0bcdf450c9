"""What was set and nothing reads is named, once and for what a user gave alone."""

import pytest

from kvlab.cli.compose import compose_run
from kvlab.config.effects import without_effect
from kvlab.simulation.timings.base import unread_tiers


def said(*words: str) -> str:
    return "\n".join(without_effect(compose_run(words).config))


SERVER = ("engine=openai", "engine.url=http://localhost:8000")
LINES = ("workload=jsonl", "workload.path=requests.jsonl")
TRACE = ("workload=azure", "workload.path=trace.csv")
VLLM_0_32 = ("executor=simulated", "hardware=h100_sxm", "framework.version='0.32'")
SIMULATED = ("executor=simulated", "hardware=h100_sxm")


@pytest.mark.parametrize(
    ("setting", "by", "others"),
    [
        ("workload.num_requests=100", "synthetic workloads and chat; of a trace", TRACE),
        ("workload.turns=2", "synthetic workloads", TRACE),
        ("workload.rate=2.0", "workload.arrival=poisson", LINES),
        ("workload.num_groups=3", "workload.group_len of 1 or more", ()),
        ("workload.output_len.median=50.0", "workload.output_len.distribution=lognormal", ()),
        ("workload.priorities=3", "scheduler.order=priority", ()),
        ("workload.temperature=0.5", "executors that compute", SIMULATED),
        ("kv.pinned_share=0.3", "workload.pin_prefix=true", ()),
        ("kv.quota=0.3", "workload.salt_groups=true", ()),
        ("scheduler.prefill_wait_tokens=64", "scheduler.prefill_wait_steps", ()),
        ("scheduler.speculation.prompt_lookup_max=8", "scheduler.speculation.method=ngram", ()),
        ("attention.prefer=['sdpa']", "attention.backend=auto", ("attention=concat",)),
        ("debug.faults.seed=3", "debug.faults.rate of more than 0", ()),
        ("tracking.experiment=mine", "tracking=mlflow", ("tracking=off",)),
        ("engine.max_in_flight=4", "engine=openai", ()),
        ("engine.python=python", "engines in a process", SERVER),
        ("kv.num_blocks=64", "engines that a run starts", SERVER),
        ("scheduler.watermark=0.1", "engine=kvlab", ("engine=vllm",)),
        ("executor.device=cpu", "executors that compute", SIMULATED),
        ("model.weights=elsewhere", "executors that compute", SIMULATED),
        ("model.tokenizer=fetched:smollm2", "executors that compute, and workloads of words", SIMULATED),
        ("framework.flashinfer_sampler=True", "simulated devices of NVIDIA with a vLLM before 0.28", VLLM_0_32),
        (
            "framework.flashinfer_sampler=True",
            "simulated devices of NVIDIA",
            ("executor=simulated", "hardware=mi300x"),
        ),
        ("framework.cuda_graphs=False", "simulated devices", ()),
        ("framework.eager_layer_us=300.0", "simulated devices", ("framework.cuda_graphs=false",)),
        ("framework.eager_layer_us=300.0", "framework.cuda_graphs=false", SIMULATED),
    ],
)
def test_a_setting_that_nothing_reads_is_named(setting: str, by: str, others: tuple[str, ...]) -> None:
    assert f"{setting} has no effect here: it is read by {by}" in said(*others, setting)


@pytest.mark.parametrize(
    "words",
    [
        (*SIMULATED, "kv.num_blocks=64"),
        (*SIMULATED, "framework=sglang"),
        (*SIMULATED, "framework.cuda_graphs=false", "framework.eager_layer_us=300"),
        (*SIMULATED, "workload=chat"),
        (*SIMULATED, "workload=parallel_sampling"),
        (*SIMULATED, "model=smollm2_135m"),  # whose file has both a path and weights
        (*SIMULATED, "workload=chat", "model.weights=elsewhere"),  # whose tokenizer reads them
        (*SIMULATED, "engine=vllm", "executor.threads=2", "executor.device=cpu", "model.weights=elsewhere"),
        (*SIMULATED, *LINES, "workload.temperature=0.5"),  # of lines with an n of their own
        (*SIMULATED, "engine=vllm"),
        (*SIMULATED, *SERVER),
        ("engine=transformers_static", "scheduler=static"),
        ("hardware=h100_sxm", "executor=cpu"),
        (*SIMULATED, "executor.memory_utilization=0.99", "kv.memory=4GiB"),  # it limits what may be given
        (*LINES, "kv.quota=0.3", "kv.pinned_share=0.3"),
        ("workload=recorded", "workload.path=trace.jsonl"),
        (*SERVER, "engine.timeout_s=5", "workload.priorities=2"),
        ("engine=vllm", "kv.memory=1GiB", "scheduler.max_batch_size=8", "executor=cpu"),
    ],
)
def test_what_is_read_or_comes_from_a_file_is_not_named(words: tuple[str, ...]) -> None:
    assert said(*words) == ""


def test_a_key_that_has_no_effect_is_not_shown() -> None:
    assert "engine.api_key=*** has no effect" in said("engine.api_key=abcdefgh")


WAYS = ("hardware.host_link_gb_s=3.0", "hardware.disk_us=7.0")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("hardware=h100_sxm", *WAYS), ["host_link_gb_s=3 ... kv.offload", "disk_us=7 ... kv.offload_disk"]),
        (("hardware=h100_sxm", *WAYS, "kv.offload=1GiB"), ["disk_us=7 ... kv.offload_disk"]),
        (("hardware=h100_sxm", *WAYS, "kv.offload_disk=1GiB"), ["host_link_gb_s=3 ... kv.offload"]),
        (("hardware=l40s",), []),  # whose file says how fast its links are
        (("hardware=here", "executor.timing=roofline"), []),  # whose links are measured
        (("hardware=h100_sxm", "hardware.name=mine", *WAYS), []),  # of a file that may be anywhere
    ],
)
def test_ways_to_tiers_are_named_where_there_is_no_tier(words: tuple[str, ...], named: list[str]) -> None:
    config = compose_run(("executor=simulated", *words)).config
    assert config.hardware is not None
    expected = [f"hardware.{text}".replace("...", "has no effect here: it is read by") for text in named]
    assert unread_tiers(config.kv, config.hardware) == expected
