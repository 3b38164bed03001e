"""What the terminal shows, and where the rest goes."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsimg.console import Chatter, Terminal, busy_text, bytes_text, count_text, duration_text, ms_text
from tests.conftest import ROOT


def test_only_rank_zero_speaks() -> None:
    stream = io.StringIO()
    for rank in (0, 1):
        terminal = Terminal(rank=rank, stream=stream)
        terminal.say(f"hello from {rank} [bold]as it is[/bold]")
        terminal.table("plan", [("data", "a [b] c")])
        terminal.grid(("class",), [("ant",)])
    assert stream.getvalue().splitlines() == [
        "hello from 0 [bold]as it is[/bold]",
        "plan",
        "  data             a [b] c",
        " class ",
        " ant   ",
    ]


def test_without_a_terminal_progress_is_rare_plain_lines() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream=stream)
    terminal._last_plain = float("-inf")
    for step in range(5):
        terminal.progress(f"step {step}")
    terminal.progress("step 5", last=True)
    assert stream.getvalue().splitlines() == ["step 0", "step 5"]


def test_chatter_goes_to_the_log_and_not_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chatter = Chatter()
    early = chatter.path
    os.write(1, b"from C, before there is a run\n")
    chatter.move_to(tmp_path / "logs" / "rank_0.log")
    os.write(2, b"from C, in the run\n")
    print("for the user", file=chatter.stream)
    chatter.stop()
    print("after")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "from C, before there is a run\nfrom C, in the run\n"
    assert not early.exists()
    assert capfd.readouterr() == ("for the user\nafter\n", "")


def test_a_log_without_a_run_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    chatter = Chatter()
    os.write(2, b"noise\n")
    chatter.stop()
    assert not chatter.path.exists()
    assert capfd.readouterr() == ("", "")


def test_numbers_are_written_for_people() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5120.0 GiB",
    ]
    assert [count_text(n) for n in (7, 999, 1234, 269_722, 25_557_032, 4_111_514_624)] == [
        "7",
        "999",
        "1.23 k",
        "0.27 M",
        "25.56 M",
        "4.11 G",
    ]
    assert [ms_text(s) for s in (5.12e-5, 0.00472, 0.0125, 0.9994, 0.9996, 1.2345, 12.5)] == [
        "0.0512 ms",
        "4.72 ms",
        "12.5 ms",
        "999 ms",
        "1,000 ms",
        "1,234 ms",
        "12,500 ms",
    ]
    assert [duration_text(s) for s in (5, 65, 7384)] == ["0:05", "1:05", "2:03:04"]


def test_other_work_is_said_where_it_shows() -> None:
    assert [busy_text(waited) for waited in (None, 0.98, 1.1)] == [None] * 3
    assert busy_text(1.25) == ("other work had the core for 20% of the time: trust the ratios, not the milliseconds.")


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    code = "from dsimg.console import Terminal\nt = Terminal()\nfor n in range(20000): t.say('line')\nopen('end', 'w')"
    words = f'{sys.executable} -c "{code}" | head -1'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(["bash", "-c", words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout == "line\n"
    assert (tmp_path / "end").exists()


def test_a_command_without_standard_streams_runs(tmp_path: Path) -> None:
    code = (
        "from dsimg import cli\nfrom tests.dsimg.test_cli import ToyConfig\nimport pathlib\n"
        "def toy(config: ToyConfig) -> None: pathlib.Path('end').touch()\n"
        "cli.run(toy, [])"
    )
    (tmp_path / "toy.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = f"{sys.executable} toy.py >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], cwd=tmp_path, env=environment, check=False).returncode == 0
    assert (tmp_path / "end").exists()
