"""The same command again: a finished run, an unfinished one, another process's, one to be overwritten."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsimg.errors import DsimgError
from dsimg.run import Run
from dsimg.shards import checkpoints, read_model
from dsimg.train import TrainConfig, train
from dsimg.weights import read_weights
from tests.conftest import Launch
from tests.dsimg.train_cases import FAST, metrics, stop_after


def test_a_finished_run_is_left_alone_and_an_unfinished_one_goes_on(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropout = {**FAST, "model": "tests.nets:with_dropout", "ema": 0.9}
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, **dropout)
    train(config)
    whole = metrics(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    train(config)
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == before
    with pytest.raises(DsimgError, match=r"epochs was 2, now 3"):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, **{**dropout, "epochs": 3}))

    # As if killed in the second epoch: the checkpoint of the first is there, and a line that is half written.
    stopped = tmp_path / "stopped"
    half = TrainConfig(data=str(small_folder), out=stopped, log_steps=1, **dropout)
    stop_after(half, 2)
    assert not (stopped / "run.json").exists()
    with (stopped / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "step": 3, "loss": 9}\n{"kind": "tr')
    train(half)
    assert "resuming after epoch 1, step 2" in capsys.readouterr().out
    assert [line["step"] for line in metrics(stopped)] == [1, 2, 3, 4]
    assert [line["loss"] for line in metrics(stopped)] == [line["loss"] for line in whole]
    assert (stopped / "weights.safetensors").read_bytes() == (tmp_path / "run" / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    ],
)
def test_a_scheduler_of_the_json_goes_on_where_it_was(
    small_folder: Path, tmp_path: Path, scheduler: dict[str, Any]
) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler})
    )
    options = {**FAST, "lr": None, "deepspeed_config": str(tmp_path / "ds.json"), "log_steps": 1}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "whole", **options))
    half = TrainConfig(data=str(small_folder), out=tmp_path / "half", **options)
    stop_after(half, 2)
    train(half)
    whole, resumed = ([(line["lr"], line["loss"]) for line in metrics(tmp_path / name)] for name in ("whole", "half"))
    assert resumed == whole
    assert len({lr for lr, _ in whole}) > 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"train_batch_size": 4}, "batch_size was 8, now 4"),
        (
            {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            "optimizer was sgd, now adamw",
        ),
    ],
)
def test_a_json_that_changes_what_is_learned_is_refused_on_resume(
    small_folder: Path, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    options = {**FAST, "batch_size": None, "lr": None, "deepspeed_config": str(tmp_path / "ds.json")}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", **options)
    stop_after(config, 2)
    (tmp_path / "ds.json").write_text(json.dumps(other))
    with pytest.raises(DsimgError, match=message):
        train(config)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").exists()


def test_overwrite_never_takes_what_the_run_reads(small_folder: Path, tmp_path: Path) -> None:
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST))
    inside = tmp_path / "run" / "data"
    shutil.copytree(small_folder, inside)
    with pytest.raises(DsimgError, match="lie in one another"):
        train(TrainConfig(data=str(inside), out=tmp_path / "run", overwrite=True, **FAST))
    assert len(list(inside.rglob("*.png"))) == 24
    flat = small_folder / "train"
    with pytest.raises(DsimgError, match="lie in one another"):
        train(TrainConfig(data=str(flat), out=flat / "run", **FAST))
    assert not (flat / "run").exists()
    weights = str(tmp_path / "run")
    with pytest.raises(DsimgError, match="lie in one another"):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "run", weights=weights, overwrite=True, **FAST))
    assert Run.open(tmp_path / "run").file("weights").exists()


def test_overwrite_given_again_goes_on_with_what_it_began(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that starts the same command again must not lose the run each time."""
    first = TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST)
    stop_after(first, 3)
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", overwrite=True, **FAST)
    stop_after(config, 3)
    assert "resuming" not in capsys.readouterr().out  # another command began that run
    train(config)
    assert "resuming after epoch 1 and 1 steps, step 3" in capsys.readouterr().out
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    train(config)
    assert "resuming" not in capsys.readouterr().out  # that one is finished, and replaced
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns > before
    assert {path.name for path in tmp_path.iterdir()} == {"insects", "run"}


def test_a_second_process_is_kept_out_of_a_run(small_folder: Path, tmp_path: Path, launch: Launch) -> None:
    out = tmp_path / "run"
    code = f"from pathlib import Path; from dsimg.run import hold_lock; hold_lock(Path({str(out)!r}))"
    config = TrainConfig(data=str(small_folder), out=out, **FAST)
    train(config)
    (result,) = launch(1, "-c", code)
    assert "another process is writing the run" in result.stdout


