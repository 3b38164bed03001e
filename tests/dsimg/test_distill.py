"""`dsimg distill` from end to end: what the teacher is shown, what the student learns, what a run leaves and shows."""

import copy
import csv
import dataclasses
import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsimg.data import EvalLoader, to_input
from dsimg.distill import DistillConfig, distill
from dsimg.errors import DsimgError, StopRequested
from dsimg.evaluate import EvaluateConfig, evaluate
from dsimg.folder import read_index
from dsimg.metrics import accuracy_text, compared_text
from dsimg.preprocess import Preprocess
from dsimg.run import Run
from dsimg.shards import ADAPTERS, WEIGHT, Pieces, read_model, read_state
from dsimg.train import TrainConfig, train
from dsimg.weights import open_network, read_weights
from tests import nets
from tests.conftest import Launch, make_folder
from tests.dsimg import distill_program
from tests.dsimg.train_cases import FAST, metrics

Seen = tuple[str, bool, Tensor, bool]  # whose forward, in training mode, the images, under autocast
SEEN: list[Seen] = []
TEACHERS: list[tuple[nn.Module, dict[str, Tensor]]] = []


class Noting(nn.Module):
    """A network with BatchNorm and dropout that notes what it is given."""

    def __init__(self, who: str, num_classes: int) -> None:
        super().__init__()
        self.who = who
        self.body = nets.with_dropout(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        if images.device.type != "meta":
            SEEN.append((self.who, self.training, images.clone(), torch.is_autocast_enabled(images.device.type)))
        logits: Tensor = self.body(images)
        return logits


def teaching(num_classes: int) -> nn.Module:
    """Return a teacher, in training mode and with gradients as a function of the user's may leave it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Noting("teacher", num_classes)
        network(torch.randn(16, 3, 32, 32))
    TEACHERS.append((network, copy.deepcopy(network.state_dict())))
    return network


def learning(num_classes: int) -> nn.Module:
    """Return a student."""
    return Noting("student", num_classes)


@pytest.fixture
def noted() -> Generator[list[Seen]]:
    """What the networks of this file are given in a test."""
    SEEN.clear()
    TEACHERS.clear()
    yield SEEN
    SEEN.clear()
    TEACHERS.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of eight training and four validation images."""
    return make_folder(tmp_path_factory.mktemp("data") / "insects")


@pytest.fixture(scope="module")
def teacher(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to learn from."""
    return train(TrainConfig(data=str(folder), out=tmp_path_factory.mktemp("teacher") / "big", **FAST)).path


def config_of(teacher: Path, out: Path, **more: Any) -> DistillConfig:
    """Return what distils `teacher` into `out`, on its own images."""
    return DistillConfig(**{**FAST, "source": (str(teacher),), "out": out, "log_steps": 1, "seed": 1, **more})


def stop_after(config: DistillConfig, steps: int) -> None:
    with pytest.raises(StopRequested, match=f"stopped by --max_steps {steps} "):
        distill(dataclasses.replace(config, max_steps=steps))


def weights_of(run: Path) -> bytes:
    return (run / "weights.safetensors").read_bytes()


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def test_a_run_puts_student_teacher_and_baseline_beside_one_another(
    teacher: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(TrainConfig(data=str(folder), out=tmp_path / "alone", **{**FAST, "epochs": 1}))
    capsys.readouterr()
    run = distill(config_of(teacher, tmp_path / "run", baseline=alone.path))
    shown = capsys.readouterr().out
    assert run.manifest is not None
    assert run.manifest["stage"] == "distill"
    assert [parent["path"] for parent in run.manifest["parents"]] == [str(teacher)]
    assert {path.name for path in run.path.iterdir()} == {
        *("run.json", ".lock", "config.json", "ds_config.json", "index.jsonl.gz", "labels.txt", "metrics.jsonl"),
        *("weights.safetensors", "evaluation.json", "predictions.csv", "checkpoints", "teacher.json"),
    }
    assert json.loads((run.path / "config.json").read_text())["data"] == str(folder)  # the teacher's own

    found = run.manifest["metrics"]["distillation"]
    taught = json.loads((run.path / "teacher.json").read_text())
    with (run.path / "predictions.csv").open() as stream:
        said = [run.model["classes"].index(row["predicted"]) for row in csv.DictReader(stream)]
    agreement = sum(a == b for a, b in zip(said, taught["predicted"], strict=True)) / 8
    assert found["against_teacher"]["agreement"] == agreement
    for path, share in ((teacher, found["teacher"]), (alone.path, found["baseline"])):
        assert Run.open(path).manifest["metrics"]["validation"]["top1"] == share  # type: ignore[index]
    difference = run.manifest["metrics"]["validation"]["top1"]["value"] - found["baseline"]["value"]
    assert found["against_baseline"]["difference"] == pytest.approx(difference)
    assert 0 < found["teacher_share_of_training"] < 1
    speeds = found["images_per_second"]

    assert "dist: cross-entropy with the true labels + 2 x T² (inter + intra), T = 1" in shown
    assert f"{teacher}: tests.nets:with_batchnorm, 1.54 k parameters" in shown.replace("\n", "")
    rows = [" ".join(line.split()) for line in shown.partition("\nresult\n")[2].splitlines()]
    for row in (
        f"teacher {accuracy_text(found['teacher'])}",
        compared_text(found["against_teacher"]),
        f"agreement student and teacher say the same of {agreement:.2%}",
        f"without teacher {accuracy_text(found['baseline'])}, {alone.path}",
        compared_text(found["against_baseline"]),
        f"images/s student {speeds['student']:.0f}, teacher {speeds['teacher']:.0f}, forward alone",
        f"teacher's cost {found['teacher_share_of_training']:.0%} of the training time since the last start",
    ):
        assert " ".join(row.split()) in rows


def test_an_evaluation_of_the_run_gives_the_same_figures(teacher: Path, tmp_path: Path) -> None:
    run = distill(config_of(teacher, tmp_path / "run", ema=0.5))
    result = evaluate(EvaluateConfig(source=run.path))
    assert result is not None
    assert run.manifest is not None
    told = run.manifest["metrics"]["validation"]
    assert {key: result.report[key] for key in ("images", "correct", "top1", "top5")} == {
        key: told[key] for key in ("images", "correct", "top1", "top5")
    }
    assert result.report["loss"] == pytest.approx(told["loss"], rel=1e-6)


def test_the_teacher_sees_the_very_view_of_the_student_and_only_looks(
    noted: list[Seen], folder: Path, tmp_path: Path
) -> None:
    for mixes in ({}, {"mixup": 0.5, "cutmix": 1.0}):
        noted.clear()
        TEACHERS.clear()
        distill(
            config_of(
                Path("tests.dsimg.test_distill:teaching"),
                tmp_path / f"run{len(mixes)}",
                data=str(folder),
                model="tests.dsimg.test_distill:learning",
                **mixes,
            )
        )
        seen = [(who, images) for who, training, images, _ in noted if who == "teacher" or training]
        pairs = [(images, seen[index + 1]) for index, (who, images) in enumerate(seen[:-1]) if who == "student"]
        assert len(pairs) == 4
        assert all(who == "teacher" and torch.equal(mine, theirs) for mine, (who, theirs) in pairs)
        assert not any(training for who, training, images, _ in noted if who == "teacher" and len(images) != 16)
        (network, before), *_ = TEACHERS
        assert not any(module.training for module in network.modules())
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        assert all(p.grad is None and not p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("shard", ["no", "yes"])
@pytest.mark.parametrize(("student", "teacher_precision"), [("zero0", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_student_and_teacher_have_each_their_own_precision(
    noted: list[Seen], folder: Path, tmp_path: Path, student: str, teacher_precision: str, shard: str
) -> None:
    distill(
        config_of(
            Path("tests.dsimg.test_distill:teaching"),
            tmp_path / "run",
            data=str(folder),
            model="tests.dsimg.test_distill:learning",
            epochs=1,
            deepspeed_config=student,
            teacher_precision=teacher_precision,
            teacher_shard=shard,
        )
    )
    begin = next(index for index, (who, training, *_) in enumerate(noted) if who == "student" and training)
    assert {(images.dtype, autocast) for who, _, images, autocast in noted[begin:] if who == "teacher"} == {
        (torch.bfloat16 if teacher_precision == "bf16" else torch.float32, False)
    }
    # A student with BatchNorm is trained under autocast, which takes its images in fp32.
    assert {(images.dtype, autocast) for who, _, images, autocast in noted[begin:] if who == "student"} == {
        (torch.float32, student == "bf16")
    }
    weights = read_weights(tmp_path / "run" / "weights.safetensors")
    assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {torch.float32}


def test_without_a_share_the_teacher_changes_nothing(teacher: Path, folder: Path, tmp_path: Path) -> None:
    options = {**FAST, "model": "tests.nets:with_dropout", "log_steps": 1, "seed": 4, "mixup": 0.2}
    train(TrainConfig(data=str(folder), out=tmp_path / "plain", **options))
    distill(config_of(teacher, tmp_path / "taught", loss="kd", alpha=0.0, **options))
    assert weights_of(tmp_path / "taught") == weights_of(tmp_path / "plain")
    assert losses_of(tmp_path / "taught") == losses_of(tmp_path / "plain")
    distill(config_of(teacher, tmp_path / "more", loss="kd", alpha=0.1, **options))
    assert weights_of(tmp_path / "more") != weights_of(tmp_path / "plain")


RESUMED: list[dict[str, Any]] = [
    {"loss": "kd", "mixup": 0.2, "cutmix": 1.0},
    {"loss": "dkd", "batch_size": 6},
    {"loss": "hint", "hint_layers": ("1.2:2", "1.3:3"), "alpha": 1.0},
]


@pytest.mark.parametrize("flags", RESUMED, ids=lambda flags: flags["loss"])
def test_a_stopped_run_ends_as_one_that_was_not(teacher: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    options = {"model": "tests.nets:with_dropout", "ema": 0.9, **flags}
    distill(config_of(teacher, tmp_path / "whole", **options))
    half = config_of(teacher, tmp_path / "half", **options)
    stop_after(half, 3)
    measured = (tmp_path / "half" / "teacher.json").stat().st_mtime_ns
    distill(half)
    assert (tmp_path / "half" / "teacher.json").stat().st_mtime_ns == measured
    assert losses_of(tmp_path / "half") == losses_of(tmp_path / "whole")
    assert weights_of(tmp_path / "half") == weights_of(tmp_path / "whole")


def test_adapters_are_trained_and_left_out_of_the_weights(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"loss": "hint", "hint_layers": ("2",), "alpha": 1.0}
    run = distill(config_of(teacher, tmp_path / "run", **flags))
    assert "hint: cross-entropy with the true labels + 1 x the features' mean squared" in capsys.readouterr().out
    assert set(read_weights(run.file("weights"))) == set(nets.with_batchnorm(2).state_dict())
    first, last = (run.path / "checkpoints" / f"step_0000000{step}" for step in (2, 4))
    assert set(read_model(last)) == set(nets.with_batchnorm(2).state_dict())
    for name in (f"{ADAPTERS}.0.weight", f"{ADAPTERS}.0.bias"):
        size = torch.Size(read_state(last)["tensors"][name][0]).numel()
        before, after = (Pieces(path, read_state(path)).whole(WEIGHT, name, numel=size) for path in (first, last))
        assert not torch.equal(before, after)

    index = read_index(run.file("index"))
    preprocess = Preprocess.from_dict(run.model["preprocess"])
    (batch,) = EvalLoader(index.val, preprocess, batch_size=8)
    with torch.no_grad():
        logits = open_network(run).eval()(to_input(batch.images, preprocess, "cpu"))
    assert run.manifest is not None
    assert float(nn.functional.cross_entropy(logits, batch.labels)) == pytest.approx(
        run.manifest["metrics"]["validation"]["loss"], rel=1e-5
    )
    # A checkpoint, which has them, starts another run as any does.
    checkpoint = str(run.path / "checkpoints" / "step_00000004")
    again = distill(config_of(run.path, tmp_path / "again", weights=checkpoint, lr=0.0, **flags))
    assert set(read_weights(again.file("weights"))) == set(read_weights(run.file("weights")))
    sharded = distill(config_of(teacher, tmp_path / "sharded", teacher_shard="yes", **flags))
    assert weights_of(sharded.path) == weights_of(run.path)


# --- The teacher's cache


@pytest.fixture(scope="module")
def filled(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that filled a cache with the views of two epochs of 16 images, and the cache."""
    place = tmp_path_factory.mktemp("filled")
    return distill(config_of(teacher, place / "run", cache_teacher=place / "cache")).path, place / "cache"


def counted(run: Path) -> dict[str, int]:
    counts: dict[str, int] = Run.open(run).manifest["metrics"]["distillation"]["cache"]  # type: ignore[index]
    return counts


def test_a_replayed_run_is_the_one_that_filled_the_cache(
    teacher: Path, filled: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, cache = filled
    assert counted(first) == {"replayed": 0, "computed": 32}
    distill(config_of(teacher, tmp_path / "again", cache_teacher=cache))
    shown = capsys.readouterr().out
    assert f"{cache}, 256 B when complete" in shown.replace("\n", "")
    assert "32 views replayed, 0 computed" in shown
    assert counted(tmp_path / "again") == {"replayed": 32, "computed": 0}
    assert weights_of(tmp_path / "again") == weights_of(first)
    assert losses_of(tmp_path / "again") == losses_of(first)
    # Another loss, and more epochs, are of the same views.
    distill(config_of(teacher, tmp_path / "longer", cache_teacher=cache, loss="kd", temperature=2.0, epochs=3))
    assert counted(tmp_path / "longer") == {"replayed": 32, "computed": 16}


@pytest.mark.parametrize("flags", [{}, {"mixup": 0.5}, {"batch_size": 6, "cutmix": 1.0, "augment": "strong"}])
def test_a_cache_that_is_stopped_while_it_fills_goes_on(teacher: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    for name in ("whole", "half"):
        config = config_of(teacher, tmp_path / name, cache_teacher=tmp_path / f"{name}_cache", **flags)
        if name == "half":
            stop_after(config, 1)
        distill(config)
    assert weights_of(tmp_path / "half") == weights_of(tmp_path / "whole")
    for epoch in (0, 1):
        whole, half = ((tmp_path / f"{n}_cache" / f"epoch_0000{epoch}.bin").read_bytes() for n in ("whole", "half"))
        assert whole == half
        assert len(whole) == 16 * (2 * 2 + 4)
    distill(config_of(teacher, tmp_path / "again", cache_teacher=tmp_path / "half_cache", **flags))
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "whole")
    assert counted(tmp_path / "again") == {"replayed": 32, "computed": 0}


def test_torn_rows_are_computed_again(teacher: Path, filled: tuple[Path, Path], tmp_path: Path) -> None:
    first, cache = filled
    (tmp_path / "cache").mkdir()
    content = {path.name: path.read_bytes() for path in cache.iterdir()}
    content["epoch_00000.bin"] = content["epoch_00000.bin"][:-3]
    content["epoch_00001.bin"] = b"\xff" + content["epoch_00001.bin"][1:]
    for name, data in content.items():
        (tmp_path / "cache" / name).write_bytes(data)
    distill(config_of(teacher, tmp_path / "run", cache_teacher=tmp_path / "cache"))
    assert counted(tmp_path / "run") == {"replayed": 16, "computed": 16}  # a batch of 8 for each row
    assert weights_of(tmp_path / "run") == weights_of(first)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == {
        path.name: path.read_bytes() for path in cache.iterdir()
    }


def test_a_cache_of_other_views_or_another_teacher_is_refused(
    teacher: Path, filled: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    _, cache = filled
    other = train(TrainConfig(data=str(folder), out=tmp_path / "other", **{**FAST, "seed": 9})).path
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    for source, flags, message in (
        (other, {}, "teacher "),
        (teacher, {"teacher_precision": "bf16"}, r"teacher precision \(fp32; now bf16\)"),
        (teacher, {"seed": 2}, r"seed \(1; now 2\)"),
        (teacher, {"augment": "standard"}, "augmentation"),
        (teacher, {"flip": False}, "augmentation"),
        (teacher, {"mixup": 0.2}, r"mixup and cutmix \(\[0\.0, 0\.0\]; now \[0\.2, 0\.0\]\)"),
    ):
        with pytest.raises(DsimgError, match=f"was made with another {message}"):
            distill(config_of(source, tmp_path / "run", cache_teacher=cache, **flags))
        assert not (tmp_path / "run").exists()
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before


# --- What is refused


def test_what_an_overwritten_run_would_take_along_is_refused(teacher: Path, tmp_path: Path) -> None:
    for flags in ({"baseline": tmp_path / "run"}, {"cache_teacher": tmp_path / "run" / "cache"}):
        with pytest.raises(DsimgError, match=f"--{next(iter(flags))} .* lies in --out {tmp_path / 'run'}"):
            config_of(teacher, tmp_path / "run", overwrite=True, **flags)
    with pytest.raises(DsimgError, match="lie in one another"):
        distill(config_of(teacher, teacher, overwrite=True))
    assert Run.open(teacher).file("weights").exists()


def test_other_classes_are_refused_before_a_run_is_made(teacher: Path, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "other", classes=("ant", "cat"), train=2, val=1)
    with pytest.raises(DsimgError, match=r"--source .* it does not know cat; it alone knows bee\. Give the data"):
        distill(config_of(teacher, tmp_path / "run", data=str(data)))
    with pytest.raises(DsimgError, match=r"--baseline .* it does not know cat; it alone knows bee\."):
        distill(config_of(Path("tests.nets:with_batchnorm"), tmp_path / "run", data=str(data), baseline=teacher))
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_is_no_run_needs_data(tmp_path: Path) -> None:
    with pytest.raises(DsimgError, match=r"tests\.nets:wide is no run, which would say what images .* with --data"):
        distill(config_of(Path("tests.nets:wide"), tmp_path / "run"))


def test_wrong_layers_are_refused_before_a_run_is_made(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(DsimgError, match="--hint_layers: the teacher has no layer 'layer3'"):
        distill(config_of(teacher, tmp_path / "run", loss="hint", hint_layers=("2:layer3",)))
    assert not (tmp_path / "run").exists()


def test_validation_images_that_changed_since_are_not_compared(
    teacher: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(teacher, tmp_path / "run")
    stop_after(config, 3)
    path = tmp_path / "run" / "teacher.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "images": "others"}))
    run = distill(config)
    assert run.manifest is not None
    assert run.manifest["metrics"]["distillation"]["against_teacher"] is None
    assert "not compared: the readable validation images are others by now" in capsys.readouterr().out


def test_a_teacher_that_was_made_anew_since_is_refused(teacher: Path, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "teacher"
    shutil.copytree(teacher, mine)
    config = config_of(mine, tmp_path / "run")
    stop_after(config, 3)
    manifest = json.loads((mine / "run.json").read_text())
    (mine / "run.json").write_text(json.dumps({**manifest, "created": "later"}))
    with pytest.raises(DsimgError, match=r"is not the run that .* began with: it has been made anew since"):
        distill(config)


# --- Two ranks


def test_two_ranks_end_alike_killed_or_not_and_from_the_cache(tmp_path: Path, launch: Launch) -> None:
    make_folder(tmp_path / "data", train=9)
    (tmp_path / "data" / "train" / "ant" / "0000.png").unlink()  # 17 images on 2 ranks: the last one is made two
    results = launch(2, "-m", "tests.dsimg.distill_program", str(tmp_path))
    assert -9 in [result.returncode for result in results], results[0].stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["equal"]
    assert (result["held_False"], result["held_True"]) == (512 * 400, 0)
    assert result["stopped"].startswith("stopped by --max_steps 5 ")
    assert weights_of(tmp_path / "zero2_replayed") == weights_of(tmp_path / "zero2_whole")
    assert counted(tmp_path / "zero2_whole") == {"replayed": 0, "computed": 3 * 17}
    assert counted(tmp_path / "zero2_replayed") == {"replayed": 3 * 17, "computed": 0}
    for stage in distill_program.STAGES:
        assert not (tmp_path / f"{stage}_cut" / "run.json").exists()
        flags = distill_program.words(distill_program.flags(tmp_path, stage, "cut"))
        results = launch(2, "-m", "dsimg", "distill", *flags)
        assert [result.returncode for result in results] == [0, 0], results[0].stdout
        assert "resuming after epoch " in results[0].stdout
        assert losses_of(tmp_path / f"{stage}_cut") == losses_of(tmp_path / f"{stage}_whole")
        assert weights_of(tmp_path / f"{stage}_cut") == weights_of(tmp_path / f"{stage}_whole")
