"""Commands: shown as they would be typed, run with this Python, and asked to stop together with their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsimg.errors import StopRequested
from dsimg_export.commands import Command, run_command

PROGRAM = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signals = []
def note(number, frame):
    signals.append(number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
(folder / "started").touch()
end = time.monotonic() + 20
while not signals and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.3)
(folder / "signals").write_text(repr(signals))
sys.exit(75)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that waits for signals, notes them, and ends with 75."""
    (tmp_path / "waiting").mkdir()
    (tmp_path / "waiting" / "program.py").write_text(PROGRAM)
    (tmp_path / "waiting" / "ends.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.chdir(tmp_path)
    return "waiting.program"


def test_a_command_is_what_a_person_would_type():
    flags = ("--data", "my photos", "--out", "runs/a")
    assert str(Command("quantize", flags)) == "dsimg quantize --data 'my photos' --out runs/a"
    assert Command("quantize", flags).words() == [sys.executable, "-m", "dsimg", "quantize", *flags]
    assert str(Command("dsimg.probe", ())) == "python -m dsimg.probe"
    two = Command("prune", ("--lr", "0.1"), 2)
    assert str(two) == "deepspeed --quiet --num_gpus 2 --module dsimg.prune --lr 0.1"
    words = two.words()
    assert words[:4] == [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port"]
    assert words[5:] == ["--quiet", "--num_gpus", "2", "--module", "dsimg.prune", "--lr", "0.1"]


def test_the_exit_code_is_returned_and_75_is_a_stop(module: str) -> None:
    assert run_command(Command("waiting.ends", ("3",))) == 3
    assert run_command(Command("waiting.ends", ("0",))) == 0
    with pytest.raises(StopRequested, match="the same command goes on from there"):
        run_command(Command("waiting.ends", ("75",)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_command_may_end(
    tmp_path: Path, module: str, number: signal.Signals
) -> None:
    def ask() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    def before(signum: int, frame: object) -> None:
        raise AssertionError("not while a command runs")

    former = signal.signal(number, before)  # not ignored, as SIGINT is in a test that a shell started with &
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(StopRequested):
            run_command(Command(module, (str(tmp_path),)))
        assert signal.getsignal(number) is before
    finally:
        asking.join()
        signal.signal(number, former)
    assert (tmp_path / "signals").read_text() == repr([int(number)])


def test_a_command_ends_when_its_parent_is_killed(tmp_path: Path, module: str) -> None:
    code = f"from dsimg_export.commands import *; run_command(Command({module!r}, ({str(tmp_path)!r},)))"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        parent.kill()
    end = time.monotonic() + 10
    while not (tmp_path / "signals").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert (tmp_path / "signals").read_text() == repr([int(signal.SIGTERM)])
