"""The defaults of serving frameworks by the memory of a device."""

from __future__ import annotations

import pytest

from kvlab.config.server_defaults import server_defaults


@pytest.mark.parametrize(
    ("framework", "device", "gib", "tokens", "sequences", "block"),
    [
        ("vllm", "b200_sxm", 180, 16_384, 1_024, 16),
        ("vllm", "any", 160, 16_384, 1_024, 16),
        ("vllm", "h100_sxm", 79.6, 8_192, 1_024, 16),
        ("vllm", "any", 70, 8_192, 1_024, 16),
        ("vllm", "a100_sxm", 79.6, 2_048, 256, 16),
        ("vllm", "any", 69.9, 2_048, 256, 16),
        ("vllm_synchronous", "l4", 22, 2_048, 256, 16),
        ("sglang", "l4", 22, 2_048, 2_048, 16),
        ("sglang", "a100_40g", 39, 4_096, 2_048, 16),
        ("sglang", "h200", 140, 8_192, 2_048, 16),
        ("sglang", "b200", 180, 16_384, 2_048, 16),
        ("trtllm", "l4", 22, 8_192, 2_048, 32),
    ],
)
def test_by_memory(framework: str, device: str, gib: float, tokens: int, sequences: int, block: int) -> None:
    found = server_defaults(framework, device, f"{gib}GiB")
    assert found is not None
    assert (found.max_batched_tokens, found.max_batch_size, found.block_size) == (tokens, sequences, block)


@pytest.mark.parametrize("framework", ["kvlab", "mine"])
def test_others_keep_kvlabs_own(framework: str) -> None:
    assert server_defaults(framework, "h100_sxm", "80GiB") is None


@pytest.mark.parametrize(
    ("framework", "version", "share"),
    [
        ("vllm", None, 0.92),
        ("vllm", "0.21.0", 0.92),
        ("vllm", "0.20.1", 0.9),
        ("vllm_synchronous", None, 0.9),  # 0.12
        ("sglang", None, 0.9),
        ("trtllm", "1.2.0", 0.9),
    ],
)
def test_vllm_takes_more_memory_since_it_counts_graphs(framework: str, version: str | None, share: float) -> None:
    found = server_defaults(framework, "h100_sxm", "80GiB", version)
    assert found is not None
    assert found.memory_utilization == share
