"""Requests to stop: noted once, acted on at once only when nothing is lost or the same signal insists."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import ConfigError
from dsimg.stop import REASONS, StopWatch, check_stop_file, reason_text
from tests.conftest import ROOT

Calls = list[tuple[str, int]]


def until(holds: Callable[[], object]) -> bool:
    """Wait until `holds()` is true; return whether it was within ten seconds."""
    deadline = time.monotonic() + 10
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def watch_into(calls: Calls, **options: Any) -> StopWatch:
    """Start a watch of a training that has begun; `at_once` adds to `calls`."""
    watch = StopWatch(**{"stop_file": None, "max_hours": None, "at_once": lambda *call: calls.append(call), **options})
    watch.nothing_to_save = False
    return watch


def kill_self(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_only_the_same_signal_after_a_second_stops_at_once() -> None:
    calls: Calls = []
    with closing(watch_into(calls)) as watch:
        assert watch.reason is None
        kill_self(signal.SIGTERM)
        assert until(lambda: watch.reason)
        kill_self(signal.SIGTERM)
        time.sleep(1.1)
        kill_self(signal.SIGINT)
        kill_self(signal.SIGUSR1)
        time.sleep(0.1)
        assert calls == []
        kill_self(signal.SIGTERM)
        assert until(lambda: calls)
        assert calls == [("SIGTERM", 143)]
        assert watch.reason == "SIGTERM"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_first_request_stops_at_once_while_there_is_nothing_to_save(name: str) -> None:
    calls: Calls = []
    with closing(watch_into(calls)) as watch:
        watch.nothing_to_save = True
        kill_self(signal.Signals[name])
        assert until(lambda: calls)
        time.sleep(0.1)
        assert calls == [(name, 75)]
        assert watch.reason == name


def test_the_stop_file_asks(tmp_path: Path) -> None:
    calls: Calls = []
    with closing(watch_into(calls, stop_file=tmp_path / "stop")) as watch:
        time.sleep(0.6)
        assert watch.reason is None
        (tmp_path / "stop").touch()
        assert until(lambda: watch.reason)
        assert watch.reason == "stop_file"
    assert calls == []


def test_the_clock_asks() -> None:
    start = time.monotonic()
    with closing(watch_into([], max_hours=0.7 / 3600)) as watch:
        assert until(lambda: watch.reason)
        assert watch.reason == "max_hours"
    assert time.monotonic() - start >= 0.7


def test_closing_gives_the_signals_back() -> None:
    def handler(*_: object) -> None: ...

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        watch = watch_into([])
        assert signal.getsignal(signal.SIGUSR1) is not handler
        watch.close()
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        assert signal.set_wakeup_fd(-1) == -1
        assert "dsimg-stop" not in [thread.name for thread in threading.enumerate()]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_outside_the_main_thread_the_signals_are_left_alone_and_the_rest_works(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    reasons = []

    def work() -> None:
        with closing(watch_into([], stop_file=tmp_path / "stop")) as watch:
            until(lambda: watch.reason)
            reasons.append((watch.reason, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reasons == [("stop_file", signal.getsignal(signal.SIGINT))]


def test_a_stop_file_that_is_there_at_the_start_is_refused(tmp_path: Path) -> None:
    check_stop_file(tmp_path / "stop")
    (tmp_path / "stop").touch()
    with pytest.raises(ConfigError, match=r"the stop file .*stop is there already, .* Remove it to go on\."):
        check_stop_file(tmp_path / "stop")


def test_what_nohup_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with closing(watch_into([])) as watch:
            kill_self(signal.SIGHUP)
            time.sleep(0.1)
            assert watch.reason is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_reasons_are_told_in_the_users_words() -> None:
    texts = [reason_text(reason, stop_file=Path("runs/stop"), max_hours=0.5) for reason in REASONS]
    assert texts == [
        "SIGTERM",
        "SIGINT",
        "SIGUSR1",
        "SIGHUP",
        "the stop file runs/stop",
        "--max_hours 0.5",
        "the end of its launcher",
    ]


# A rank that says its pid, waits, and says why it leaves. `WAIT` is what its main thread is at.
RANK = """
import ctypes, os, signal, sys, time
from dsimg.stop import StopWatch

def leave(reason, code):
    os.write(1, f"{reason} {code}\\n".encode())
    os._exit(code)

watch = StopWatch(stop_file=None, max_hours=None, at_once=leave)
os.write(1, f"{os.getpid()}\\n".encode())
WAIT
"""
SLEEP = "time.sleep(30)"


def python(*words: str, path: Path = ROOT) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    return subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True)


def output_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    with process.stdout:
        yield from process.stdout


def test_a_main_thread_that_is_stuck_in_c_code_delays_nothing() -> None:
    # As in a collective whose peer is gone: no signal interrupts it, and no Python handler runs.
    stuck = """
watch.nothing_to_save = False
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    process = python("-c", RANK.replace("WAIT", stuck))
    lines = output_of(process)
    next(lines)
    time.sleep(0.2)
    process.terminate()
    time.sleep(1.2)
    assert process.poll() is None
    process.terminate()
    assert list(lines) == ["SIGTERM 143\n"]
    assert process.wait() == 143


def test_a_signal_to_a_forked_child_does_not_stop_the_parent() -> None:
    fork = """
told, tell = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    os.write(tell, b"ready")
    time.sleep(30)
else:
    os.read(told, 5)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    time.sleep(0.3)
    os.write(1, f"{status} {watch.reason}\\n".encode())
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(30)
"""
    process = python("-c", RANK.replace("WAIT", fork))
    assert list(output_of(process))[1:] == ["7 None\n", "SIGUSR1 75\n"]
    assert process.wait() == 75


@pytest.fixture
def launchers(tmp_path: Path) -> Path:
    """A folder of stand-ins for the launchers, under their names: each starts its one child and waits for it."""
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    start = "import subprocess, sys\nsubprocess.run([sys.executable, *{words!r}])\n"
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    rank = start.format(words=["-c", RANK.replace("WAIT", SLEEP)])
    (package / "launch.py").write_text(rank)
    (tmp_path / "deepspeed.d").mkdir()
    (tmp_path / "deepspeed.d" / "deepspeed").write_text(
        start.format(words=["-u", "-m", "deepspeed.launcher.launch", "--world_info=None"])
    )
    (tmp_path / "torchrun").write_text(rank)
    (tmp_path / "sweep.py").write_text(rank)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("-u", "-m", "deepspeed.launcher.launch", "--world_info=None"),
        ("{}/deepspeed.d/deepspeed", "train.py"),
        ("{}/torchrun", "-m", "dsimg.train"),
    ],
    ids=["launch.py", "runner", "torchrun"],
)
def test_a_rank_does_not_outlive_its_launcher(words: tuple[str, ...], launchers: Path) -> None:
    process = python(*(word.format(launchers) for word in words), path=launchers)
    lines = output_of(process)
    next(lines)
    process.kill()
    process.wait()
    assert list(lines) == ["launcher 75\n"]


def test_a_parent_that_is_no_launcher_may_end(launchers: Path) -> None:
    process = python(f"{launchers}/sweep.py", "--launcher", "torchrun", path=launchers)
    lines = output_of(process)
    rank = int(next(lines))
    process.kill()
    process.wait()
    time.sleep(1.2)
    os.kill(rank, signal.SIGTERM)
    assert list(lines) == ["SIGTERM 75\n"]
