"""dsimg.machine: how many cores there are to use, and what the processor can do."""

import os
from pathlib import Path

import pytest

from dsimg import machine
from dsimg.errors import ConfigError
from dsimg.machine import all_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
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


X86 = (
    "processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu avx2 {}\nprocessor\t: 1\nmodel name\t: Some CPU 9000\n"
)


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DSIMG_INSTRUCTION_SET", raising=False)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("flag", "exact"),
    [("avx512_vnni", True), ("avx_vnni", True), ("amx_int8", True), ("avx512bw", False), ("avx_vnni_int", False)],
)
def test_the_flags_tell_whether_sums_are_exact(cpuinfo: Path, flag: str, exact: bool) -> None:
    cpuinfo.write_text(X86.format(flag))
    assert machine.int8_is_exact() is exact


def test_the_override_counts_more_than_the_processor(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo.write_text(X86.format("avx512_vnni"))
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    assert not machine.int8_is_exact()
    cpuinfo.write_text(X86.format(""))
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    assert machine.int8_is_exact()
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx512")
    with pytest.raises(ConfigError, match=r"DSIMG_INSTRUCTION_SET is 'avx512'; it is one of .*, or not set\."):
        machine.int8_is_exact()


def test_where_the_processor_says_nothing_7_bits_are_right_but_on_arm(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not machine.is_arm()
    assert not machine.int8_is_exact()
    assert machine.processor_name() == "x86_64"
    for name in ("aarch64", "ARM64"):
        monkeypatch.setattr(machine.platform, "machine", lambda name=name: name)
        assert machine.is_arm()
        assert machine.int8_is_exact()


def test_a_processor_is_called_what_it_calls_itself(cpuinfo: Path) -> None:
    cpuinfo.write_text(X86.format(""))
    assert machine.processor_name() == "Some CPU 9000"
    cpuinfo.write_text("processor\t: 0\n")
    assert machine.processor_name() == "x86_64"
