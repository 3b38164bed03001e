"""`dsimg quantize` on a network of two convolutions that tells five colours apart."""

import csv
import errno
import functools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from dsimg.errors import ConfigError, DataError, ModelError, RunError
from dsimg.folder import find_images, write_index
from dsimg.preprocess import Preprocess, normalise, read_pixels
from dsimg.run import Run
from dsimg_export.golden import read_golden, record
from dsimg_export.measuring import evaluate_session, evaluate_sessions
from dsimg_export.onnx_file import DEPENDS_ON_BATCH
from dsimg_export.quantize import QuantizeConfig, quantize
from dsimg_export.served import open_served
from dsimg_export.session import int8_share, latency, operators_run
from dsimg_export.trials import Images, read_images
from tests.export.files import change, fit_head, weights_of, write_network
from tests.export.golden_runs import edit_manifest, hash_again
from tests.export.runs import CLASSES, MODEL

PREPROCESS = Preprocess.from_dict(MODEL["preprocess"])
COLOURS = np.array([(90, 90, 90), (150, 90, 90), (90, 150, 90), (90, 90, 150), (150, 150, 90)])
TRAIN, VAL = 12, 8  # images a class


@pytest.fixture(scope="module", autouse=True)
def short_latency():
    """Measure for a moment, not for seconds: no test asks which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsimg_export.quantize.latency", functools.partial(latency, seconds=0.05))
        patch.setattr("dsimg_export.choosing.latency", functools.partial(latency, seconds=0.05))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures whose colour is their class, hardly seen through the noise."""
    root = tmp_path_factory.mktemp("quantize") / "data"
    rng = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        for number in range(TRAIN + VAL):
            pixels = np.clip(rng.normal(COLOURS[label] + rng.normal(0, 18, 3), 60, (16, 16, 3)), 0, 255)
            path = root / ("train" if number < TRAIN else "val") / name / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


def write_source(path, folder, *, outlier=False, softmax=False):
    """Write an exported run of a trained network; `outlier` makes one channel between the convolutions huge, which int8
    with one scale for all channels cannot hold together with the others."""
    images = find_images(folder, seed=0)
    preprocess = Preprocess.from_dict(MODEL["preprocess"])
    run, _ = Run.begin(path, stage="export", config={})
    file = write_network(path / "model.onnx", width=8, softmax=softmax)
    if outlier:
        weights = weights_of(file)
        first, bias, second = (weights[name].copy() for name in ("conv1.weight", "conv1.bias", "conv2.weight"))
        first[0], bias[0], second[:, 0] = 3000 * first[0], 3000 * np.abs(bias[0]) + 100, second[:, 0] / 3000
        change(file, {"conv1.weight": first, "conv1.bias": bias, "conv2.weight": second})
    files = [images.train.folder / name for name in images.train.files]
    fit_head(file, normalise(read_pixels(files, preprocess)[0], preprocess), images.train.labels)
    write_index(images, path / "index.jsonl.gz")
    encoded = [(images.val.folder / name).read_bytes() for name in images.val.files[:3]]
    record(encoded, {"model": file}, preprocess=preprocess, classes=CLASSES).save(path / "golden.safetensors")
    run.finish(seed=0, model=MODEL, metrics={})
    return Run.open(path)


def mislabelled(split, preprocess):
    """Read images with labels that are all wrong."""
    images = read_images(split, preprocess)
    return Images(images.pixels, (images.labels + 1) % 5)


