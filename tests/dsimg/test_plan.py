"""What is refused before the first step: one message, and nothing left behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import DsimgError
from dsimg.train import TrainConfig, train
from tests.dsimg.train_cases import FAST


def _one_class(root: Path) -> None:
    shutil.rmtree(root / "train" / "bee")
    shutil.rmtree(root / "val" / "bee")


def _empty_class(root: Path) -> None:
    (root / "train" / "wasp").mkdir()


def _unknown_in_val(root: Path) -> None:
    (root / "val" / "wasp").mkdir()
    shutil.copy(root / "val" / "bee" / "0008.png", root / "val" / "wasp" / "x.png")


def _no_images(root: Path) -> None:
    for path in root.rglob("*.png"):
        path.unlink()


def _untouched(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (_one_class, {}, "/insects/train; a classifier needs a folder of images for each of two."),
        (_empty_class, {}, "class 'wasp' has no images in "),
        (_unknown_in_val, {}, "/insects/val holds 'wasp', unknown to "),
        (_no_images, {}, "/insects/train; put one folder of images a class there."),
        (_untouched, {"data": "nowhere"}, "no such folder: nowhere; check the path."),
        (_untouched, {"model": "resnet19"}, "there is no model 'resnet19', did you mean 'resnet18'?"),
        (_untouched, {"model": "alexnet"}, "Output size is too small). Use --image_size 64, or a network for small"),
        (_untouched, {"model": "tests.nets:no_such"}, "--model tests.nets:no_such: 'tests.nets' has no function"),
        (_untouched, {"weights": "none.pth"}, "--weights none.pth: no such file or folder. Give a .safetensors"),
        (_untouched, {"deepspeed_config": "zero4"}, "--deepspeed_config zero4 does not exist, did you mean 'zero3'?"),
        (
            _untouched,
            {"batch_size": 7, "deepspeed_config": "FIXED"},
            "its batch sizes make 32 images per step and the command line asks for 7; keep one of them",
        ),
        (
            _untouched,
            {"optimizer": "adamw", "deepspeed_config": "WITH_OPTIMIZER"},
            'optimizer is "SGD" in this file and --optimizer adamw on the command line; keep one of them',
        ),
        (
            _untouched,
            {"schedule": "step", "deepspeed_config": "WITH_SCHEDULER"},
            "has a scheduler block and --schedule step was given as well. Keep one of them.",
        ),
    ],
)
def test_bad_input_gets_one_message_and_leaves_nothing(
    small_folder: Path, tmp_path: Path, spoil: Any, options: dict[str, Any], message: str
) -> None:
    files = {
        "FIXED": {"train_batch_size": 32},
        "WITH_OPTIMIZER": {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "WITH_SCHEDULER": {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {}}},
    }
    name = options.get("deepspeed_config")
    if name in files:
        (tmp_path / "ds.json").write_text(json.dumps(files[name]))
        options = {**options, "deepspeed_config": str(tmp_path / "ds.json")}
        options.setdefault("batch_size", 8)
    spoil(small_folder)
    with pytest.raises(DsimgError) as caught:
        train(TrainConfig(**{"data": str(small_folder), "out": tmp_path / "run", **FAST, **options}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) or name in files
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": 0.5}, r"optimizer\.params\.lr 0\.1 and --lr 0\.5 was given as well"),
        ({"weight_decay": 0.5}, r"optimizer\.params\.weight_decay 0\.01 and --weight_decay 0\.5"),
        ({"momentum": 0.5}, r"optimizer\.params\.momentum 0\.9 and --momentum 0\.5"),
    ],
)
def test_a_flag_and_a_json_that_contradict_are_both_named(
    small_folder: Path, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    params = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": params}})
    )
    options = {**FAST, "lr": None, "deepspeed_config": str(tmp_path / "ds.json"), **flags}
    with pytest.raises(DsimgError, match=message):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frozen", "no parameter to train"),
        ("scalar", "no dimension"),
        ("extra", "not a tensor"),
        ("leaves", "SystemExit"),
    ],
)
def test_networks_that_cannot_be_trained_are_refused_in_the_plan(
    small_folder: Path, tmp_path: Path, name: str, message: str
) -> None:
    options = {**FAST, "model": f"tests.nets:{name}"}
    with pytest.raises(DsimgError, match=message):
        train(TrainConfig(data=str(small_folder), out=tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()
