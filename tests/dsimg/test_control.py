"""What ends a run early, through the train stage: asked to, or because training, the disk or a rank has gone wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import ConfigError, DivergenceError, RunError, StopRequested
from dsimg.shards import check_shards, checkpoints, read_state
from dsimg.train import TrainConfig, train
from tests.conftest import ROOT, Launch, free_port, rank_environment
from tests.dsimg.train_cases import FAST, metrics, stop_after

WORDS = ["--model", "tests.nets:with_dropout", "--batch_size", "8", "--augment", "light", "--log_steps", "1"]


def start(*words: str, rank: int = 0, size: int = 1, port: int = 0) -> "subprocess.Popen[str]":
    """Start a rank of `dsimg train WORDS`."""
    return subprocess.Popen(
        [sys.executable, "-m", "dsimg", "train", *WORDS, *words],
        cwd=ROOT,
        env=rank_environment(rank, size, port),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[str]") -> None:
    """Wait until a run has recorded a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in metrics(run)):
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.communicate()[0] if process.poll() is not None else 'too slow'}")


def test_a_signal_saves_and_the_same_command_goes_on_as_if_nothing_had_been(small_folder: Path, tmp_path: Path) -> None:
    def words(name: str) -> list[str]:
        told = f"env | grep ^DSIMG_ | grep -v ^DSIMG_INSTRUCTION_SET= | sort > {tmp_path / name}.told"
        return ["--data", str(small_folder), "--out", str(tmp_path / name), "--epochs", "150", "--on_exit", told]

    stopped = start(*words("run"))
    wait_for_step(tmp_path / "run", 7, stopped)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=30)
    assert stopped.returncode == 75, output
    step = int(re.findall(r"stopped by SIGTERM after step (\d+);", output)[0])
    assert f"stopped by SIGTERM after step {step}; saved at step {step}. The same command goes on from it." in output
    told = dict(line.split("=", 1) for line in (tmp_path / "run.told").read_text().splitlines())
    assert told == {
        "DSIMG_OUTCOME": "stopped",
        "DSIMG_EXIT_CODE": "75",
        "DSIMG_RUN": str(tmp_path / "run"),
        "DSIMG_MESSAGE": output.splitlines()[-1],
    }
    resumed, whole = start(*words("run")), start(*words("whole"))
    output, _ = resumed.communicate(timeout=120)
    whole.communicate(timeout=120)
    assert (resumed.returncode, whole.returncode) == (0, 0), output
    assert f", step {step}, from" in output
    assert "DSIMG_OUTCOME=done" in (tmp_path / "run.told").read_text()
    for file in ("weights.safetensors", "evaluation.json", "predictions.csv"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    for kind in ("train", "validation"):
        both = [
            [(line["step"], line.get("loss"), line.get("lr"), line.get("grad_norm")) for line in metrics(run, kind)]
            for run in (tmp_path / "run", tmp_path / "whole")
        ]
        assert both[0] == both[1]


def test_before_the_first_step_a_signal_ends_the_run_at_once(small_folder: Path, tmp_path: Path) -> None:
    process = start("--data", str(small_folder), "--out", str(tmp_path / "run"), rank=0, size=2, port=free_port())
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGUSR1 - 1) & 1:
        time.sleep(0.1)  # until it catches signals; then it waits for a rank that never comes
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "stopped by SIGINT before the first step" in output
    assert not (tmp_path / "run").exists()


def test_the_stop_file_stops_a_run_and_is_refused_at_its_start(small_folder: Path, tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    out = tmp_path / "run"
    process = start("--data", str(small_folder), "--out", str(out), "--epochs", "4000", "--stop_file", str(stop_file))
    wait_for_step(out, 3, process)
    stop_file.touch()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert f"stopped by the stop file {stop_file} after step" in output
    with pytest.raises(ConfigError, match=r"the stop file .* is there already"):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "other", stop_file=stop_file, **FAST))


