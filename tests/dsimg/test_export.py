"""`dsimg export`: one file that says what the network says, with proof."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from dsimg.errors import ConfigError, DsimgError, ModelError, RunError
from dsimg.evaluate import EvaluateConfig, evaluate
from dsimg.export import ExportConfig, export
from dsimg.preprocess import Preprocess, preprocess_image
from dsimg.run import Run
from dsimg.train import TrainConfig, train
from dsimg.weights import open_network
from dsimg_export.golden import COUNT, read_golden
from dsimg_export.served import open_served
from tests.conftest import make_folder

CLASSES = ("ant", "bee", "wasp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three classes, beside its data."""
    root = tmp_path_factory.mktemp("export")
    make_folder(root / "data", classes=CLASSES)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "model": "tests.nets:with_batchnorm", "augment": "none"}
    train(TrainConfig(data=str(root / "data"), out=root / "run", **options))
    return root


@pytest.fixture(scope="module")
def exported(trained: Path) -> Run:
    return export(ExportConfig(source=str(trained / "run"), out=trained / "exported"))


def golden_pixels(run: Run) -> np.ndarray:
    return read_golden(run.file("golden")).views.pixels


def network_says(source: Path, encoded: tuple[bytes, ...], preprocess: Preprocess) -> np.ndarray:
    """Return the logits of a run's network in PyTorch, from encoded images."""
    images = torch.from_numpy(np.stack([preprocess_image(data, preprocess) for data in encoded]))
    with torch.no_grad():
        result: np.ndarray = open_network(Run.open(source)).eval()(images).numpy()
    return result


def test_the_file_says_what_the_network_says_and_the_run_what_was_compared(trained: Path, exported: Run) -> None:
    golden = read_golden(exported.file("golden"))
    served = open_served(exported)
    expected = network_says(trained / "run", golden.encoded, served.preprocess)
    assert len(golden.encoded) == COUNT
    np.testing.assert_allclose(served.logits(golden.views.pixels), expected, atol=1e-5)
    np.testing.assert_allclose(golden.logits["model"], expected, atol=1e-5)
    assert exported.manifest is not None
    parity = exported.manifest["metrics"]["parity"]
    assert parity["relative_error"] < 1e-5
    assert (parity["same_top1"], parity["vacuous"]) == (1.0, False)
    assert exported.manifest["parents"][0]["path"] == str(trained / "run")
    assert exported.model["classes"] == list(CLASSES)
    assert (exported.path / "labels.txt").read_text().splitlines() == list(CLASSES)


def test_the_file_alone_says_its_classes_and_preprocess(exported: Run) -> None:
    said = {entry.key: json.loads(entry.value) for entry in onnx.load(exported.file("model")).metadata_props}
    assert said["dsimg.classes"] == list(CLASSES)
    assert Preprocess.from_dict(said["dsimg.preprocess"]) == Preprocess.from_dict(exported.model["preprocess"])


def test_an_exported_run_is_measured_as_the_network_was(trained: Path, exported: Run, tmp_path: Path) -> None:
    found = []
    for index, source in enumerate((trained / "run", exported.path)):
        evaluate(EvaluateConfig(source=source, out=tmp_path / str(index)))
        found.append(json.loads((tmp_path / str(index) / "evaluation.json").read_text()))
    assert "measured" not in found[0]
    assert found[1]["measured"] == {"file": "model.onnx", "role": "model", "provider": "cpu"}
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert {key: found[0][key] for key in ("images", "correct", "confusion")} == {
        key: found[1][key] for key in ("images", "correct", "confusion")
    }


def test_a_file_that_takes_pixels_normalises_them_itself(trained: Path, exported: Run) -> None:
    run = export(ExportConfig(source=str(trained / "run"), out=trained / "pixels", uint8_input=True))
    served = open_served(run)
    (described,) = served.session.get_inputs()
    assert (described.name, described.shape, described.type) == ("images", ["batch", 32, 32, 3], "tensor(uint8)")
    pixels = golden_pixels(run)
    raw = served.session.run(["logits"], {"images": pixels})[0]
    np.testing.assert_allclose(raw, open_served(exported).logits(pixels), atol=1e-5)
    np.testing.assert_array_equal(raw, served.logits(pixels))


