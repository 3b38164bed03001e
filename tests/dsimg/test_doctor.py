"""`dsimg doctor resume`: it proves what is so, and finds what is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dsimg import cli
from dsimg.doctor import Comparison, DoctorConfig, compare_runs, doctor, stop_step
from dsimg.errors import DsimgError
from tests.conftest import make_folder

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "weight:0:fc.weight": np.array([0.5, -0.0, np.nan, np.inf], dtype=np.float32),
    "exp_avg:0:fc.weight": np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32),
    "buffer:0:count": np.array([6], dtype=np.int64),
}

RECIPE = {
    "data": "insects",
    "model": "tests.nets:with_dropout",
    "epochs": 2,
    "batch_size": 4,
    "augment": "light",
    "ema": 0.9,
    "workers": 0,
    "flip": False,
    "overwrite": True,
}


def make_run(path: Path) -> Path:
    """Write by hand what two steps of training leave: metrics and a checkpoint of two shards."""
    newest = path / "checkpoints" / "step_00000002"
    newest.mkdir(parents=True)
    (path / "checkpoints" / "step_00000001").mkdir()
    save_file(TENSORS, newest / "shard_0.safetensors")
    save_file({"weight:4:fc.weight": np.zeros(2, np.float32)}, newest / "shard_1.safetensors")
    state = {"digest": path.name, "step": 2, "epoch": 0, "epoch_step": 2, "shards": [{"sha256": path.name}]}
    (newest / "state.json").write_text(json.dumps(state))
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": 1, "epoch": 0, "loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "seconds": 0.25},
        {"kind": "train", "step": 2, "epoch": 0, "loss": float("nan"), "lr": 0.1, "grad_norm": 0.1, "seconds": 0.5},
        {"kind": "validation", "step": 2, "top1": 0.5},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path / "whole"), make_run(tmp_path / "resumed")


def change_tensor(name: str, place: int, value: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / "checkpoints" / "step_00000002" / "shard_0.safetensors"
        tensors = load_file(path)
        tensors[name][place] = value
        save_file(tensors, path)

    return change


def replace(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def test_equal_runs_are_equal_whatever_time_they_took(runs: tuple[Path, Path]) -> None:
    replace("metrics.jsonl", '"seconds": 0.5', '"seconds": 0.75')(runs[1])
    assert compare_runs(*runs) == Comparison(
        (
            ("metrics", "loss, learning rate, gradient norm of 2 steps: equal to the bit"),
            ("state", "position in the data, counters, schedule: equal to the bit"),
            ("tensors", "4 tensors of 11 values in 2 shards: equal to the bit"),
        ),
        (),
    )


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (replace("metrics.jsonl", "2.5", "2.5000000000000004"), "loss of step 1 is 2.5 and 2.5000000000000004"),
        (
            replace("metrics.jsonl", '"step": 2', '"step": 3'),
            "recorded are steps [1, 2] in the one run, [1, 3] in the ",
        ),
        (
            replace("checkpoints/step_00000002/state.json", '"epoch_step": 2', '"epoch_step": 1'),
            "epoch_step in state.json is 2 and 1",
        ),
        (
            lambda run: (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "step_00000003"),
            "the newest checkpoint is step_00000002 in the one run, step_00000003 in the other",
        ),
        (
            change_tensor("exp_avg:0:fc.weight", 3, float(np.nextafter(np.float32(4), np.float32(5)))),
            "exp_avg:0:fc.weight differs in 1 of 4 values, by up to 4.77e-07",
        ),
        (change_tensor("weight:0:fc.weight", 1, 0.0), "weight:0:fc.weight differs in 1 of 4 values, by up to 0"),
        (change_tensor("buffer:0:count", 0, 8), "buffer:0:count differs in 1 of 1 values, by up to 2"),
        (
            lambda run: (run / "checkpoints" / "step_00000002" / "shard_1.safetensors").unlink(),
            "the shards are shard_0.safetensors, shard_1.safetensors in the one run, shard_0.safetensors in the other",
        ),
        (
            lambda run: save_file({}, run / "checkpoints" / "step_00000002" / "shard_1.safetensors"),
            "weight:4:fc.weight is in shard_1.safetensors of one checkpoint only",
        ),
    ],
)
def test_what_differs_is_named(runs: tuple[Path, Path], change: Callable[[Path], None], difference: str) -> None:
    change(runs[1])
    result = compare_runs(*runs)
    assert len(result.differences) == 1
    assert result.differences[0].startswith(difference)
    assert sum("equal to the bit" in text for _, text in result.rows) == 2


def test_the_other_tensors_that_differ_are_counted(runs: tuple[Path, Path]) -> None:
    change_tensor("exp_avg:0:fc.weight", 0, 1.5)(runs[1])
    change_tensor("buffer:0:count", 0, 7)(runs[1])
    (difference,) = compare_runs(*runs).differences
    assert difference == "buffer:0:count differs in 1 of 1 values, by up to 1 (and 1 more)"


def test_a_shard_that_cannot_be_read_is_an_error(runs: tuple[Path, Path]) -> None:
    (runs[1] / "checkpoints" / "step_00000002" / "shard_1.safetensors").write_bytes(b"torn")
    with pytest.raises(DsimgError, match=r"cannot read shard_1\.safetensors"):
        compare_runs(*runs)
    shutil.rmtree(runs[1] / "checkpoints")
    with pytest.raises(DsimgError, match="saved no checkpoint"):
        compare_runs(*runs)


@pytest.mark.parametrize(
    ("epochs", "step"),
    [([0] * 6, 3), ([0, 0, 0, 1, 1, 1], 2), ([0, 0, 1, 1, 2, 2], 3), ([0, 1, 2, 3], 2), ([0, 0], 1), ([0, 0, 0, 1], 2)],
)
def test_the_stop_is_near_the_half_and_within_an_epoch(epochs: list[int], step: int) -> None:
    assert stop_step(epochs) == step


def test_the_command_line_takes_the_check_by_position() -> None:
    config = cli.parse(doctor, ["resume", "--source", "runs/one", "--steps", "4"])
    assert config == DoctorConfig(check="resume", source=Path("runs/one"), steps=4)
    for wrong in ({"steps": 1}, {"ranks": 0}):
        with pytest.raises(DsimgError, match="must be at least"):
            DoctorConfig(check="resume", source=Path("run"), **wrong)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file or directory.*--source is a run folder, or a TOML recipe"),
        ('{"stage": "prune"}', "a run of the stage prune"),
        ("{", "is not JSON"),
    ],
)
def test_a_source_that_is_no_training_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DsimgError, match=message):
        doctor(DoctorConfig(check="resume", source=tmp_path))


def write_recipe(path: Path, **changes: Any) -> Path:
    """Write a recipe that trains on images beside it."""
    if not (path.parent / "insects").exists():
        make_folder(path.parent / "insects")
    settings = {**RECIPE, "data": str(path.parent / "insects"), **changes}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return path


def stand_in_training(loss: Callable[[str, int, int], float], *, says: str = "resuming after {}") -> Callable[..., str]:
    """Return what stands in for starting a training: `loss(run's name, step, steps before this start)`."""

    def train(out: Path, *, max_steps: int, **_: Any) -> str:
        metrics = out / "metrics.jsonl"
        out.mkdir(exist_ok=True)
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        for step in range(done + 1, done + max_steps + 1):
            line = {
                "kind": "train",
                "step": step,
                "epoch": 0,
                "loss": loss(out.name, step, done),
                "lr": 1,
                "grad_norm": 1,
            }
            with metrics.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        newest = out / "checkpoints" / f"step_{done + max_steps:08d}"
        newest.mkdir(parents=True)
        (newest / "state.json").write_text("{}")
        save_file(TENSORS, newest / "shard_0.safetensors")
        return says.format(f"step {done}")

    return train


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (  # a counter that starts anew with each start
            lambda name, step, before: float(step - before),
            r"loss of step 4 is 4\.0 and 1\.0\. Two runs without a stop are equal, so something does not survive",
        ),
        (  # never twice the same
            lambda name, step, before: {"whole": 2.0, "resumed": 3.0, "again": 4.0}[name],
            r"loss of step 1 is 2\.0 and 3\.0\. But .*\(loss of step 1 is 2\.0 and 4\.0\).* is not deterministic",
        ),
    ],
)
def test_a_difference_is_told_with_its_likely_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Callable[[str, int, int], float], message: str
) -> None:
    monkeypatch.setattr("dsimg.doctor.start_training", stand_in_training(loss))
    with pytest.raises(DsimgError, match=message):
        doctor(DoctorConfig(check="resume", source=write_recipe(tmp_path / "recipe.toml")))


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("starting anew", "the second start did not resume at step 3"),
        ("resuming after step 2", "did not resume at step 3"),
    ],
)
def test_a_training_that_never_resumed_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, message: str
) -> None:
    monkeypatch.setattr("dsimg.doctor.start_training", stand_in_training(lambda *_: 1.0, says=says))
    with pytest.raises(DsimgError, match=message):
        doctor(DoctorConfig(check="resume", source=write_recipe(tmp_path / "recipe.toml")))


def test_a_failing_training_is_shown(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", data=str(tmp_path / "nowhere"))
    with pytest.raises(DsimgError, match=r"(?s)exit code 2.*paths are taken from.*nowhere"):
        doctor(DoctorConfig(check="resume", source=recipe))


def test_a_run_of_ones_own_is_proved_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml")
    run = tmp_path / "run"
    run.mkdir()
    settings = {**RECIPE, "data": str(tmp_path / "insects"), "out": str(run), "lr": None, "on_exit": "touch ended"}
    text = json.dumps({"stage": "train", "parents": [], **settings})
    (run / "config.json").write_text(text)
    result = doctor(DoctorConfig(check="resume", source=run))
    assert result.differences == ()
    assert result.rows[0][1].startswith("loss, learning rate, gradient norm of 6 steps")
    said = capsys.readouterr().out
    assert "6 without a stop; 3 and, resumed in the middle of epoch 1, 3 more" in said
    assert [path.name for path in run.iterdir()] == ["config.json"]
    assert (run / "config.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["insects", recipe.name, "run"]
