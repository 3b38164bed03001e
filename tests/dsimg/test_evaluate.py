"""`dsimg evaluate`: the same figures on any number of ranks, at any ZeRO stage, and for any order of classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import DsimgError, RunError
from dsimg.evaluate import EvaluateConfig, evaluate, evaluation_folder
from dsimg.run import Run
from dsimg.train import TrainConfig, train
from dsimg_export import measuring
from tests.conftest import Launch, make_folder
from tests.export.runs import write_run

COUNTS = ("images", "correct", "confusion", "per_class")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three classes."""
    root = tmp_path_factory.mktemp("evaluate")
    make_folder(root / "data", classes=("ant", "bee", "wasp"))
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "model": "tests.nets:with_batchnorm", "augment": "none"}
    train(TrainConfig(data=str(root / "data"), out=root / "run", **options))
    return root


def report(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "evaluation.json").read_text())
    return content


def test_the_training_folder_gives_what_training_reported(trained: Path, tmp_path: Path) -> None:
    for index, data in enumerate((None, str(trained / "data"))):
        evaluate(EvaluateConfig(source=trained / "run", data=data, out=tmp_path / str(index)))
        again, first = report(tmp_path / str(index)), report(trained / "run")
        assert {key: again[key] for key in COUNTS} == {key: first[key] for key in COUNTS}
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_a_class_missing_from_the_folder_shifts_no_label(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "data" / "val", tmp_path / "val")
    shutil.rmtree(tmp_path / "val" / "bee")
    evaluate(EvaluateConfig(source=trained / "run", data=str(tmp_path / "val"), out=tmp_path / "out"))
    whole = {entry["class"]: entry for entry in report(trained / "run")["per_class"]}
    part = {entry["class"]: entry for entry in report(tmp_path / "out")["per_class"]}
    for name in ("ant", "wasp"):
        assert (part[name]["images"], part[name]["correct"]) == (whole[name]["images"], whole[name]["correct"])
    assert (part["bee"]["images"], part["bee"]["accuracy"]) == (0, None)


def test_a_class_that_the_run_does_not_know_is_an_error(trained: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "data", classes=("ant", "hornet"))
    with pytest.raises(DsimgError, match="hornet"):
        evaluate(EvaluateConfig(source=trained / "run", data=str(tmp_path / "data"), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_1003_images_on_one_two_and_three_ranks_and_at_zero_3(trained: Path, tmp_path: Path, launch: Launch) -> None:
    root = tmp_path / "many"
    make_folder(root, classes=("ant", "bee", "wasp"), train=1, val=334)
    extra = sorted((root / "val" / "wasp").iterdir())[0]
    shutil.copy(extra, extra.with_name("extra.png"))
    reports = []
    for ranks, config in ((1, None), (2, None), (3, None), (2, "zero3"), (3, "zero0")):
        out = tmp_path / f"{ranks}_{config}"
        words = ["-m", "dsimg", "evaluate", "--source", str(trained / "run"), "--data", str(root), "--out", str(out)]
        words += ["--workers", "0", "--batch_size", "100"]
        if config is not None:
            fp32 = tmp_path / f"{config}.json"
            fp32.write_text(json.dumps({"zero_optimization": {"stage": int(config[-1])}}))
            words += ["--deepspeed_config", str(fp32)]
        results = launch(ranks, *words)
        assert [result.returncode for result in results] == [0] * ranks, results[0].stdout
        reports.append(report(out))
        assert len((out / "predictions.csv").read_text().splitlines()) == 1004
    assert [entry["images"] for entry in reports] == [1003] * 5
    assert sum(entry["images"] for entry in reports[0]["per_class"]) == 1003
    for other in reports[1:]:
        assert {key: other[key] for key in COUNTS} == {key: reports[0][key] for key in COUNTS}
        assert other["loss"] == pytest.approx(reports[0]["loss"], rel=1e-5)


def test_a_data_set_that_was_moved_gives_the_held_out_images(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", train=10, val=1)
    shutil.move(root / "train", tmp_path / "insects")
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "model": "tests.nets:with_batchnorm", "augment": "none"}
    train(TrainConfig(data=str(tmp_path / "insects"), out=tmp_path / "run", **options))
    shutil.move(tmp_path / "insects", tmp_path / "elsewhere")
    evaluate(EvaluateConfig(source=tmp_path / "run", data=str(tmp_path / "elsewhere")))
    (written,) = (tmp_path / "run" / "evaluations").iterdir()
    assert written.name.startswith("elsewhere-")
    assert report(written)["images"] == 4
    assert report(written)["confusion"] == report(tmp_path / "run")["confusion"]


def test_an_evaluation_does_not_replace_a_runs_own(trained: Path) -> None:
    with pytest.raises(DsimgError, match="is a run folder"):
        evaluate(EvaluateConfig(source=trained / "run", out=trained / "run"))


def test_a_place_that_cannot_hold_an_evaluation_is_an_error_with_a_remedy(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(RunError, match=r"cannot make the folder .* Choose another --out"):
            evaluation_folder(EvaluateConfig(source=trained / "run", out=out), Run.open(trained / "run"))


def test_workers_0_is_one_thread_for_an_onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    measured = measuring.evaluate_session

    def counted(*args: Any, threads: int | None, **options: Any) -> Any:
        asked.append(threads)
        return measured(*args, threads=threads, **options)

    monkeypatch.setattr("dsimg.evaluate.evaluate_session", counted)
    make_folder(tmp_path / "data", classes=("ant", "bee"), train=1, val=1)
    run = write_run(tmp_path / "run")
    for workers in (None, 0, 1, 3):
        evaluate(EvaluateConfig(source=run.path, data=str(tmp_path / "data"), out=tmp_path / "out", workers=workers))
    assert asked == [None, 1, 1, 3]


def test_data_that_is_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data")
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "model": "tests.nets:with_batchnorm", "augment": "none"}
    train(TrainConfig(data=str(root), out=tmp_path / "run", **options))
    shutil.rmtree(root)
    with pytest.raises(DsimgError, match=r"is not there\. Give its place now with --data"):
        evaluate(EvaluateConfig(source=tmp_path / "run"))
