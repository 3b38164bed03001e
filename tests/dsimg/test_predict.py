"""`dsimg predict`: the best classes of each file, in order; files that are no images are named."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsimg.errors import DsimgError
from dsimg.predict import PredictConfig, predict, predictions
from dsimg.preprocess import Preprocess, preprocess_image
from dsimg.train import TrainConfig, train
from dsimg_export import served
from dsimg_export.session import open_session
from tests.conftest import make_folder
from tests.export.runs import CLASSES, PREPROCESS, write_run


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with `a.png`, `deeper/b.png`, notes and a hidden file."""
    folder = tmp_path / "pictures"
    (folder / "deeper").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "deeper/b.png")):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("of no interest")
    (folder / ".hidden").write_text("of none either")
    return folder


def expected(run: Path, image: Path) -> dict[str, float]:
    """Return the softmax of the session's logits by class."""
    batch = preprocess_image(image.read_bytes(), Preprocess.from_dict(PREPROCESS))[None]
    logits = open_session(run / "model.onnx").run(["logits"], {"images": batch})[0][0].astype(float)
    return dict(zip(CLASSES, np.exp(logits) / np.exp(logits).sum(), strict=True))


def test_the_best_classes_come_first_with_their_probabilities(tmp_path: Path, pictures: Path) -> None:
    run = write_run(tmp_path / "run")
    found = predict(PredictConfig(source=run.path, images=(pictures,), top=3))
    assert [one.file for one in found] == [pictures / "a.png", pictures / "deeper" / "b.png"]
    for one in found:
        shares = expected(run.path, one.file)
        assert [name for name, _ in one.classes] == sorted(CLASSES, key=lambda name: -shares[name])[:3]
        assert [share for _, share in one.classes] == pytest.approx([shares[name] for name, _ in one.classes], rel=1e-4)


def test_a_bad_file_is_named_and_stops_no_other(tmp_path: Path, pictures: Path) -> None:
    run = write_run(tmp_path / "run")
    (pictures / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00")
    words = ["--source", str(run.path), str(pictures), str(tmp_path / "gone.png"), "--json", "--top", "1"]
    answer = subprocess.run([sys.executable, "-m", "dsimg", "predict", *words], capture_output=True, text=True)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    names = [str(pictures / "a.png"), str(pictures / "broken.jpg"), str(pictures / "deeper" / "b.png")]
    assert [line["file"] for line in lines] == [*names, str(tmp_path / "gone.png")]
    assert answer.returncode == 2
    assert answer.stderr == ""
    assert "truncated or incomplete" in lines[1]["error"]
    assert "No such file" in lines[3]["error"]
    for line in (lines[0], lines[2]):
        shares = expected(run.path, Path(line["file"]))
        best = max(shares, key=lambda name: shares[name])
        assert line["classes"] == [{"class": best, "probability": pytest.approx(shares[best], rel=1e-4)}]


def test_the_table_names_bad_files_and_ends_with_an_error(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(DsimgError, match="1 of 2 files gave no prediction"):
        predict(PredictConfig(source=run.path, images=(pictures / "a.png", tmp_path / "gone.png"), top=2))
    said = capsys.readouterr().out
    assert f"! {tmp_path / 'gone.png'}: cannot be read" in said
    shares = expected(run.path, pictures / "a.png")
    assert f"{max(shares.values()):.2%}" in said


@pytest.mark.parametrize("callers", [1, 3])
def test_order_holds_over_batches_and_logits_that_are_not_finite_are_no_prediction(
    tmp_path: Path, pictures: Path, callers: int
) -> None:
    run = write_run(tmp_path / "run")
    files = [pictures / "a.png", tmp_path / "gone.png", pictures / "deeper" / "b.png"] * 30
    calls: list[int] = []

    def answer(pixels: np.ndarray) -> np.ndarray:
        calls.append(len(pixels))
        time.sleep(0.05 if len(calls) == 1 else 0)  # with several callers the first batch is not ready first
        logits = np.zeros((len(pixels), 5), np.float32)
        logits[:, 2] = np.log(4.0)
        logits[pixels.mean(axis=(1, 2, 3)) == pixels[0].mean(), 0] = np.nan  # those of a.png
        return logits

    found = list(predictions(answer, files, run=run, top=1, callers=callers))
    assert [one.file for one in found] == files
    assert sum(calls) == 60
    assert len(calls) > 1
    assert all("NaN" in (one.error or "") for one in found[0::3])
    assert all("No such file" in (one.error or "") for one in found[1::3])
    assert [one.classes for one in found[2::3]] == [(("fly", pytest.approx(0.5)),)] * 30


def test_several_callers_at_once_take_a_batch_each_and_one_more_waits(tmp_path: Path, pictures: Path) -> None:
    run = write_run(tmp_path / "run")
    files = [pictures / "a.png"] * 32 * 20
    together = threading.Barrier(3)
    calls: list[int] = []

    def answer(pixels: np.ndarray) -> np.ndarray:
        calls.append(len(pixels))
        if len(calls) <= 3:
            together.wait(30)  # broken where fewer than three call
        return np.zeros((len(pixels), 5), np.float32)

    found = predictions(answer, files, run=run, top=1, callers=3)
    assert next(found).classes == (("ant", pytest.approx(0.2)),)
    time.sleep(0.2)
    assert calls == [32] * 4  # however slowly they are taken
    found.close()
    assert calls == [32] * 4


def test_what_goes_wrong_in_the_network_is_raised(tmp_path: Path, pictures: Path) -> None:
    def answer(pixels: np.ndarray) -> np.ndarray:
        raise MemoryError("no memory")

    run = write_run(tmp_path / "run")
    with pytest.raises(MemoryError, match="no memory"):
        list(predictions(answer, [pictures / "a.png"] * 200, run=run, top=1, callers=2))


def test_a_session_and_its_callers_share_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, opened = write_run(tmp_path / "run"), []
    open_served = served.open_served

    def opening(*args: Any, threads: int, **others: Any) -> served.Served:
        opened.append(threads)
        return open_served(*args, threads=threads, **others)

    monkeypatch.setattr(served, "open_served", opening)
    pixels = np.zeros((40, 16, 16, 3), np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"{number:02}.png")
    for threads in (1, 2, 8):
        predict(PredictConfig(source=run.path, images=(tmp_path / "00.png",), threads=threads))
        predict(PredictConfig(source=run.path, images=tuple(sorted(tmp_path.glob("*.png"))), threads=threads))
    assert opened == [1, 1, 2, 1, 8, 7]  # of one batch, and of two


def test_a_training_run_answers_too(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data")
    run = train(
        TrainConfig(
            data=str(root),
            out=tmp_path / "run",
            epochs=8,
            batch_size=8,
            lr=0.5,
            augment="none",
            model="tests.nets:with_batchnorm",
        )
    )
    images = root / "val"
    found = predict(PredictConfig(source=run.path, images=(images,)))
    manifest = json.loads((run.path / "run.json").read_text())
    right = sum(one.classes[0][0] == one.file.parent.name for one in found)
    assert right == manifest["metrics"]["validation"]["correct"]
    with pytest.raises(DsimgError, match="--threads and --provider are ONNX Runtime's"):
        predict(PredictConfig(source=run.path, images=(images,), threads=2))


def test_nothing_to_look_at_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DsimgError, match="given no image"):
        PredictConfig(source=tmp_path, images=())
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DsimgError, match="there are no images in"):
        predict(PredictConfig(source=run.path, images=(tmp_path / "empty",)))
