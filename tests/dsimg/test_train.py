"""`dsimg train` from end to end: real files in, a run folder out, on one rank and through DeepSpeed's launcher."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from dsimg.errors import DsimgError
from dsimg.models import build_model
from dsimg.run import Run
from dsimg.train import TrainConfig, train
from dsimg.weights import read_weights, restore_weights
from tests.conftest import ROOT, Launch, free_port, make_folder
from tests.dsimg.train_cases import FAST, metrics


def test_a_run_holds_what_it_should(small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    train(TrainConfig(data=str(small_folder), out=out, log_steps=1, **FAST))
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {
        "run.json",
        ".lock",
        "config.json",
        "ds_config.json",
        "index.jsonl.gz",
        "labels.txt",
        "metrics.jsonl",
        "weights.safetensors",
        "evaluation.json",
        "predictions.csv",
        "checkpoints/latest",
        "checkpoints/step_00000002/state.json",
        "checkpoints/step_00000002/shard_0.safetensors",
        "checkpoints/step_00000004/state.json",
        "checkpoints/step_00000004/shard_0.safetensors",
    }
    run = Run.open(out)
    assert run.model["arch"] == "tests.nets:with_batchnorm"
    assert run.model["classes"] == ["ant", "bee"]
    assert run.model["preprocess"]["input_size"] == [3, 32, 32]
    assert (out / "labels.txt").read_text() == "ant\nbee\n"
    steps = metrics(out)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    needed = {"loss", "lr", "grad_norm", "images_per_second", "data_wait", "loss_scale", "skipped_steps"}
    assert needed | {"peak_memory_bytes", "epoch", "seconds"} <= steps[0].keys()
    assert [line["step"] for line in metrics(out, "validation")] == [2, 4]
    assert json.loads((out / "ds_config.json").read_text())["gradient_clipping"] == 0.0
    report = json.loads((out / "evaluation.json").read_text())
    assert report["images"] == 8
    with (out / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 8
    assert sum(int(row["correct"]) for row in rows) == report["correct"]
    shown = capsys.readouterr().out
    assert "16 training images, 2 classes" in shown
    assert "peak 0.015625 = 0.5 at batch 256, linear scaling to 8" in shown
    assert f"dsimg evaluate --source {out}" in shown


def test_the_weights_are_plain_pytorch_and_give_the_reported_accuracy(small_folder: Path, tmp_path: Path) -> None:
    from dsimg.data import EvalLoader, to_input
    from dsimg.folder import read_index
    from dsimg.preprocess import Preprocess

    out = tmp_path / "run"
    train(TrainConfig(data=str(small_folder), out=out, ema=0.5, **FAST))
    run = Run.open(out)
    model = build_model(run.model["arch"], num_classes=2)
    restore_weights(model, read_weights(run.file("weights")), source=str(out))
    preprocess = Preprocess.from_dict(run.model["preprocess"])
    split = read_index(run.file("index")).val
    (batch,) = EvalLoader(split, preprocess, batch_size=8)
    with torch.no_grad():
        logits = model.eval()(to_input(batch.images, preprocess, "cpu"))
    loss = float(torch.nn.functional.cross_entropy(logits, batch.labels))
    assert loss == pytest.approx(json.loads((out / "evaluation.json").read_text())["loss"], rel=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_does_not(small_folder: Path, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(TrainConfig(data=str(small_folder), out=tmp_path / name, seed=seed, log_steps=1, **FAST))
        losses.append([line["loss"] for line in metrics(tmp_path / name)])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_workers_and_cache_do_not_change_what_is_learned(small_folder: Path, tmp_path: Path) -> None:
    losses = []
    for name, options in (("ram", {"cache": "ram"}), ("files", {"cache": "none", "workers": 0}), ("w", {"workers": 2})):
        options = {"cache": "none", **options} if name == "w" else options
        config: dict[str, Any] = {**FAST, **options}
        train(TrainConfig(data=str(small_folder), out=tmp_path / name, log_steps=1, **config))
        losses.append([line["loss"] for line in metrics(tmp_path / name)])
    assert losses[0] == losses[1] == losses[2]


def test_a_step_that_is_not_finite_is_counted_and_shown(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(TrainConfig(data=str(small_folder), out=out, log_steps=1, **{**FAST, "model": "tests.nets:Poisoned"}))
    lines = metrics(out)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert lines[2]["grad_norm"] == "nan"
    assert "skipped steps 1" in capsys.readouterr().out
    assert all(torch.isfinite(value).all() for value in read_weights(out / "weights.safetensors").values())


def test_bad_images_are_named_replaced_and_limited(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_folder / "train" / "ant" / "page.png").write_bytes(b"<html>404</html>")
    (small_folder / "val" / "bee" / "empty.png").write_bytes(b"")
    strict = TrainConfig(data=str(small_folder), out=tmp_path / "strict", max_bad_images=0.05, **FAST)
    with pytest.raises(DsimgError, match=r"1 of 17 training images cannot be decoded.*--max_bad_images 0\.05"):
        train(strict)
    listed = [json.loads(line)["file"] for line in (tmp_path / "strict" / "bad_images.jsonl").read_text().splitlines()]
    assert listed == ["ant/page.png"]
    capsys.readouterr()
    for name, cache in (("ram", "ram"), ("files", "none")):
        out = tmp_path / name
        train(TrainConfig(data=str(small_folder), out=out, max_bad_images=0.1, cache=cache, workers=0, **FAST))  # type: ignore[arg-type]
        assert capsys.readouterr().out.count("cannot decode ant/page.png") == 1
        report = json.loads((out / "evaluation.json").read_text())
        assert report["images"] == 8
        assert [entry["file"] for entry in report["bad_images"]] == ["bee/empty.png"]


def test_pretrained_weights_of_a_run_are_taken_with_a_new_head(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(TrainConfig(data=str(small_folder), out=tmp_path / "parent", **FAST))
    capsys.readouterr()
    three = make_folder(tmp_path / "three", classes=("ant", "bee", "wasp"))
    train(TrainConfig(data=str(three), out=tmp_path / "child", weights=str(tmp_path / "parent"), **FAST))
    assert "head new (2 classes there, 3 here)" in capsys.readouterr().out
    parents = Run.open(tmp_path / "child").manifest
    assert parents is not None
    assert [entry["path"] for entry in parents["parents"]] == [str(tmp_path / "parent")]


def test_a_json_optimizer_and_scheduler_are_used(small_folder: Path, tmp_path: Path) -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = {**FAST, "lr": None, "deepspeed_config": str(tmp_path / "ds.json")}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, **options))
    rates = [line["lr"] for line in metrics(tmp_path / "run")]
    assert rates == sorted(rates)
    assert rates == pytest.approx([0.0, 0.0, 0.0025, 0.005])  # DeepSpeed's own: it stays at the first rate once


def test_monitors_of_the_json_get_loss_and_accuracy(small_folder: Path, tmp_path: Path) -> None:
    config = {
        "train_batch_size": 8,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    train(
        TrainConfig(
            data=str(small_folder),
            out=tmp_path / "run",
            log_steps=1,
            deepspeed_config=str(tmp_path / "ds.json"),
            **FAST,
        )
    )
    written = {path.name: path.read_text().splitlines() for path in (tmp_path / "csv" / "job").iterdir()}
    for name in ("Train_loss", "Train_grad_norm", "Train_images_per_second", "Validation_top1"):
        assert f"{name}.csv" in written
    losses = [float(line.split(",")[1]) for line in written["Train_loss.csv"][1:]]
    assert losses == pytest.approx([line["loss"] for line in metrics(tmp_path / "run")])


@pytest.mark.parametrize("arch", ["googlenet"])
def test_auxiliary_outputs_train(small_folder: Path, tmp_path: Path, arch: str) -> None:
    shutil.rmtree(small_folder / "val")
    for path in sorted((small_folder / "train").rglob("*.png"))[4:]:
        if path.parent.name == "ant" or path.name > "0003.png":
            path.unlink()
    config: dict[str, Any] = {"model": arch, "image_size": 64, "epochs": 1, "batch_size": 4, "augment": "none"}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", log_steps=1, val_share=0.3, **config))
    # Untrained, the main head and two auxiliary ones of weight 0.3 each give about ln 2.
    assert metrics(tmp_path / "run")[0]["loss"] > 1.2 * 0.69


def test_two_ranks_of_zero_2_make_the_losses_of_one(small_folder: Path, tmp_path: Path, launch: Launch) -> None:
    words = ["-m", "dsimg", "train", "--data", str(small_folder), "--model", "tests.nets:without_batchnorm"]
    words += [
        "--epochs",
        "3",
        "--batch_size",
        "4",
        "--augment",
        "standard",
        "--lr",
        "0.5",
        "--log_steps",
        "1",
        "--mixup",
        "0.2",
    ]
    (one,) = launch(1, *words, "--out", str(tmp_path / "one"))
    assert one.returncode == 0, one.stdout
    two = launch(2, *words, "--out", str(tmp_path / "two"), "--deepspeed_config", "zero2")
    assert [result.returncode for result in two] == [0, 0], two[0].stdout
    assert two[1].stdout == ""
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    evaluations = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two")]
    assert evaluations[0]["confusion"] == evaluations[1]["confusion"]
    assert (tmp_path / "two" / "logs" / "rank_1.log").exists()


def test_deepspeeds_launcher_runs_the_script_and_passes_on_the_exit_code(small_folder: Path, tmp_path: Path) -> None:
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command = [
        str(deepspeed),
        "--quiet",
        "--master_port",
        str(free_port()),
        "--num_gpus",
        "2",
        "dsimg/train.py",
        "--deepspeed_config",
        "ds_configs/zero1.json",
    ]
    command += ["--data", str(small_folder), "--out", str(tmp_path / "run"), "--model", "tests.nets:with_batchnorm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{deepspeed.parent}:{os.environ['PATH']}"}

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    good = run("--epochs", "1", "--batch_size", "8")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "2 ranks on CPU" in good.stdout
    assert "Traceback" not in good.stdout + good.stderr
    bad = run("--epochs", "2", "--batch_size", "8")
    assert bad.returncode == 2
    assert bad.stdout.count("epochs was 1, now 2") == 1
    assert "Traceback" not in bad.stdout + bad.stderr


def test_an_image_with_exif_orientation_is_seen_upright(tmp_path: Path) -> None:
    """A run and its evaluation agree on a picture that is stored on its side."""
    root = make_folder(tmp_path / "data")
    upright = Image.open(root / "val" / "ant" / "0008.png").convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.rotate(90, expand=True).save(root / "val" / "ant" / "0008.png", exif=exif)
    train(TrainConfig(data=str(root), out=tmp_path / "turned", **FAST))
    straight = make_folder(tmp_path / "straight")
    train(TrainConfig(data=str(straight), out=tmp_path / "plain", **FAST))
    losses = [json.loads((tmp_path / name / "evaluation.json").read_text())["loss"] for name in ("turned", "plain")]
    assert losses[0] == losses[1]


def test_out_of_memory_says_what_was_taken_and_three_things_to_change(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(*arguments: Any, **options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dsimg.session.loop.fit", exhaust)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4 * 2**30))
    with pytest.raises(DsimgError) as caught:
        train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST))
    for part in ("3.0 GiB of its 4.0 GiB", "train_micro_batch_size_per_gpu", "--gradient_checkpointing", "zero3"):
        assert part in str(caught.value)


def test_a_folder_that_cannot_be_written_is_one_message(small_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DsimgError, match=r"file"):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "file" / "run", **FAST))


def test_names_that_are_not_utf8_survive_to_the_end(small_folder: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"b\xffd")
    for split in ("train", "val"):
        (small_folder / split / "bee").rename(small_folder / split / odd)
    (small_folder / "val" / odd / os.fsdecode(b"bad\xff.png")).write_bytes(b"")
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **FAST))
    assert Run.open(tmp_path / "run").model["classes"] == ["ant", odd]


def test_a_network_with_two_names_for_one_layer_trains(small_folder: Path, tmp_path: Path) -> None:
    options = {**FAST, "model": "tests.nets:aliased"}
    train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **options))
    state = read_weights(tmp_path / "run" / "weights.safetensors")
    model = build_model("tests.nets:aliased", num_classes=2)
    restore_weights(model, state, source="run")
