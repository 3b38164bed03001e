"""`python -m dsimg.probe`: latencies of a source and of students before any is trained."""

import json
from pathlib import Path

import pytest
import torchvision

from dsimg import models
from dsimg.probe import ProbeConfig, probe
from dsimg.run import Run
from dsimg.weights import save_weights
from dsimg_export.search_space import FAMILIES

OWN, WIDE = "tests.nets:with_batchnorm", "cifar_resnet20"


def source(path: Path) -> Run:
    """Write a run of a small network of two classes for 32 x 32 images."""
    run, _ = Run.begin(path, stage="train", config={})
    save_weights(models.build_model(OWN, num_classes=2).state_dict(), path / "weights.safetensors")
    preprocess = models.default_preprocess(OWN, image_size=32).as_dict()
    block = {"arch": OWN, "num_classes": 2, "classes": ["ant", "bee"], "preprocess": preprocess}
    run.finish(seed=0, model=block, metrics={})
    return Run.open(path)


def test_every_network_is_measured_in_both_precisions(tmp_path: Path) -> None:
    config = ProbeConfig(
        source=source(tmp_path / "run").path,
        students=(WIDE,),
        ratios=(0.5,),
        round_to=8,
        out=tmp_path / "probe.json",
    )
    found = probe(config)
    assert json.loads((tmp_path / "probe.json").read_text())["networks"] == found
    assert [(one["model"], one["ratio"]) for one in found] == [(OWN, 1.0), (OWN, 0.5), (WIDE, 1.0), (WIDE, 0.5)]
    own, own_half, wide, wide_half = found
    assert own["macs"] == 8 * 27 * 64 + 16 * 72 * 4 + 64 * 2
    assert wide["parameters"] == models.count_parameters(models.build_model(WIDE, num_classes=2))
    assert wide_half["macs"] == pytest.approx(0.5 * wide["macs"], rel=0.03)
    for one in (own, wide, wide_half):
        assert one["seconds"].keys() == {"fp32", "int8"}
    assert wide["seconds"]["fp32"] > 3 * own["seconds"]["fp32"]
    # Blocks of eight channels: one of the second layer's two goes, and none of the first's.
    assert own_half["macs"] == 8 * 27 * 64 + 8 * 72 * 4 + 32 * 2


def test_a_student_that_cannot_be_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    config = ProbeConfig(
        source=source(tmp_path / "run").path, students=("resnet17",), ratios=(0.5,), out=tmp_path / "probe.json"
    )
    found = probe(config)
    for one in found[2:4]:
        assert "there is no model 'resnet17'" in one["error"]
        assert one["seconds"] == {}
    assert found[0]["seconds"].keys() == {"fp32", "int8"}


def test_the_families_that_students_come_from_are_of_networks_that_there_are() -> None:
    names = {*torchvision.models.list_models(module=torchvision.models), *models.CIFAR_RESNETS}
    assert {name for family in FAMILIES for name in family} <= names