def test_half_precision_halves_the_weights_and_keeps_the_answer(trained: Path, exported: Run) -> None:
    run = export(ExportConfig(source=str(trained / "run"), out=trained / "half", dtype="fp16"))
    kinds = {tensor.data_type for tensor in onnx.load(run.file("model")).graph.initializer if len(tensor.dims) == 4}
    assert kinds == {onnx.TensorProto.FLOAT16}
    pixels = golden_pixels(exported)
    ours, theirs = open_served(run).logits(pixels), open_served(exported).logits(pixels)
    assert ours.dtype == np.float32
    assert 0 < np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()


@pytest.mark.parametrize("opset", [18, 22])
def test_an_opset_is_honoured(trained: Path, tmp_path: Path, opset: int) -> None:
    run = export(ExportConfig(source=str(trained / "run"), out=tmp_path / "run", opset=opset))
    versions = [entry.version for entry in onnx.load(run.file("model")).opset_import if not entry.domain]
    assert versions == [opset]
    assert run.manifest is not None
    assert run.manifest["metrics"]["opset"] == opset


def test_an_opset_that_the_exporter_does_not_write_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"wrote opset 18 where 13 was asked for\. Give --opset 18\."):
        export(ExportConfig(source=str(trained / "run"), out=tmp_path / "run", opset=13))


def test_images_that_are_gone_are_replaced_by_made_up_ones_and_that_is_said(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", classes=CLASSES)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "model": "tests.nets:with_batchnorm", "augment": "none"}
    train(TrainConfig(data=str(tmp_path / "data"), out=tmp_path / "run", **options))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    run = export(ExportConfig(source=str(tmp_path / "run"), out=tmp_path / "out"))
    assert run.manifest is not None
    assert "32 made-up pictures" in run.manifest["metrics"]["parity_images"]
    given = export(ExportConfig(source=str(tmp_path / "run"), out=tmp_path / "out2", data=str(tmp_path / "elsewhere")))
    assert given.manifest is not None
    assert f"12 of {tmp_path / 'elsewhere' / 'val'}" in given.manifest["metrics"]["parity_images"]


class Silent(nn.Module):
    """A network that says the same of every image, with a head that could change that, or without."""

    def __init__(self, *, head: bool, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, num_classes)
        nn.init.zeros_(self.head.weight)
        if not head:
            nn.init.zeros_(self.body[0].weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (N, 3, H, W) -> logits (N, num_classes)."""
        result: torch.Tensor = self.head(self.body(images))
        return result


def zero_head(num_classes: int) -> nn.Module:
    return Silent(head=True, num_classes=num_classes)


def all_zero(num_classes: int) -> nn.Module:
    return Silent(head=False, num_classes=num_classes)


def loud(num_classes: int) -> nn.Module:
    """A network whose activations are beyond 65504, the largest of half precision."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 4, 3), nn.Linear(4, num_classes)
    nn.init.normal_(first.weight, std=1e6)
    return nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def without_run(tmp_path: Path, function: str, **options: Any) -> ExportConfig:
    (tmp_path / "labels.txt").write_text("ant\nbee\nwasp\n")
    (tmp_path / "preprocess.json").write_text('{"input_size": [3, 40, 40], "mean": [0.5, 0.5, 0.5]}')
    return ExportConfig(
        source=f"tests.dsimg.test_export:{function}",
        out=tmp_path / "out",
        labels=tmp_path / "labels.txt",
        preprocess=tmp_path / "preprocess.json",
        **options,
    )


def test_a_zero_head_is_compared_with_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = export(without_run(tmp_path, "zero_head"))
    assert run.manifest is not None
    parity = run.manifest["metrics"]["parity"]
    assert not parity["vacuous"]
    assert 0 < parity["relative_error"] < 1e-5
    assert "says the same of every image (is it trained?)" in capsys.readouterr().out
    head = [
        tensor for tensor in onnx.load(run.file("model")).graph.initializer if tuple(tensor.dims) in ((3, 4), (4, 3))
    ]
    assert not onnx.numpy_helper.to_array(head[0]).any(), "the file must hold the network's own head"
    assert not (tmp_path / "out" / "random_head.onnx").exists()


def test_a_network_that_nothing_could_be_shown_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="says the same of every image, whatever its last layer is"):
        export(without_run(tmp_path, "all_zero"))
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_users_network_without_a_run_has_the_labels_and_the_preprocess_that_were_given(tmp_path: Path) -> None:
    run = export(without_run(tmp_path, "zero_head"))
    assert run.model["classes"] == list(CLASSES)
    assert run.model["preprocess"]["input_size"] == [3, 40, 40]
    assert run.model["preprocess"]["mean"] == [0.5, 0.5, 0.5]
    assert golden_pixels(run).shape == (COUNT, 40, 40, 3)
    assert run.manifest is not None
    assert run.manifest["parents"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "does not say what its classes are called. Give --labels a file"),
        ({"source": "no/such/run"}, "is no run folder, no weights of torchvision's"),
    ],
)
def test_a_source_that_does_not_say_enough_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = without_run(tmp_path, "zero_head")
    with pytest.raises(DsimgError, match=message):
        export(ExportConfig(**{**vars(config), **change}))


