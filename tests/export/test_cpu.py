import pytest

from dsimg.errors import ConfigError
from dsimg_export import cpu

X86 = (
    "processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu avx2 {}\nprocessor\t: 1\nmodel name\t: Some CPU 9000\n"
)


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    monkeypatch.delenv("DSIMG_INSTRUCTION_SET", raising=False)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("flag", "exact"),
    [("avx512_vnni", True), ("avx_vnni", True), ("amx_int8", True), ("avx512bw", False), ("avx_vnni_int", False)],
)
def test_the_flags_tell_whether_sums_are_exact(cpuinfo, flag, exact):
    cpuinfo.write_text(X86.format(flag))
    assert cpu.int8_is_exact() is exact


def test_the_override_counts_more_than_the_processor(cpuinfo, monkeypatch):
    cpuinfo.write_text(X86.format("avx512_vnni"))
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    assert not cpu.int8_is_exact()
    cpuinfo.write_text(X86.format(""))
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    assert cpu.int8_is_exact()
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx512")
    with pytest.raises(ConfigError, match=r"DSIMG_INSTRUCTION_SET is 'avx512'; it is one of .*, or not set\."):
        cpu.int8_is_exact()


def test_where_the_processor_says_nothing_7_bits_are_right_but_on_arm(cpuinfo, monkeypatch):
    assert not cpu.int8_is_exact()
    assert cpu.processor_name() == "x86_64"
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert cpu.int8_is_exact()


def test_a_processor_is_called_what_it_calls_itself(cpuinfo):
    cpuinfo.write_text(X86.format(""))
    assert cpu.processor_name() == "Some CPU 9000"
    cpuinfo.write_text("processor\t: 0\n")
    assert cpu.processor_name() == "x86_64"