@pytest.fixture(scope="module")
def source(folder, tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source") / "run", folder)


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "run"
    return quantize(QuantizeConfig(source=source.path, out=out, calibration_images=20, max_drop=0.1, threads=1))


def accuracy(run, role, folder):
    served = open_served(run, role=role)
    split = find_images(folder, seed=0).val
    return evaluate_session(served.logits, split=split, preprocess=served.preprocess, classes=CLASSES).report["top1"]


def test_the_run_holds_both_files_and_all_that_later_stages_read(source, quantized):
    assert sorted(path.name for path in quantized.path.iterdir() if path.name != ".lock") == [
        "calibration.json",
        "config.json",
        "evaluation.json",
        "golden.safetensors",
        "index.jsonl.gz",
        "labels.txt",
        "model.onnx",
        "model_reduced.onnx",
        "predictions.csv",
        "run.json",
    ]
    assert quantized.model == source.model
    for role in ("model", "reduced"):
        assert int8_share(operators_run(quantized.file(role))).int8 == 3
        served = open_served(quantized, role=role)
        golden = read_golden(quantized.file("golden"))
        np.testing.assert_allclose(served.logits(golden.views.pixels), golden.logits[role], atol=1e-5)
    assert golden.encoded == read_golden(source.file("golden")).encoded
    largest = {
        role: max(np.abs(w.astype(int)).max() for w in weights_of(quantized.file(role)).values() if w.dtype == np.int8)
        for role in ("model", "reduced")
    }
    assert largest == {"model": 127, "reduced": 64}


def test_the_figures_are_those_of_the_files(source, quantized, folder):
    metrics = quantized.manifest["metrics"]
    assert metrics["fp32"]["top1"] == accuracy(source, "model", folder)
    assert metrics["int8"]["top1"] == accuracy(quantized, "model", folder)
    assert metrics["reduced"]["top1"] == accuracy(quantized, "reduced", folder)
    assert 0.6 < metrics["fp32"]["top1"]["value"] < 1
    assert metrics["fp32"]["images"] == len(CLASSES) * VAL
    assert [row["images"] for row in metrics["flips"]] == [VAL] * 5
    assert metrics["bytes"]["model"] == quantized.file("model").stat().st_size
    assert metrics["int8_macs"] == 1.0
    assert metrics["in_float"] == {"model": [], "reduced": []}
    for name in ("fp32", "int8"):
        assert 0 < metrics[name]["latency_ms"]["p50"] <= metrics[name]["latency_ms"]["p99"]


def test_what_was_tried_and_on_which_images_is_recorded(quantized):
    metrics = quantized.manifest["metrics"]
    tried = dict(metrics["tried"])
    assert list(tried) == ["fp32", "minmax", "percentile", "mse"]
    assert tried["fp32"]["agreement"] == 1.0
    assert {entry["images"] for entry in tried.values()} == {len(CLASSES) * TRAIN - 20}
    del tried["fp32"]
    merit = {name: (entry["correct"], entry["agreement"], -entry["loss"]) for name, entry in tried.items()}
    assert metrics["method"] == max(merit, key=merit.get)
    recorded = json.loads(quantized.file("calibration").read_text())
    assert len(recorded["files"]) == metrics["calibration_images"] == 20
    assert len(recorded["choosing_files"]) == 40
    assert not set(recorded["files"]) & set(recorded["choosing_files"])
    assert {"images", "logits"} <= recorded["ranges"].keys()
    assert recorded["sensitivity"] == []


def test_a_method_that_is_named_is_the_only_one_tried(source, tmp_path):
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="mse", max_drop=0.1, threads=1)
    metrics = quantize(config).manifest["metrics"]
    assert metrics["method"] == "mse"
    assert list(metrics["tried"]) == ["fp32", "mse"]


def test_layers_that_hurt_most_go_back_to_float(folder, tmp_path):
    source = write_source(tmp_path / "source", folder, outlier=True)
    run = quantize(QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.0, threads=1))
    metrics = run.manifest["metrics"]
    assert metrics["tried"]["minmax"]["correct"] < metrics["tried"]["fp32"]["correct"] - 5
    # The huge channel lies between the two convolutions: both must leave it alone.
    assert set(metrics["in_float"]["model"]) == {"conv1", "conv2"}
    assert set(metrics["float_products"]) == {"conv1", "conv2"}
    assert metrics["int8_macs"] < 0.01
    assert metrics["drop"] <= 0
    sensitivity = json.loads(run.file("calibration").read_text())["sensitivity"]
    errors = {entry["layer"]: entry["relative_error"] for entry in sensitivity}
    assert set(errors) == {"conv1", "conv2", "pool", "head"}
    assert min(errors["conv1"], errors["conv2"]) > 10 * max(errors["pool"], errors["head"])


def test_layers_in_float_are_counted_for_both_files_in_the_same_readings(folder, tmp_path, monkeypatch):
    readings = readings_of(monkeypatch)
    monkeypatch.setattr("dsimg_export.choosing.read_images", mislabelled)  # so that it is decided on the report
    source = write_source(tmp_path / "source", folder, outlier=True)
    run = quantize(QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.02, threads=1))
    # fp32 and both files; then both with one and with two layers of four in float.
    assert readings == [3, 4]
    assert {len(names) for names in run.manifest["metrics"]["in_float"].values()} == {2}


def test_a_drop_that_nothing_brings_down_is_told(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dsimg_export.choosing.together", lambda searches, measured: dict.fromkeys(searches))
    source = write_source(tmp_path / "source", folder, outlier=True)
    run = quantize(QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.0, threads=1))
    metrics = run.manifest["metrics"]
    assert metrics["drop"] > 0
    assert metrics["recommended"] == "fp32"
    assert metrics["why"] == f"int8 loses {100 * metrics['drop']:.2f} points, more than --max_drop 0 allows"