def test_hours_and_steps_are_those_of_this_start(small_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", **{**FAST, "epochs": 4})
    stop_after(config, 3)
    stop_after(config, 2)
    assert json.loads((checkpoints(tmp_path / "run" / "checkpoints")[0] / "state.json").read_text())["step"] == 5
    short = TrainConfig(data=str(small_folder), out=tmp_path / "hours", max_hours=2 / 3600, **{**FAST, "epochs": 9999})
    begun = time.monotonic()
    with pytest.raises(StopRequested, match=r"stopped by --max_hours .* saved at step"):
        train(short)
    assert time.monotonic() - begun > 2


def test_a_run_that_diverges_says_where_and_keeps_its_checkpoint(
    small_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    out = tmp_path / "run"
    options = {**FAST, "epochs": 5, "model": "tests.nets:Lost"}
    with pytest.raises(DivergenceError) as caught:
        train(TrainConfig(data=str(small_folder), out=out, log_steps=1, max_skipped_steps=2, **options))
    told = str(caught.value)
    assert "not finite in 3 steps in a row, the last of them step 6, more than --max_skipped_steps 2" in told
    assert "On rank 0 the loss was nan, the largest gradient nan in body." in told
    assert "The checkpoint of step 4 stays." in told
    report = json.loads((out / "divergence.json").read_text())
    assert report["step"] == 6
    (rank,) = report["ranks"]
    assert len(rank["images"]) == 8
    assert all((small_folder / "train" / image).exists() for image in rank["images"])
    assert [line["skipped_steps"] for line in metrics(out)] == [0, 0, 0, 1, 2, 3]
    # Two ranks at ZeRO-2: the one where it happens is named.
    words = ["--data", str(small_folder), "--out", str(tmp_path / "two"), "--model", "tests.nets:Lost"]
    words += ["--epochs", "9", "--batch_size", "8", "--max_skipped_steps", "0", "--deepspeed_config", "zero2"]
    results = launch(2, "-m", "dsimg", "train", *words)
    assert [result.returncode for result in results] == [2, 2]
    assert "On rank 1 the loss was nan" in results[0].stdout


def test_ranks_that_drift_apart_are_found_before_a_save(small_folder: Path, tmp_path: Path, launch: Launch) -> None:
    words = ["--data", str(small_folder), "--out", str(tmp_path / "run"), "--model", "tests.nets:Drifting"]
    results = launch(2, "-m", "dsimg", "train", *words, "--epochs", "3", "--batch_size", "8")
    assert [result.returncode for result in results] == [2, 2]
    assert "at step 4 body.3.weight is another on rank" in results[0].stdout
    assert "(1 of 8 tensors differ)" in results[0].stdout
    # The checkpoint of before is there.
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000002", "step_00000001"]


def test_a_spike_is_marked(small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsimg.health.SPIKE_FACTOR", 0.01)  # so that every step from the eleventh on is one
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, **{**FAST, "epochs": 6}))
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    expected = [(n + 1, losses[n], pytest.approx(sum(losses[n - 10 : n]) / 10)) for n in (10, 11)]
    spikes = metrics(tmp_path / "run", "spike")
    assert [(line["step"], line["loss"], line["mean_before"]) for line in spikes] == expected


def can_mount() -> bool:
    """Tell whether this machine lets a test have a small disk of its own."""
    if shutil.which("unshare") is None:
        return False
    words = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs a small disk: user and mount namespaces are not permitted here")
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_costs_no_checkpoint(small_folder: Path, tmp_path: Path, on_error: str) -> None:
    """A disk that takes one checkpoint of 280 KB and the run's files, but not two."""
    words = ["--data", str(small_folder), "--out", "/mnt/run", "--model", "tests.nets:wide", "--epochs", "3"]
    words += ["--batch_size", "8", "--optimizer", "adamw", "--on_save_error", on_error, "--log_steps", "1"]
    script = (
        f"mount -t tmpfs -o size=700k none /mnt && {sys.executable} -m dsimg train {' '.join(words)}; code=$?; "
        f"cp -r /mnt/run {tmp_path / 'kept'}; exit $code"
    )
    environment = {**rank_environment(0, 1, 0), "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "cannot save the checkpoint of step 4: rank 0: " in result.stdout, result.stdout + result.stderr
    assert "No space left on device" in result.stdout
    assert "Traceback" not in result.stdout
    kept = checkpoints(tmp_path / "kept" / "checkpoints")
    assert result.returncode == (2 if on_error == "stop" else 0)
    assert kept
    assert all(check_shards(path, read_state(path)) is None for path in kept)


def test_a_changed_data_set_is_refused_with_the_difference(small_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST)
    stop_after(config, 3)
    gone = small_folder / "train" / "ant" / "0003.png"
    content = gone.read_bytes()
    gone.rename(small_folder / "train" / "bee" / "moved.png")
    message = r"1 file gone \(train/ant/0003.png\); 1 file added \(train/bee/moved.png\)\. Put them back"
    with pytest.raises(Exception, match=message):
        train(config)
    (small_folder / "train" / "bee" / "moved.png").unlink()
    gone.write_bytes(content)
    for split in ("train", "val"):
        shutil.copytree(small_folder / split / "ant", small_folder / split / "cat")
    with pytest.raises(Exception, match=r"class new: 'cat'; 12 files added"):
        train(config)
    for split in ("train", "val"):
        shutil.rmtree(small_folder / split / "cat")
    train(config)


def test_an_older_checkpoint_is_taken_where_the_newest_is_damaged(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {**FAST, "epochs": 3, "ema": 0.9}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "whole", log_steps=1, **options))
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, **options)
    stop_after(config, 5)
    newest, older = checkpoints(tmp_path / "run" / "checkpoints")
    os.truncate(newest / "shard_0.safetensors", 100)
    capsys.readouterr()
    train(config)
    shown = capsys.readouterr().out
    assert f"{newest / 'shard_0.safetensors'} has 100 bytes instead of" in shown
    assert f"resuming after epoch 2, step 4, from {older}" in shown
    for file in ("weights.safetensors", "evaluation.json"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew_in_silence(small_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST)
    stop_after(config, 1)
    (only,) = checkpoints(tmp_path / "run" / "checkpoints")
    (only / "state.json").write_text("")
    with pytest.raises(RunError, match="is whole"):
        train(config)