def test_a_resumed_run_takes_images_as_before_without_its_parent(small_folder: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    train(TrainConfig(data=str(small_folder), out=parent, **FAST))
    manifest = json.loads((parent / "run.json").read_text())
    manifest["model"]["preprocess"]["mean"] = [0.1, 0.1, 0.1]
    (parent / "run.json").write_text(json.dumps(manifest))
    child = TrainConfig(data=str(small_folder), out=tmp_path / "child", weights=str(parent), **FAST)
    stop_after(child, 2)
    shutil.rmtree(parent)
    train(child)
    assert Run.open(tmp_path / "child").model["preprocess"]["mean"] == [0.1, 0.1, 0.1]


def test_overwrite_waits_for_the_process_that_writes(small_folder: Path, tmp_path: Path, launch: Launch) -> None:
    out = tmp_path / "run"
    train(TrainConfig(data=str(small_folder), out=out, **FAST))  # this process keeps the lock
    code = f"""
from pathlib import Path
from dsimg import cli, stage, train
stage.LOCK_SECONDS = 1
words = ["--data", {str(small_folder)!r}, "--out", {str(out)!r}, "--overwrite", "--epochs", "1"]
cli.run(train.train, [*words, "--model", "tests.nets:with_batchnorm"])
"""
    (result,) = launch(1, "-c", code)
    assert result.returncode == 2
    assert f"another process is in {out}; waiting 1 s for it to leave" in result.stdout
    assert "another process is writing the run" in result.stdout
    assert Run.open(out).file("weights").exists()


def test_a_checkpoints_weights_start_another_run(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way out that a run which diverged is told of."""
    stop_after(TrainConfig(data=str(small_folder), out=tmp_path / "run", ema=0.9, **FAST), 3)
    path = checkpoints(tmp_path / "run" / "checkpoints")[0]
    capsys.readouterr()
    options = {**FAST, "lr": 0.0}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "child", weights=str(path), **options))
    assert "head kept (the same classes)" in capsys.readouterr().out
    trained = read_weights(tmp_path / "child" / "weights.safetensors")
    for name, value in read_model(path).items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(trained[name], value)
    with pytest.raises(DsimgError, match=r"holds a tests\.nets:with_batchnorm, but --model is cifar_resnet20"):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "other", weights=str(path), model="cifar_resnet20"))


def test_a_copy_beside_the_checkpoints_is_left_alone(small_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", keep_checkpoints=1, **FAST)
    stop_after(config, 1)
    folder = tmp_path / "run" / "checkpoints"
    for name in ("step_best", "step_00000001.bak"):
        shutil.copytree(folder / "step_00000001", folder / name)
    stop_after(config, 2)
    assert {path.name for path in folder.iterdir()} == {"step_00000003", "step_best", "step_00000001.bak", "latest"}
    assert checkpoints(folder) == [folder / "step_00000003"]


def test_lost_checkpoints_are_not_begun_anew_in_silence(small_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", **{**FAST, "epochs": 4})
    stop_after(config, 5)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(DsimgError, match=r"the checkpoints of .* are gone, though its metrics.jsonl records some"):
        train(config)
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "index.jsonl.gz").unlink()
    with pytest.raises(DsimgError, match=r"there is no index .*--weights .*checkpoints/step_N"):
        train(config)


def test_overwrite_leaves_links_and_mount_points_in_place(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "disk" / "run", tmp_path / "run"
    link.symlink_to(real)
    real.parent.mkdir()
    config = TrainConfig(data=str(small_folder), out=link, overwrite=True, **FAST)
    train(config)
    train(config)
    assert link.is_symlink()
    assert Run.open(real).file("weights").exists()

    def busy(self: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        Run.begin(real, stage="train", config={}, overwrite=True)
    assert {path.name for path in real.iterdir()} == {"config.json"}


def test_the_datas_path_may_be_written_in_another_way(small_folder: Path, tmp_path: Path) -> None:
    options = {**FAST, "out": tmp_path / "run"}
    stop_after(TrainConfig(data=str(small_folder), **options), 3)
    train(TrainConfig(data=f"{small_folder}/../{small_folder.name}/", **options))
    assert Run.open(tmp_path / "run").file("weights").exists()


def test_damaged_lines_in_a_runs_files_do_no_harm(small_folder: Path, tmp_path: Path) -> None:
    (small_folder / "train" / "ant" / "page.png").write_bytes(b"<html>404</html>")
    config = TrainConfig(data=str(small_folder), out=tmp_path / "run", max_bad_images=0.1, **FAST)
    stop_after(config, 3)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1}\n')
    with (tmp_path / "run" / "bad_images.jsonl").open("a") as stream:
        stream.write('{"file": "half')
    train(config)
    listed = [json.loads(line)["file"] for line in (tmp_path / "run" / "bad_images.jsonl").read_text().splitlines()]
    assert listed == ["ant/page.png"]
