import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_static
from PIL import Image

from dsimg import cli
from dsimg.console import Terminal
from dsimg.errors import ConfigError, RunError
from dsimg.evaluate import EvaluateConfig, evaluate
from dsimg.preprocess import decode, normalise, resize_and_crop
from dsimg.run import Run
from dsimg_export import golden
from dsimg_export.golden import read_golden
from dsimg_export.verify import VerifyConfig, verify
from tests.conftest import ROOT, write_image
from tests.export.files import change, noise, write_network
from tests.export.golden_runs import edit_golden, edit_manifest, hash_again, write_golden_run
from tests.export.runs import CLASSES, PREPROCESS

CHECKS = [
    *("files", "labels", "preprocess", "session", "operators"),
    *("decode", "orientation", "resize", "normalise", "model", "parent"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("made") / "run").path


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def check(path, **flags):
    return dict(verify(VerifyConfig(source=path, threads=1, **flags)))


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_verifies_where_it_was_made_and_nothing_is_written(run):
    before = contents(run)
    rows = check(run)
    assert list(rows) == CHECKS
    assert rows["labels"] == "5 classes, in one order in run.json, labels.txt, golden.safetensors, model.onnx"
    assert rows["preprocess"] == "the same in run.json and model.onnx"
    assert rows["session"].startswith("model.onnx in fp32 on cpu, onnxruntime ")
    assert "1 GlobalAveragePool" in rows["operators"]
    assert rows["orientation"] == "3 images lie as recorded"
    assert rows["resize"] == "16x16, to the bit"
    assert rows["model"] == "logits to the bit, the same Top-1 on 3 of 3 (limit 0.001)"
    assert rows["parent"] == "none"
    assert contents(run) == before


def test_a_run_that_was_moved_verifies(run, tmp_path, monkeypatch):
    moved = Path(shutil.move(run, tmp_path / "elsewhere" / "renamed"))
    assert list(check(moved)) == CHECKS
    monkeypatch.chdir(moved.parent)
    assert list(check(Path("renamed"))) == CHECKS


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.onnx", "golden.safetensors", "labels.txt", "config.json"])
def test_a_flipped_byte_is_found_in_any_file(run, name):
    flip(run / name, -3)
    with pytest.raises(RunError, match=rf"run fails at 'files': {name} has other bytes than those that were hashed\."):
        check(run)


def test_every_file_that_is_not_as_listed_is_named(run):
    (run / "labels.txt").unlink()
    size = (run / "model.onnx").stat().st_size
    (run / "model.onnx").write_bytes((run / "model.onnx").read_bytes()[:-1])
    message = f"labels.txt is missing; model.onnx has {size - 1:,} bytes instead of {size:,}. Copy the run again"
    with pytest.raises(RunError, match=message):
        check(run)


def test_another_providers_logits_are_found(run):
    logits = read_golden(run / "golden.safetensors").logits["model"]
    spread = np.ptp(logits, axis=0).max()
    edit_golden(run, logits={"model": logits + np.float32(5e-4 * spread)})
    assert "logits up to 0.0005 of their spread apart" in check(run)["model"]
    edit_golden(run, logits={"model": logits + np.float32(5e-3 * spread)})
    message = (
        r"at 'model': logits up to 0\.005 .* more than 0\.001 is not rounding in fp32\. The machine is like the one"
    )
    with pytest.raises(RunError, match=message):
        check(run)
    made_by = {**read_golden(run / "golden.safetensors").made_by, "provider": "cuda", "onnxruntime": "0.1"}
    edit_golden(run, made_by=made_by)
    with pytest.raises(
        RunError, match=r"recorded with onnxruntime 0\.1, here .*; provider cuda, here cpu\. Install the"
    ):
        check(run)


def test_weights_that_changed_without_a_trace_are_the_model(run):
    proto = onnx.load(run / "model.onnx")
    for tensor in proto.graph.initializer:
        if tensor.name == "head.bias":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[::-1].copy(), tensor.name))
    onnx.save(proto, run / "model.onnx")
    hash_again(run)
    with pytest.raises(RunError, match="fails at 'model'"):
        check(run)