def test_a_processor_that_saturates_runs_the_file_of_seven_bits(source, tmp_path, monkeypatch):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "avx2")
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.1, threads=1)
    run = quantize(config)
    metrics = run.manifest["metrics"]
    assert metrics["role"] == "reduced"
    assert metrics["int8"]["top1"] == metrics["reduced"]["top1"]
    assert metrics["machine"]["int8"] == "saturating"
    assert set(read_golden(run.file("golden")).logits) == {"reduced"}
    assert open_served(run).role == "reduced"
    assert run.has("model")


def test_a_transformer_is_tried_with_dynamic_ranges_too(folder, tmp_path):
    source = write_source(tmp_path / "source", folder, softmax=True)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", calibration_images=20, max_drop=0.5, threads=1)
    metrics = quantize(config).manifest["metrics"]
    assert list(metrics["tried"]) == ["fp32", "minmax", "percentile", "mse", "dynamic"]


def depends_on_batch(run):
    """Whether the file says so of itself."""
    return DEPENDS_ON_BATCH in {entry.key for entry in onnx.load(run.file("model")).metadata_props}


def readings_of(monkeypatch):
    """Return a list that gets the number of files measured in each reading of the reported images."""
    readings = []

    def counted(answers, **options):
        readings.append(len(answers))
        return evaluate_sessions(answers, **options)

    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", "vnni")
    monkeypatch.setattr("dsimg_export.choosing.evaluate_sessions", counted)
    return readings


def test_ranges_that_depend_on_the_batch_are_measured_one_image_at_a_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dsimg_export.choosing.Chooser._fastest", lambda self, ways: ways[-1])
    source = write_source(tmp_path / "source", folder, softmax=True)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", calibration_images=20, max_drop=0.9, threads=1)
    run = quantize(config)
    metrics = run.manifest["metrics"]
    assert metrics["method"] == "dynamic"
    assert depends_on_batch(run)
    served, images = open_served(run), read_images(find_images(folder, seed=0).val, PREPROCESS)
    alone = np.concatenate(
        [raw_logits(served, images.pixels[place : place + 1]) for place in range(len(images.labels))]
    )
    assert np.abs(raw_logits(served, images.pixels) - alone).max() > 1e-4
    np.testing.assert_array_equal(served.logits(images.pixels), alone)
    assert metrics["int8"]["correct"] == (alone.argmax(1) == images.labels).sum()
    with run.file("predictions").open() as stream:
        assert [float(row["probability"]) for row in csv.DictReader(stream)] == pytest.approx(
            softmax(alone).max(1), abs=1e-5
        )
    golden = read_golden(run.file("golden"))
    singly = [raw_logits(served, golden.views.pixels[place : place + 1])[0] for place in range(3)]
    np.testing.assert_array_equal(golden.logits[served.role], np.stack(singly))
    recorded = json.loads(run.file("calibration").read_text())
    assert (metrics["calibration_images"], recorded["files"], recorded["ranges"]) == (0, [], {})


def raw_logits(served, pixels):
    """Return what the session says of pixels (N, H, W, 3) in one batch."""
    return served.session.run(["logits"], {"images": normalise(pixels, PREPROCESS)})[0]


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def test_the_same_seed_gives_the_same_files(source, quantized, tmp_path):
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", calibration_images=20, max_drop=0.1, threads=1)
    again = quantize(config)
    for role in ("model", "reduced", "calibration"):
        assert again.file(role).read_bytes() == quantized.file(role).read_bytes()


def test_unreadable_calibration_images_are_left_out_and_named(folder, tmp_path):
    source = write_source(tmp_path / "source", folder)
    data = tmp_path / "data"
    for path in folder.rglob("*.png"):
        (data / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (data / path.relative_to(folder)).write_bytes(path.read_bytes())
    for name in CLASSES:
        (data / "train" / name / "00.png").write_bytes(b"no picture")
    options = {"source": source.path, "data": str(data), "method": "minmax", "max_drop": 0.5, "threads": 1}
    run = quantize(QuantizeConfig(out=tmp_path / "run", **options))
    recorded = json.loads(run.file("calibration").read_text())
    assert len(recorded["files"]) + len(recorded["unreadable"]) == 30
    assert set(recorded["unreadable"]) <= {f"{name}/00.png" for name in CLASSES}
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"can be decoded\. Give --data a folder with images"):
        quantize(QuantizeConfig(out=tmp_path / "other", **options))


