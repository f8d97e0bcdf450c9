"""kvlab as a package: an engine of settings alone, and what is imported with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvlab
from kvlab.errors import ConfigError, KvlabError
from tests.support.engines import assert_empty


class TestFromConfig:
    MODEL = kvlab.ModelConfig(
        architecture={
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        max_seq_len=64,
    )

    @pytest.mark.parametrize("backend", ["paged", "contiguous"])
    def test_builds_what_the_settings_say(self, backend: str) -> None:
        engine = kvlab.Engine.from_config(
            kvlab.EngineConfig(
                model=self.MODEL,
                kv=kvlab.KVConfig(backend=backend, num_blocks=32, block_size=8),
                executor=kvlab.ExecutorConfig(device="cpu", dtype="float32"),
                scheduler=kvlab.SchedulerConfig(max_batch_size=4, max_batched_tokens=16),
            ),
            detokenize=lambda ids: "".join(chr(40 + token) for token in ids),
        )
        asked = kvlab.Request("a", (1, 2, 3), kvlab.SamplingParams(max_tokens=5))
        outputs = list(engine.generate(asked))
        assert len("".join(output.text for output in outputs)) == len(outputs) == 5
        assert engine.core.pool.is_paged() == (backend == "paged")
        assert engine.core.pool.stats().token_slots == 256
        assert_empty(engine.core)

    def test_names_a_setting_that_cannot_work(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.family=gpt9: unknown"):
            kvlab.Engine.from_config(kvlab.EngineConfig(model=kvlab.ModelConfig(family="gpt9")))
        assert issubclass(ConfigError, KvlabError)


def test_the_package_imports_only_what_is_used() -> None:
    check = (
        "import sys, kvlab\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "kvlab.Engine, kvlab.SamplingParams\n"
        "assert 'torch' not in sys.modules and 'numpy' in sys.modules\n"
        "print([m for m in ('hydra', 'omegaconf', 'mlflow', 'rich', 'psutil', 'pyarrow') if m in sys.modules])\n"
        "assert all(getattr(kvlab, name) for name in kvlab.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_name_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="module 'kvlab' has no attribute 'Motor'"):
        kvlab.Motor  # noqa: B018