def test_labels_for_a_run_and_twice_the_same_label_are_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("ant\nant\nwasp\n")
    with pytest.raises(ConfigError, match="is a run, which has its classes"):
        export(ExportConfig(source=str(trained / "run"), out=tmp_path / "a", labels=tmp_path / "labels.txt"))
    config = without_run(tmp_path, "zero_head")
    (tmp_path / "labels.txt").write_text("ant\nant\nwasp\n")
    with pytest.raises(ConfigError, match="all different"):
        export(config)


def test_an_exported_run_is_no_source(exported: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has an ONNX file already"):
        export(ExportConfig(source=str(exported.path), out=tmp_path / "again"))


def test_values_beyond_half_precision_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leave the range of fp16; give --dtype fp32"):
        export(without_run(tmp_path, "loud", dtype="fp16"))
    assert not (tmp_path / "out" / "run.json").exists()


def hot(num_classes: int) -> nn.Module:
    """A network of small weights whose activations alone are beyond half precision; its logits are of order 1."""
    first, last = nn.Conv2d(3, 4, 3), nn.Linear(4, num_classes)
    nn.init.constant_(first.weight, 3000.0)
    nn.init.constant_(first.bias, 60_000.0)
    last.weight.data = torch.arange(4.0 * num_classes).reshape(num_classes, 4) * 1e-5
    return nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def test_activations_beyond_half_precision_are_refused_by_layer_and_leave_the_folder_free(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"values of layer '0' reach 1?\d\d,\d{3}, beyond 65,504: they leave the range"
    ):
        export(without_run(tmp_path, "hot", dtype="fp16"))
    assert not (tmp_path / "out").exists()
    export(without_run(tmp_path, "hot"))


def test_a_command_put_right_finds_the_folder_free(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        export(ExportConfig(source="no/such/run", out=tmp_path / "out"))
    with pytest.raises(ModelError, match="Give --opset 18"):
        export(ExportConfig(source=str(trained / "run"), out=tmp_path / "out", opset=13))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read --preprocess"), ("[1]", "must hold a JSON object")]
)
def test_a_preprocess_that_cannot_be_read_is_said_to_be_that(tmp_path: Path, content: str | None, message: str) -> None:
    config = without_run(tmp_path, "zero_head")
    assert config.preprocess is not None
    config.preprocess.unlink()
    if content is not None:
        config.preprocess.write_text(content)
    with pytest.raises(ConfigError, match=message):
        export(config)
    assert not (tmp_path / "out").exists()


def test_few_images_are_golden_once_each(trained: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "few", classes=CLASSES, train=1, val=1)
    run = export(ExportConfig(source=str(trained / "run"), out=tmp_path / "out", data=str(tmp_path / "few")))
    encoded = read_golden(run.file("golden")).encoded
    assert len(encoded) == len(set(encoded)) == 4  # three, and one turned
    assert run.manifest is not None
    assert run.manifest["metrics"]["parity"]["spread"] > 0


def test_the_same_command_does_nothing_and_another_is_refused(
    trained: Path, exported: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (exported.path / "run.json").read_bytes()
    export(ExportConfig(source=str(trained / "run"), out=exported.path))
    assert "finished run of this very config" in capsys.readouterr().out
    assert (exported.path / "run.json").read_bytes() == before
    with pytest.raises(RunError, match="opset was 20, now 21"):
        export(ExportConfig(source=str(trained / "run"), out=exported.path, opset=21))


def test_a_stopped_export_is_done_by_the_same_command(trained: Path, tmp_path: Path) -> None:
    config = ExportConfig(source=str(trained / "run"), out=tmp_path / "run")
    export(config)
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "model.onnx").write_bytes(b"half a file")
    again = export(config)
    assert open_served(again).logits(golden_pixels(again)).shape == (COUNT, 3)
