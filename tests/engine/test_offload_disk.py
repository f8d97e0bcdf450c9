"""Content on disk: what features/swap_and_disk.feature leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.errors import CapacityError, ConfigError, KvlabError
from kvlab.kv.tiers.host import HostStore
from tests.support.disks import PROMPTS, engine_for, outputs
from tests.support.plans import composed


def test_what_leaves_host_memory_goes_to_the_disk(tmp_path: Path) -> None:
    computed, found = outputs(engine_for(tmp_path / "kv", "kv.offload=64KiB"))
    assert found == [0, 0, 0]
    again, found = outputs(engine_for(tmp_path / "kv", "kv.offload=64KiB"))
    assert again == computed
    assert found[0] == 96


def test_damaged_files_of_any_length_are_misses(tmp_path: Path) -> None:
    computed, _ = outputs(engine_for(tmp_path / "kv"))
    for number, file in enumerate(sorted((tmp_path / "kv").rglob("*.kv"))):
        file.write_bytes((file.read_bytes()[:-1], b"")[number % 2])
    engine = engine_for(tmp_path / "kv")
    assert outputs(engine) == (computed, [0, 0, 0])
    assert engine.pool.counters().failed_pages > 0


@pytest.mark.parametrize("override", ["seed=1", "executor.dtype=bfloat16", "model.name=mine"])
def test_another_models_directory_is_refused(tmp_path: Path, override: str) -> None:
    engine_for(tmp_path / "kv").close()
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=r"holds blocks of model=qwen3_tiny.*, and this engine has") as caught:
        engine_for(tmp_path / "kv", override)
    named = {"seed": "weights", "model.name": "model"}.get(key, key)
    assert f"{named}={value}" in str(caught.value) or key == "seed"
    engine_for(tmp_path / "kv").close()  # the directory is free again


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["kv.offload_disk=1KiB"],
            "kv.offload_disk=1KiB: holds no block: 16 tokens take 16.0 KiB; 16KiB would hold",
        ),
        (
            ["kv.offload_disk=null"],
            "kv.offload_dir=DIR: is for the blocks of kv.offload_disk, which is null; set how much room they have, "
            "as 64GiB",
        ),
        (["kv.offload_disk=much"], "kv.offload_disk=much: is not a size; write for example 512MiB, 4GiB or 2GB"),
        (
            ["kv.prefix_sharing=false"],
            "kv.offload_disk=16MiB: is for cached blocks, and kv.prefix_sharing=false keeps none; set it to true",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(KvlabError) as caught:
        engine_for(tmp_path, *overrides)
    assert str(caught.value).replace(str(tmp_path), "DIR").startswith(sentence)


def test_an_engine_that_has_no_memory_leaves_the_directory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(pages: int, page_bytes: int) -> HostStore:
        raise CapacityError("no memory")

    monkeypatch.setattr("kvlab.kv.tiers.settings.HostStore", no_memory)
    with pytest.raises(CapacityError, match="no memory"):
        engine_for(tmp_path / "kv", "kv.offload=1MiB")
    engine_for(tmp_path / "kv").close()


def test_a_simulated_disk_needs_no_directory_and_takes_its_time() -> None:
    simulated = (
        "executor=simulated",
        "model=qwen3_8b",
        "workload=burst16",
        "kv.num_blocks=8",
        "kv.offload_disk=1GiB",
    )
    times = []
    for rate in (0.1, 10.0):
        settings = [*simulated, "workload=burst16", "hardware=h100_sxm", f"hardware.disk_read_gb_s={rate}"]
        engine = build_engine(plan_engine(composed(*settings)))
        records: list[RequestRecord] = []
        for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
            asked = Request(f"{number}", prompt, SamplingParams(1, ignore_eos=True), engine.clock.now())
            engine.submit(asked, None, records.append)
            while engine.has_work():
                if engine.step() is None and (wakeup := engine.next_wakeup()) is not None:
                    engine.clock.wait_until(wakeup)
        assert records[-1].cached_tokens == 96
        times.append(records[-1].ttft_ms or 0.0)
    page_bytes = 16 * 147_456
    assert times[0] - times[1] == pytest.approx(1000 * 6 * page_bytes * (1 / 0.1e9 - 1 / 10e9))
    with pytest.raises(
        ConfigError, match=r"hardware\.disk_read_gb_s=0\.0: kv\.offload_disk=1GiB copies blocks with"
    ):
        plan_engine(composed(*simulated, "hardware=h100_sxm", "hardware.disk_read_gb_s=0"))
