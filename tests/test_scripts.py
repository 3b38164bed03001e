"""The scripts that start a training again: with commands that stand in for the training, SLURM and the cloud."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPOT, SLURM = ROOT / "examples" / "spot.sh", ROOT / "examples" / "slurm.sh"

# A training that notes how it was called, and ends with the next of its exit codes; "stop" is 75 once it is asked to.
TRAINING = """
echo "$*" >>calls
read -r code <codes && sed -i 1d codes
if [ "$code" = stop ]; then
    while [ ! -e "${@: -1}" ]; do /bin/sleep 0.02; done
    code=75
fi
exit "$code"
"""

RANK = """
shift 3  # -m dsimg train
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $*" >>"calls_$RANK"
read -r code <"codes_$RANK"
if [ "$code" = stop ]; then
    while [ ! -e "$2" ]; do /bin/sleep 0.02; done
    code=75
fi
exit "$code"
"""

# Two ranks, and the highest of their exit codes.
SRUN = """
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $first; a=$?
wait $second; b=$?
exit $((a > b ? a : b))
"""

SCONTROL = """
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$*" >>requeued; fi
"""


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins, first on the path; `sleep` is short. The test runs beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    stand_in(folder, "sleep", "exec /bin/sleep 0.05")
    return folder


def stand_in(folder: Path, name: str, text: str) -> Path:
    """Write an executable bash script."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def start(script: Path, *words: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a script, its output to be read."""
    return subprocess.Popen(
        ["bash", str(script), *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return a script's exit code and what it printed."""
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, output


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for at most ten seconds."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("script", [SPOT, SLURM])
def test_a_script_is_executable_and_without_complaints(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    assert subprocess.run([shellcheck, str(script)], capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    ("codes", "code", "calls"),
    [
        (["75", "75", "0"], 0, 3),
        (["1", "1", "75", "1", "1", "0"], 0, 6),
        (["1", "137", "1", "0"], 1, 3),
        (["75", "2", "0"], 2, 2),
    ],
)
def test_spot_starts_again_as_long_as_it_helps(
    bin_folder: Path, tmp_path: Path, codes: list[str], code: int, calls: int
) -> None:
    training = stand_in(bin_folder, "training", TRAINING)
    (tmp_path / "codes").write_text("\n".join(codes) + "\n")
    stop_file = tmp_path / "a stop file"
    stop_file.touch()  # left over
    answer, output = finish(start(SPOT, str(training), "--out", "my runs", STOP_FILE=str(stop_file)))
    assert answer == code, output
    assert lines(tmp_path / "calls") == [f"--out my runs --stop_file {stop_file}"] * calls
    assert not stop_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_spot_that_is_asked_to_stop_waits_for_the_training_and_ends(
    bin_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    training = stand_in(bin_folder, "training", TRAINING)
    (tmp_path / "codes").write_text("75\nstop\n0\n")
    process = start(SPOT, str(training), STOP_FILE=str(tmp_path / "stop"))
    wait_until(lambda: len(lines(tmp_path / "calls")) == 2)
    process.send_signal(number)
    answer, output = finish(process)
    assert answer == 75, output
    assert len(lines(tmp_path / "calls")) == 2
    assert not (tmp_path / "stop").exists()


@pytest.mark.parametrize(
    ("cloud", "curl", "asked"),
    [
        (
            "aws",
            'case "$*" in *token) echo a-token ;; *) [ -e taken ] || { touch taken; exit 22; }; echo terminate ;; esac',
            ["latest/api/token", "latest/meta-data/spot/instance-action"] * 2,
        ),
        (
            "gcp",
            "if [ -e taken ]; then echo TRUE; else touch taken; echo FALSE; fi",
            ["computeMetadata/v1/instance/preempted"] * 2,
        ),
    ],
)
def test_spot_stops_on_the_notice_of_the_cloud(
    bin_folder: Path, tmp_path: Path, cloud: str, curl: str, asked: list[str]
) -> None:
    training = stand_in(bin_folder, "training", TRAINING)
    stand_in(bin_folder, "curl", f'echo "$*" >>asked\n{curl}')
    (tmp_path / "codes").write_text("stop\n0\n")
    answer, output = finish(start(SPOT, "--watch", cloud, str(training), STOP_FILE=str(tmp_path / "stop")))
    assert answer == 75, output
    assert "the cloud takes this machine away" in output
    assert [line.split()[-1] for line in lines(tmp_path / "asked")] == [f"http://169.254.169.254/{at}" for at in asked]
    if cloud == "aws":
        assert "X-aws-ec2-metadata-token: a-token" in lines(tmp_path / "asked")[1]


@pytest.mark.parametrize("words", [[], ["--watch"], ["--watch", "aws"], ["--watch", "azure", "training"]])
def test_spot_says_how_it_is_called(bin_folder: Path, words: list[str]) -> None:
    answer, output = finish(start(SPOT, *words))
    assert answer == 2
    assert "usage:" in output


@pytest.fixture
def slurm(bin_folder: Path, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start the SLURM script, in which two ranks end with the given exit codes."""
    for name, text in {"python": RANK, "srun": SRUN, "scontrol": SCONTROL}.items():
        stand_in(bin_folder, name, text)

    def start_job(*codes: str) -> "subprocess.Popen[str]":
        for rank, code in enumerate(codes):
            (tmp_path / f"codes_{rank}").write_text(f"{code}\n")
        job = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "8"}
        return start(SLURM, "--out", "my runs", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", **job)

    return start_job


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        (("0", "0"), 0, []),
        (("2", "1"), 2, []),
        (("75", "75"), 0, ["requeue 4321"]),
        (("1", "137"), 0, ["requeue 4321"]),
    ],
)
def test_slurm_queues_again_what_another_start_helps(
    slurm: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    codes: tuple[str, str],
    code: int,
    requeued: list[str],
) -> None:
    stop_file = tmp_path / "dsimg-4321.stop"
    stop_file.touch()  # left over
    answer, output = finish(slurm(*codes))
    assert answer == code, output
    assert lines(tmp_path / "requeued") == requeued
    for rank in (0, 1):
        flags = f"--stop_file {stop_file} --out my runs"
        assert lines(tmp_path / f"calls_{rank}") == [f"{rank} {rank} 2 2 node7:24321 {flags}"]
    assert not stop_file.exists()


def test_slurm_gives_up_after_three_failures_in_a_row(
    slurm: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    codes = ["1", "1", "75", "1", "1", "1"]
    assert [finish(slurm("0", code))[0] for code in codes] == [0, 0, 0, 0, 0, 1]
    assert len(lines(tmp_path / "requeued")) == 5
    assert not (tmp_path / "dsimg-4321.failures").exists()


@pytest.mark.parametrize(
    ("number", "code", "requeued"), [(signal.SIGUSR1, 0, ["requeue 4321"]), (signal.SIGTERM, 75, [])]
)
def test_slurm_stops_on_a_signal_and_does_not_queue_a_cancelled_job_again(
    slurm: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    requeued: list[str],
) -> None:
    process = slurm("stop", "stop")
    wait_until(lambda: all((tmp_path / f"calls_{rank}").exists() for rank in (0, 1)))
    process.send_signal(number)
    answer, output = finish(process)
    assert answer == code, output
    assert lines(tmp_path / "requeued") == requeued
    assert not (tmp_path / "dsimg-4321.stop").exists()
