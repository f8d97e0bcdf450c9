"""int8 as a setting: what it takes, what it refuses, and a whole run of it."""

from __future__ import annotations

import pytest

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from tests.lab.test_compose import compose_run

TINY = ("model=qwen3_tiny", "executor=cpu", "kv.memory=1MiB", "model.max_seq_len=256")


class TestCache:
    def test_holds_nearly_twice_the_tokens_in_the_same_bytes(self) -> None:
        half, int8 = (plan_engine(compose_run(*TINY, f"kv.dtype={dtype}")).pool for dtype in ("auto", "int8"))
        assert (half.bytes_per_token, int8.bytes_per_token) == (512, 2 * 2 * 2 * (32 + 4))
        assert half.num_blocks == 2**20 // (512 * 16)
        assert int8.num_blocks == 2**20 // (288 * 16)

    def test_another_dtype_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"kv\.dtype=int4: unknown; known: auto, int8"):
            compose_run("kv.dtype=int4")

    def test_heads_too_small_to_gain_are_refused(self) -> None:
        config = compose_run(*TINY, "kv.dtype=int8", "model.architecture.head_dim=4")
        with pytest.raises(ConfigError, match=r"kv\.dtype=int8: .*heads of 4 numbers take 64 bytes per token"):
            plan_engine(config)

    def test_triton_is_refused_by_name(self) -> None:
        with pytest.raises(Exception, match=r"attention=triton cannot run here: .*(int8|not installed)"):
            plan_engine(compose_run(*TINY, "kv.dtype=int8", "attention=triton"))