@pytest.mark.parametrize("key", ["mean", "std"])
def test_an_edited_normalisation_is_found_by_the_file_and_by_the_images(run, tmp_path, key):
    def change(content):
        content["model"]["preprocess"][key] = [0.5, 0.5, 0.51]

    edit_manifest(run, change)
    message = rf"at 'preprocess': {key} is \[0\.5, 0\.5, 0\.51\] in run\.json, and \[0\.5, 0\.5, 0\.5\] in model\.onnx"
    with pytest.raises(RunError, match=message):
        check(run)
    silent = write_golden_run(tmp_path / "silent", described=False).path
    assert check(silent)["preprocess"] == "model.onnx says nothing of it: see resize and normalise"
    edit_manifest(silent, change)
    with pytest.raises(RunError, match=r"at 'normalise': normalised pixels are up to .* apart, most in blue"):
        check(silent)


def test_another_crop_is_found_by_the_images(tmp_path):
    silent = write_golden_run(tmp_path / "silent", described=False).path
    edit_manifest(silent, lambda content: content["model"]["preprocess"].update(crop_pct=0.8))
    with pytest.raises(RunError, match=r"fails at 'resize': resized pixels are up to \d+ of 255 apart"):
        check(silent)


def test_labels_in_another_order_are_found_wherever_they_are(run, made, tmp_path):
    other = [CLASSES[1], CLASSES[0], *CLASSES[2:]]
    (run / "labels.txt").write_text("".join(f"{name}\n" for name in other))
    hash_again(run)
    with pytest.raises(RunError, match=r"at 'labels': class 0 is 'ant' in run\.json, and 'bee' in labels\.txt\."):
        check(run)
    (run / "labels.txt").write_text("".join(f"{name}\n" for name in CLASSES[:4]))
    hash_again(run)
    with pytest.raises(RunError, match=r"at 'labels': labels\.txt names 4 classes, and run\.json 5\."):
        check(run)
    # The order of run.json and labels.txt alone, changed together: the golden images, then the ONNX file, know better.
    both = Path(shutil.copytree(made, tmp_path / "both"))
    (both / "labels.txt").write_text("".join(f"{name}\n" for name in other))
    edit_manifest(both, lambda content: content["model"].update(classes=other))
    hash_again(both)
    with pytest.raises(RunError, match=r"class 0 is 'bee' in run\.json, and 'ant' in golden\.safetensors\."):
        check(both)
    edit_golden(both, classes=tuple(other))
    with pytest.raises(RunError, match=r"class 0 is 'bee' in run\.json, and 'ant' in model\.onnx\."):
        check(both)