def test_the_report_and_the_predictions_are_those_of_the_file_that_runs_here(quantized, folder):
    served, images = open_served(quantized), read_images(find_images(folder, seed=0).val, PREPROCESS)
    expected = [CLASSES[label] for label in served.logits(images.pixels).argmax(1)]
    with quantized.file("predictions").open() as stream:
        assert [row["predicted"] for row in csv.DictReader(stream)] == expected
    report = json.loads(quantized.file("evaluation").read_text())
    assert report["top1"] == quantized.manifest["metrics"]["int8"]["top1"]
    assert report["measured"] == {"file": served.path.name, "role": served.role, "provider": "cpu"}


@pytest.mark.parametrize(("machine", "expected"), [("x86_64", "uint8"), ("aarch64", "int8")])
def test_activations_are_of_the_type_that_is_fast_on_this_machine(source, tmp_path, monkeypatch, machine, expected):
    monkeypatch.setattr("dsimg.machine.platform.machine", lambda: machine)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.5, threads=1)
    run = quantize(config)
    assert not depends_on_batch(run)
    model = onnx.load(run.file("model"))
    first = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    assert weights_of(run.file("model"))[first.input[2]].dtype == expected


def test_every_image_is_decoded_once_for_all_files_that_are_measured(source, tmp_path, monkeypatch):
    readings = readings_of(monkeypatch)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.5, threads=1)
    quantize(config)
    assert readings == [3]  # fp32 and both int8 files


def test_a_network_that_is_not_finite_is_refused_before_the_work(folder, tmp_path):
    source = write_source(tmp_path / "source", folder)
    file = source.path / "model.onnx"
    change(file, {"head.bias": np.full(5, np.nan, np.float32)})
    hash_again(source.path)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", threads=1)
    with pytest.raises(ModelError, match=r"model\.onnx gives NaN or infinity on 30 of 30 images in fp32"):
        quantize(config)


def test_what_is_refused_claims_no_folder(source, quantized, folder, tmp_path):
    out = tmp_path / "run"
    without_golden = write_source(tmp_path / "without", folder)
    edit_manifest(without_golden.path, lambda content: content["files"].pop("golden"))
    refused = [
        ({"source": quantized.path}, ModelError),
        ({"source": source.path, "data": str(tmp_path / "nowhere")}, DataError),
        ({"source": without_golden.path}, RunError),
    ]
    for flags, error in refused:
        with pytest.raises(error):
            quantize(QuantizeConfig(out=out, **flags))
        assert not out.exists()


def test_a_finished_run_needs_no_images_to_be_found_again(source, quantized, folder, monkeypatch):
    monkeypatch.setattr("dsimg_export.quantize.find_samples", None)
    config = QuantizeConfig(source=source.path, out=quantized.path, calibration_images=20, max_drop=0.1, threads=1)
    assert quantize(config).manifest == quantized.manifest


def test_a_disk_that_is_full_is_named_and_leaves_no_trials(source, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dsimg_export.calibrate.onnx.save", full)
    config = QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", threads=1)
    with pytest.raises(ModelError, match=r"No space left on device.*TMPDIR"):
        quantize(config)
    assert not config.out.exists()


def test_what_cannot_be_quantized_is_named(source, quantized, tmp_path):
    with pytest.raises(ModelError, match=r"model\.onnx is in int8 already"):
        quantize(QuantizeConfig(source=quantized.path, out=tmp_path / "run"))
    with pytest.raises(RunError, match=r"there is no run folder .*nowhere"):
        quantize(QuantizeConfig(source=Path("nowhere"), out=tmp_path / "run"))


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("calibration_images", 0, "--calibration_images is 0; it must be at least 1"),
        ("max_drop", -0.1, "--max_drop is -0.1; it must be at least 0 and below 1"),
        ("threads", 0, "--threads is 0; it must be at least 1"),
    ],
)
def test_flags_are_checked(flag, value, says):
    with pytest.raises(ConfigError, match=says):
        QuantizeConfig(source=Path("a"), out=Path("b"), **{flag: value})


def test_layers_put_back_for_the_reported_images_are_said_to_flatter(folder, tmp_path, monkeypatch):
    # fp32 is wrong on the images that choose, so that int8 loses nothing there; what it loses shows in the report.
    monkeypatch.setattr("dsimg_export.choosing.read_images", mislabelled)
    source = write_source(tmp_path / "source", folder, outlier=True)
    run = quantize(QuantizeConfig(source=source.path, out=tmp_path / "run", method="minmax", max_drop=0.02, threads=1))
    metrics = run.manifest["metrics"]
    assert metrics["tried"]["minmax"]["correct"] >= metrics["tried"]["fp32"]["correct"]
    assert set(metrics["in_float"]["model"]) == {"conv1", "conv2"}
    assert metrics["flattered"] == ["model", "reduced"]
    assert metrics["drop"] <= 0.02
