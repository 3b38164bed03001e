"""Helpers of the tests of networks: a small one, a run that holds it, equality of states."""

from pathlib import Path

import torch
from torch import nn

from dsimg.models import build_model, default_preprocess
from dsimg.run import Run
from dsimg.weights import save_weights


def resnet(classes: int = 3) -> nn.Module:
    """Return the smallest network of dsimg's, for images of 32 px."""
    return build_model("cifar_resnet20", num_classes=classes)


def make_run(path: Path, model: nn.Module, *, arch: str, classes: list[str]) -> Path:
    """Write a finished run that holds `model`, for images of 48 px, and return its folder."""
    run, _ = Run.begin(path, stage="train", config={})
    save_weights(model.state_dict(), path / "weights.safetensors")
    preprocess = default_preprocess(arch, image_size=48).as_dict()
    block = {"arch": arch, "num_classes": len(classes), "classes": classes, "preprocess": preprocess}
    run.finish(seed=0, model=block, metrics={})
    return path


def assert_equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare two state dicts, bit by bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
