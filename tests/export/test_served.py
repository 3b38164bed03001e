import numpy as np
import onnx
import pytest

from dsimg.errors import RunError
from dsimg.preprocess import normalise
from dsimg_export.onnx_file import take_pixels
from dsimg_export.served import open_served, role_here
from dsimg_export.session import open_session
from tests.export.files import write_network
from tests.export.golden_runs import edit_manifest, write_golden_run
from tests.export.runs import CLASSES, write_run

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)


def test_pixels_are_normalised_as_the_run_says(tmp_path):
    run = write_run(tmp_path / "run")
    served = open_served(run, threads=2)
    assert (served.role, served.path, served.classes) == ("model", run.path / "model.onnx", tuple(CLASSES))
    assert served.session.get_session_options().intra_op_num_threads == 2
    images = (PIXELS.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    expected = open_session(served.path).run(["logits"], {"images": images.astype(np.float32)})[0]
    found = served.logits(PIXELS)
    assert found.shape == (3, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_file_that_normalises_by_itself_gets_pixels(tmp_path):
    run = write_run(tmp_path / "run")
    served = open_served(run)
    expected = served.session.run(["logits"], {"images": normalise(PIXELS, served.preprocess)})[0]
    proto = onnx.load(served.path)
    take_pixels(proto, served.preprocess)
    onnx.save(proto, tmp_path / "pixels.onnx")

    def write(path):
        path.write_bytes((tmp_path / "pixels.onnx").read_bytes())

    other = open_served(write_golden_run(tmp_path / "other", networks={"model": write}))
    assert other.session.get_inputs()[0].shape[1:] == [16, 16, 3]
    np.testing.assert_allclose(other.logits(PIXELS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("instructions", "role"), [("vnni", "model"), ("avx2", "reduced")])
def test_the_file_for_the_processor_is_opened(tmp_path, monkeypatch, instructions, role):
    monkeypatch.setenv("DSIMG_INSTRUCTION_SET", instructions)
    networks = {"model": write_network, "reduced": lambda path: write_network(path, width=4)}
    run = write_golden_run(tmp_path / "run", networks=networks)
    assert role_here(run) == open_served(run).role == role
    assert role_here(run, "cuda") == role_here(run, "tensorrt") == "model"  # which do not sum as this processor does
    assert open_served(run, role="reduced").path.name == "model_reduced.onnx"
    alone = write_run(tmp_path / "alone")
    assert role_here(alone) == open_served(alone).role == "model"


def test_a_damaged_file_and_other_classes_are_refused(tmp_path):
    run = write_run(tmp_path / "run")
    edit_manifest(run.path, lambda content: content["model"].update(classes=CLASSES[:4]))
    with pytest.raises(RunError, match=r"model\.onnx gives 5 logits, and run\.json names 4 classes\. Copy the run"):
        open_served(type(run).open(run.path))
    run.path.joinpath("model.onnx").write_bytes(b"")
    with pytest.raises(RunError, match=r"model\.onnx is damaged"):
        open_served(run)
