"""dsimg.processor: how many cores there are to use."""

import os
from pathlib import Path

import pytest

from dsimg import processor
from dsimg.processor import all_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(processor, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(processor, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_control_groups_there_are_those_that_the_process_may_run_on(groups: Path) -> None:
    assert all_cores() == 16


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 16), ("200000 100000", 2), ("250000 100000", 3), ("50000 100000", 1), ("3200000 100000", 16)],
)
def test_a_containers_share_of_the_time_counts_in_version_2(groups: Path, limit: str, cores: int) -> None:
    write(groups / "own", "0::/")
    write(groups / "cgroup" / "cpu.max", limit)
    assert all_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 16), (400_000, 4)])
def test_a_containers_share_of_the_time_counts_in_version_1(groups: Path, quota: int, cores: int) -> None:
    write(groups / "own", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/system.slice")
    write(groups / "cgroup" / "cpu" / "cpu.cfs_quota_us", str(quota))  # the container's path is not there inside
    write(groups / "cgroup" / "cpu" / "cpu.cfs_period_us", "100000")
    assert all_cores() == cores


def test_the_narrowest_group_around_the_process_counts(groups: Path) -> None:
    write(groups / "own", "0::/system.slice/dsimg.service")
    write(groups / "cgroup" / "system.slice" / "cpu.max", "300000 100000")
    write(groups / "cgroup" / "system.slice" / "dsimg.service" / "cpu.max", "800000 100000")
    write(groups / "cgroup" / "system.slice" / "other.service" / "cpu.max", "100000 100000")
    assert all_cores() == 3
