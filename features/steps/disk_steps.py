"""Engines whose blocks go to a directory, links of simulated devices, and sequences that are swapped out."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.offload_steps import Tiered
from kvlab.config import PreemptionConfig
from kvlab.core import Request, RequestRecord, SamplingParams, Sequence
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import ConfigError
from tests.support.disks import engine_for, outputs
from tests.support.engines import make_engine, request, run
from tests.support.model import expected_tokens
from tests.support.plans import composed

Answers = tuple[list[tuple[int, ...]], list[int]]  # of each prompt, and how many of its tokens were found


@dataclass
class Disk:
    """A directory, the engine that uses it, and what each of the engines answered."""

    directory: Path
    engine: EngineCore
    answers: list[Answers] = field(default_factory=list)
    refusal: str = ""


@given("an engine whose blocks go to a directory", target_fixture="disk")
def with_a_directory(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv", engine_for(tmp_path / "kv"))


@given("the disk is full")
def is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.open(path, flags)

    monkeypatch.setattr("kvlab.kv.tiers.disk._open", fail)


@when("it answers 3 prompts that its pool has room for one of")
@when("it answers them again")
def answers(disk: Disk) -> None:
    disk.answers.append(outputs(disk.engine, close=False))


@when("a byte of each file is changed")
def damaged(disk: Disk) -> None:
    disk.engine.close()
    files = list(disk.directory.rglob("*.kv"))
    assert files
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[number % len(data)] ^= 1
        file.write_bytes(data)


@when("an engine of the next process answers the same")
def next_answers(disk: Disk) -> None:
    disk.engine.close()
    disk.answers.append(outputs(engine_for(disk.directory)))


@when(parsers.parse("an engine with {settings} opens it"))
def opens(disk: Disk, settings: str) -> None:
    if settings != "while the first runs":
        disk.engine.close()
    with pytest.raises(ConfigError) as caught:
        engine_for(disk.directory, *([settings] if "=" in settings else []))
    disk.refusal = str(caught.value).replace(str(disk.directory), "DIR")


@then(parsers.parse('that is refused, saying "{sentence}"'))
def disk_is_refused(disk: Disk, sentence: str) -> None:
    assert sentence in disk.refusal


@then("both gave the same answers")
def answers_are_the_same(disk: Disk) -> None:
    (first, _), (second, _) = disk.answers
    assert first == second


@then(parsers.parse("the next found {count:d} tokens of the first prompt"))
def next_found(disk: Disk, count: int) -> None:
    assert disk.answers[1][1][0] == count


@then("the damage was told once")
def damage_told(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert message.endswith(".kv is not whole and was removed; such blocks are computed again")


@then("it was told once that no more blocks are written")
def fullness_told(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    (message,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    reason = "No space left on device; no more blocks are written to it; those that it has are read on"
    assert message == f"kv.offload_dir={disk.directory}: {reason}"


@dataclass
class Loaded:
    """After how many ms a prompt's first token came: computed, in the pool, and in host memory."""

    computed: float
    in_pool: float
    loaded: float


@when(
    parsers.parse("Llama 3.1 8B on an H100 loads it over hardware.host_link_gb_s={link:g}"), target_fixture="timed"
)
def loads_over(link: float) -> Loaded:
    device = ("executor=simulated", "model=llama3_1_8b", "hardware=h100_sxm", "model.max_seq_len=8256")
    settings = (*device, "workload=burst16", "scheduler.max_batched_tokens=8192", "kv.offload=4GiB")
    config = composed(*settings, "kv.num_blocks=514", f"hardware.host_link_gb_s={link}")
    engine, times = build_engine(plan_engine(config)), []
    for number, start in enumerate((0, 0, 10_000, 0)):
        ended: list[RequestRecord] = []
        prompt, arrival_s = tuple(range(start, start + 8192)), engine.clock.now()
        engine.submit(
            Request(str(number), prompt, SamplingParams(1, ignore_eos=True), arrival_s), None, ended.append
        )
        while engine.has_work():
            if engine.step() is None and (wakeup_s := engine.next_wakeup()) is not None:
                engine.clock.wait_until(wakeup_s)
        times.append(ended[0].ttft_ms or 0.0)
    return Loaded(times[0], times[1], times[3])


@then(parsers.parse("its first token comes {when} than if it is computed"))
def comes(timed: Loaded, when: str) -> None:
    assert (timed.loaded < timed.computed) == (when == "sooner")


@then(parsers.parse("it waits {ms:g} ms for the 510 of its 512 blocks that had left the pool"))
def waits(timed: Loaded, ms: float) -> None:
    assert timed.loaded - timed.in_pool == pytest.approx(ms, abs=0.1)


@when(parsers.parse("6 sequences outgrow it with scheduler.preemption.mode={mode}"), target_fixture="outgrown")
def outgrow(tiered: Tiered, mode: str) -> list[Sequence]:
    pool, preemption = tiered.engine.pool, PreemptionConfig(mode=mode)
    engine = make_engine(pool, admission_reserve=0.0, preemption=preemption)  # type: ignore[arg-type]
    return run(engine, *(request(f"r{number}", 9 + number, 26) for number in range(6)))


@then("each is answered as if it were alone")
def as_if_alone(outgrown: list[Sequence]) -> None:
    assert sum(sequence.preemptions for sequence in outgrown)
    for sequence in outgrown:
        assert sequence.output_token_ids == expected_tokens(sequence.request)


@then(parsers.parse("tokens are computed again: {again}"))
def computed_again(outgrown: list[Sequence], again: str) -> None:
    assert (sum(sequence.recomputed_tokens for sequence in outgrown) > 0) == (again == "yes")
