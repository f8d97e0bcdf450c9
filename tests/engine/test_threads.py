"""Threads: what a process may use of a machine, told by files that the tests write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvlab.engine import threads
from kvlab.engine.threads import Cores, explain_threads, resolve_threads, usable_cores
from kvlab.errors import ConfigError


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two hardware threads each, of which the process may use those of the first three."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6}, raising=False)
    for cpu in range(8):
        siblings = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(siblings, f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


def test_hardware_threads_of_one_core_count_once(system: Path) -> None:
    assert usable_cores(system) == Cores(physical=3, logical=6)


def test_without_a_topology_every_hardware_thread_is_a_core(system: Path) -> None:
    assert usable_cores(system / "nowhere") == Cores(physical=6, logical=6)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", Cores(3, 6)),
        ("200000 100000", Cores(2, 2)),
        ("220000 100000", Cores(2, 3)),
        ("250000 100000", Cores(3, 3)),
        ("50000 100000", Cores(1, 1)),
        ("900000 100000", Cores(3, 6)),
    ],
)
def test_a_container_limits_the_cores(system: Path, limit: str, cores: Cores) -> None:
    write(system / "proc/self/cgroup", "0::/user/job")
    write(system / "sys/fs/cgroup/user/cpu.max", limit)
    write(system / "sys/fs/cgroup/user/job/cpu.max", "max 100000")
    assert usable_cores(system) == cores


def test_the_older_control_groups_limit_them_too(system: Path) -> None:
    write(system / "proc/self/cgroup", "4:cpu,cpuacct:/job")
    write(system / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000")
    write(system / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(system) == Cores(2, 2)
    write(system / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert usable_cores(system) == Cores(3, 6)


def test_so_does_a_group_within_one_that_may_use_more(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:memory:/elsewhere\n4:cpu,cpuacct:/user/job")
    for group, quota in (("user", "250000"), ("user/job", "100000"), ("elsewhere", "1000")):
        write(system / f"sys/fs/cgroup/cpu/{group}/cpu.cfs_quota_us", quota)
        write(system / f"sys/fs/cgroup/cpu/{group}/cpu.cfs_period_us", "100000")
    assert usable_cores(system) == Cores(1, 1)


@pytest.mark.parametrize(
    ("setting", "threads", "quota", "why"),
    [
        (2, 2, "max", "executor.threads"),
        (None, 2, "max", "as PyTorch is set to: OMP_NUM_THREADS"),
        (None, 3, "max", "6 of 8 cores allowed"),
        (None, 2, "200000", "a quota of 2 of 3 cores"),
        (None, 3, "270000", "6 of 8 cores allowed"),
    ],
)
def test_a_run_can_say_why_it_has_its_threads(
    system: Path, monkeypatch: pytest.MonkeyPatch, setting: int | None, threads: int, quota: str, why: str
) -> None:
    write(system / "proc/self/cgroup", "0::/")
    write(system / "sys/fs/cgroup/cpu.max", f"{quota} 100000")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert explain_threads(setting, threads, system) == why


def test_one_thread_for_each_core_of_the_machine_needs_no_reason(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert explain_threads(None, 3, system) == ""


@pytest.mark.parametrize(("setting", "before", "expected"), [(None, 8, 3), (None, 2, 2), (6, 1, 6), (1, 8, 1)])
def test_unless_configured_otherwise_a_core_has_one_thread(
    monkeypatch: pytest.MonkeyPatch, setting: int | None, before: int, expected: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(3, 6))
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    assert resolve_threads(setting) == expected


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(3, 6))
    with pytest.raises(ConfigError) as caught:
        resolve_threads(7)
    assert str(caught.value).startswith("executor.threads=7: is more than the 6 cores")
    assert "executor.threads=3" in str(caught.value)