def brighter(data):
    return Image.fromarray(np.asarray(decode(data)) // 2 + 90)


def on_its_side(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize(
    ("step", "name", "instead"),
    [
        ("decode", "decode", brighter),
        ("orientation", "decode", on_its_side),
        ("resize", "resize_and_crop", lambda image, preprocess: np.asarray(image.resize((16, 16), 0))),
        ("normalise", "normalise", lambda pixels, preprocess: normalise(pixels, preprocess) * np.float32(1.001)),
    ],
)
def test_the_first_step_that_differs_is_named(run, monkeypatch, step, name, instead):
    said = io.StringIO()
    monkeypatch.setattr(cli, "_context", cli.Context(Terminal(stream=said), None))
    monkeypatch.setattr(golden, name, instead)
    with pytest.raises(RunError, match=f"run fails at '{step}': "):
        check(run)
    rows = [line.split(maxsplit=1) for line in said.getvalue().splitlines()[1:]]
    assert [row[0] for row in rows] == CHECKS
    place = CHECKS.index(step)
    assert rows[place][1] == "FAILS"
    assert all(row[1] == "not looked at" for row in rows[place + 1 :])
    assert not any(row[1] in ("FAILS", "not looked at") for row in rows[:place])


def quantized(reduce_range, *, activations=QuantType.QUInt8):
    """Return what writes an int8 network, its weights in 8 bits or in 7."""

    class Batches:
        rest = iter([{"images": noise(4)}])

        def get_next(self):
            return next(self.rest, None)

    def write(path):
        float_path = write_network(path.with_suffix(".fp32"))
        options = {"activation_type": activations, "per_channel": True, "reduce_range": reduce_range}
        quantize_static(float_path, path, Batches(), **options)
        float_path.unlink()

    return write


def test_the_twin_for_the_processor_is_verified(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    path = write_golden_run(tmp_path / "run", networks={"model": quantized(False), "reduced": quantized(True)}).path
    logits = read_golden(path / "golden.safetensors").logits
    assert np.abs(logits["model"] - logits["reduced"]).max() > 0  # or either would do
    rows = check(path)
    assert rows["session"].startswith("model.onnx in int8 on cpu")
    assert rows["operators"].startswith("3 of 3 convolutions and matrix products in int8; ")
    assert rows["model"].startswith("logits to the bit, the same Top-1 on 3 of 3 (limit 0.05)")
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    rows = check(path)
    assert rows["session"].startswith("model_reduced.onnx in int8 on cpu")
    assert rows["session"].endswith("; 7-bit weights, because int8 sums saturate on this processor")
    assert rows["model"].startswith("logits to the bit")
    assert rows["model"].endswith("; recorded with int8 exact, here saturating")


def test_on_a_gpu_the_processor_says_nothing_of_the_file():
    assert golden.made_on("cuda")["int8"] == "exact"


@pytest.mark.parametrize(("processor", "told"), [("x86_64", True), ("aarch64", False)])
def test_signed_activations_are_told_on_x86(tmp_path, monkeypatch, processor, told):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    monkeypatch.setattr(golden.platform, "machine", lambda: processor)
    signed, unsigned = (
        write_golden_run(tmp_path / kind.name, networks={"model": quantized(False, activations=kind)}).path
        for kind in (QuantType.QInt8, QuantType.QUInt8)
    )
    text = "activations are signed, as for ARM, and slow on x86: quantize the export on such a machine"
    assert (text in check(signed)["session"]) is told
    assert text not in check(unsigned)["session"]


def test_without_a_twin_a_saturating_processor_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    path = write_golden_run(tmp_path / "run", networks={"model": quantized(False)}).path
    assert check(path)["session"].endswith(
        "int8 sums saturate on this processor, and the run has no file with 7-bit weights"
    )
    # What was recorded there says nothing of a processor with exact sums.
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    with pytest.raises(RunError, match=r"at 'model': the logits were recorded on a processor where int8 sums saturate"):
        check(path)


def test_logits_recorded_where_sums_saturate_are_compared_by_the_twin(tmp_path, monkeypatch):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    path = write_golden_run(tmp_path / "run", networks={"model": quantized(False), "reduced": quantized(True)}).path
    logits = dict(read_golden(path / "golden.safetensors").logits)
    edit_golden(path, logits={**logits, "model": logits["model"] + 1})
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    found = check(path)["model"]
    assert found.startswith("model_reduced.onnx, which is alike on all processors: logits to the bit")
    edit_golden(path, logits={"model": logits["model"]})
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    with pytest.raises(RunError, match=r"golden\.safetensors has no logits of model_reduced\.onnx, only of model\."):
        check(path)


def test_the_parent_is_compared_where_it_still_is(tmp_path):
    parent = write_golden_run(tmp_path / "parent")
    child = write_golden_run(tmp_path / "child", parents=(parent,)).path
    where = str(parent.path)
    assert check(child)["parent"] == f"{where}: logits to the bit, the same Top-1 on 3 of 3"
    wide = {"model": lambda path: write_network(path, width=9)}
    other = write_golden_run(tmp_path / "wide", parents=(parent,), networks=wide).path
    theirs, ours = (read_golden(path / "golden.safetensors").logits["model"] for path in (parent.path, other))
    apart = np.abs(ours - theirs).max() / np.ptp(theirs, axis=0).max()
    assert check(other)["parent"].startswith(
        f"{where}: logits up to {apart:.2g} of their spread apart, the same Top-1 on "
    )
    edit_manifest(parent.path, lambda content: content.update(seed=1))
    assert check(child)["parent"] == f"{where} has been made anew since: not compared"
    shutil.rmtree(parent.path)
    assert check(child)["parent"] == f"{where} is not here: not compared"


def remove_model(path):
    (path / "model.onnx").unlink()


def put_nan(path):
    change(path / "model.onnx", {"head.bias": np.full(5, np.nan, np.float32)})
    hash_again(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_model, r"cannot be read \(.*model\.onnx is missing, though run\.json lists it\..*\): not compared"),
        (lambda path: (path / "run.json").write_text("{}"), r"cannot be read \(.*has schema None, .*\): not compared"),
        (put_nan, r"logits of 0 of 3 images are not finite, and of 3 in what they are compared with"),
    ],
)
def test_a_parent_that_cannot_be_compared_fails_nothing(tmp_path, spoil, message):
    parent = write_golden_run(tmp_path / "parent")
    spoil(parent.path)
    child = write_golden_run(tmp_path / "child", parents=(parent,)).path
    assert re.search(message, check(child)["parent"])


def test_a_parent_whose_folder_cannot_be_looked_into_fails_nothing(run):
    where = "/" + 300 * "x"  # a name that no file system takes: an OSError, as for a folder without rights
    edit_manifest(run, lambda content: content.update(parents=[{"path": where, "sha256": ""}]))
    assert check(run)["parent"].startswith(f"{where} cannot be read (")


def test_a_parent_without_an_onnx_file_is_named(tmp_path):
    parent, _ = Run.begin(tmp_path / "trained", stage="train", config={})
    parent.finish(seed=0, model={}, metrics={})
    child = write_golden_run(tmp_path / "child", parents=(parent,)).path
    assert check(child)["parent"].startswith(f"{parent.path} is as it was; its network is torch's")
    with pytest.raises(RunError, match=r"trained has no ONNX file to verify\. `dsimg export --source .*trained` makes"):
        check(parent.path)


@pytest.fixture
def labelled(tmp_path):
    """Five classes of two images, 16 x 16."""
    for label, name in enumerate(CLASSES):
        for number in range(2):
            write_image(tmp_path / "data" / name / f"{number}.png", label=label, number=number, side=16)
    return tmp_path / "data"


def test_accuracy_is_measured_and_compared_with_what_was_recorded(run, labelled):
    session = golden.open_session(run / "model.onnx")
    preprocess = golden.Preprocess.from_dict(PREPROCESS)
    right = 0
    for label, name in enumerate(CLASSES):
        for file in sorted((labelled / name).iterdir()):
            image = normalise(resize_and_crop(decode(file.read_bytes()), preprocess)[None], preprocess)
            right += int(session.run(["logits"], {"images": image})[0].argmax()) == label
    first = check(run, data=str(labelled))["accuracy"]
    assert first.startswith(f"Top-1 {right / 10:.2%} ")
    assert first.endswith("of 10 images; nothing is recorded of these very images: not compared")
    recorded = record_predictions(run, labelled)
    assert check(run, data=str(labelled))["accuracy"].endswith(f"; no predictions other than in {recorded}")
    spoil_predictions(recorded, 1)
    assert check(run, data=str(labelled))["accuracy"].endswith(f"; 1 prediction other than in {recorded}")
    spoil_predictions(recorded, 2)
    with pytest.raises(RunError, match=r"at 'accuracy': .* and 2 predictions are others than in .*predictions\.csv"):
        check(run, data=str(labelled))


def record_predictions(run, data, *, into=None):
    """Write predictions of a run into it, or into another one, as its own; return the file."""
    out = run.parent / "evaluation"
    evaluate(EvaluateConfig(source=run, data=str(data), out=out, threads=1, workers=1))
    target = (into or run) / "predictions.csv"
    shutil.copyfile(out / "predictions.csv", target)
    edit_manifest(target.parent, lambda content: content["files"].update(predictions={"path": "predictions.csv"}))
    hash_again(target.parent)
    return target


def spoil_predictions(path, count):
    """Change the first predictions in a file."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows[:count]:
        row["predicted"] = "none"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    if (path.parent / "run.json").exists():
        hash_again(path.parent)


def test_what_evaluate_wrote_here_proves_less_than_what_the_run_brought(run, labelled):
    evaluate(EvaluateConfig(source=run, data=str(labelled), threads=1, workers=1))
    (here,) = run.glob("evaluations/*/predictions.csv")
    doubt = f"; no predictions other than in {here}, which is not hashed and may have been measured here"
    assert check(run, data=str(labelled))["accuracy"].endswith(doubt)
    brought = record_predictions(run, labelled)
    os.utime(brought, (0, 0))  # older than the evaluation
    spoil_predictions(brought, 2)
    with pytest.raises(RunError, match=r"2 predictions are others than in .*run/predictions\.csv"):
        check(run, data=str(labelled))


def test_an_export_is_compared_with_what_its_training_predicted(run, labelled, tmp_path):
    parent, _ = Run.begin(tmp_path / "trained", stage="train", config={})
    parent.finish(seed=0, model={}, metrics={})
    recorded = record_predictions(run, labelled, into=parent.path)
    child = write_golden_run(tmp_path / "child", parents=(Run.open(parent.path),)).path
    told = f"; no predictions other than in {recorded}, made in training"
    assert check(child, data=str(labelled))["accuracy"].endswith(told)
    edit_manifest(parent.path, lambda content: content.update(seed=1))  # made anew
    assert "nothing is recorded of these very images" in check(child, data=str(labelled))["accuracy"]


def test_predictions_of_the_twin_for_other_processors_are_not_compared(run, labelled):
    recorded = record_predictions(run, labelled)
    shutil.copyfile(run.parent / "evaluation" / "evaluation.json", run / "evaluation.json")
    spoil_predictions(recorded, 10)
    with pytest.raises(RunError, match=r"10 predictions are others"):
        check(run, data=str(labelled))
    report = json.loads((run / "evaluation.json").read_text())
    assert report["measured"]["role"] == "model"
    report["measured"]["role"] = "reduced"
    (run / "evaluation.json").write_text(json.dumps(report))
    told = "nothing is recorded of these very images by model.onnx, only by its twin for other processors: not compared"
    assert check(run, data=str(labelled))["accuracy"].endswith(told)


def test_images_on_one_side_only_are_left_out_and_those_unreadable_only_here_fail(run, labelled, tmp_path):
    for number in range(2, 5):
        for label, name in enumerate(CLASSES):
            write_image(labelled / name / f"{number}.png", label=label, number=number, side=16)
    recorded = record_predictions(run, labelled)
    lost = labelled / "bee" / "1.png"
    lost.rename(tmp_path / "aside.png")
    found = check(run, data=str(labelled))["accuracy"]
    assert found.endswith(f"; no predictions other than in {recorded}, among 24 images that are in both")
    lost.write_bytes(b"no image")
    message = r"24 images; 1 more that .*predictions\.csv has predictions of cannot be read here, first bee/1\.png \("
    with pytest.raises(RunError, match=message):
        check(run, data=str(labelled))
    for name in CLASSES[:2]:  # others, some of which are called the same
        shutil.rmtree(labelled / name)
        write_image(labelled / name / "other.png", label=0, number=0, side=16)
    assert check(run, data=str(labelled))["accuracy"].endswith("nothing is recorded of these very images: not compared")


def test_a_provider_that_is_not_here_is_an_error(run):
    with pytest.raises(ConfigError, match="fails at 'session': --provider cuda: "):
        check(run, provider="cuda")


def command(*words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'export'}"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=environment)


def test_the_command_ends_with_2_and_one_message(run):
    flip(run / "model.onnx", 40)
    answer = command("-m", "dsimg", "verify", "--source", str(run))
    assert answer.returncode == 2, answer.stderr
    last = answer.stdout.splitlines()[-1]
    assert last.startswith(f"error: {run} fails at 'files': model.onnx has other bytes")
    assert answer.stdout.count("error:") == 1
    assert answer.stderr == ""


@pytest.mark.parametrize("module", ["verify", "bench"])
def test_torch_and_matplotlib_are_not_loaded(module):
    heavy = "{'torch', 'torchvision', 'deepspeed', 'matplotlib'}"
    code = f"import sys, dsimg_export.{module}; found = {heavy} & sys.modules.keys(); assert not found, found"
    answer = command("-c", code)
    assert answer.returncode == 0, answer.stderr
