"""`dsimg prune`: to a target, by any importance, on any number of ranks, killed and resumed; and what takes its run."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dsimg_export.session
from dsimg.distill import distill
from dsimg.errors import ConfigError, DsimgError, StopRequested
from dsimg.evaluate import EvaluateConfig, evaluate
from dsimg.models import count_macs, count_parameters
from dsimg.prune import prune
from dsimg.recipe import DistillConfig, PruneConfig, TrainConfig, latency_goal
from dsimg.run import Run
from dsimg.train import train
from dsimg.weights import open_network, read_weights
from tests.conftest import Launch, make_folder
from tests.dsimg.prune_cases import QUICK, without_waiting
from tests.dsimg.train_cases import FAST, metrics, stop_after

SOURCE: dict[str, Any] = {**FAST, "epochs": 1, "model": "tests.dsimg.prune_cases:middle"}
FILES = {
    *("run.json", "config.json", "ds_config.json", "index.jsonl.gz", "labels.txt", "weights.safetensors"),
    *("metrics.jsonl", "evaluation.json", "predictions.csv", "pruning.json", "cut.json", "source.json"),
    *("checkpoints", ".lock"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images in `data` and a run on them in `source`."""
    root = tmp_path_factory.mktemp("prune")
    make_folder(root / "data")
    train(TrainConfig(data=str(root / "data"), out=root / "source", **SOURCE))
    return root


@pytest.fixture(scope="module")
def pruned(root: Path) -> Run:
    """The run pruned to half of its MACs."""
    with pytest.MonkeyPatch.context() as patch:
        without_waiting(patch)
        return prune(PruneConfig(source=root / "source", out=root / "pruned", target_macs=0.5, **QUICK))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waiting(monkeypatch)


def told(run: Run) -> dict[str, Any]:
    """Return what a run's manifest says of the pruning."""
    assert run.manifest is not None
    said: dict[str, Any] = run.manifest["metrics"]["pruning"]
    return said


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return content


def same_weights(first: Path, second: Path) -> bool:
    return (first / "weights.safetensors").read_bytes() == (second / "weights.safetensors").read_bytes()


# Targets


def test_a_run_is_what_it_says(root: Path, pruned: Run) -> None:
    assert {path.name for path in pruned.path.iterdir()} == FILES
    assert pruned.manifest is not None
    assert pruned.manifest["stage"] == "prune"
    assert [Path(parent["path"]) for parent in pruned.manifest["parents"]] == [root / "source"]
    assert set(pruned.manifest["files"]) >= {"weights", "pruning", "config", "index"}
    source, network, said = open_network(Run.open(root / "source")), open_network(pruned), told(pruned)
    assert said["macs"] == [count_macs(source, 32), count_macs(network, 32)]
    assert said["parameters"] == [count_parameters(source), count_parameters(network)]
    assert said["reached"] == said["macs"][1] / said["macs"][0]
    assert (said["goal"], said["shortfall"]) == (0.5, None)
    widths = [int(network.get_submodule(name).weight.shape[0]) for name in ("0", "3", "9")]  # type: ignore[union-attr, index]
    assert widths[2] == 2
    assert [(layer["name"], layer["before"], layer["after"]) for layer in said["layers"]] == [
        ("0", 64, widths[0]),
        ("3", 96, widths[1]),
    ]
    for name in ("before", "after_cut", "after_batchnorm"):
        assert said[name]["interval"][0] <= said[name]["value"] <= said[name]["interval"][1]
    assert said["before"] == report(root / "source")["top1"]
    seconds = {f"{who} fp32": 1e-9 * macs for who, macs in zip(("source", "pruned"), said["macs"], strict=True)}
    halves = {name.replace("fp32", "int8"): value / 2 for name, value in seconds.items()}
    assert said["latency"] == {"batch": 1, "threads": 1, "seconds": pytest.approx({**seconds, **halves})}
    assert said["against_source"].keys() >= {"gained", "lost", "p_value", "difference", "interval"}


@pytest.mark.parametrize(
    ("target", "left"),
    [({"target_macs": 0.3}, "macs"), ({"target_params": 0.4}, "parameters"), ({"target_latency": "0.6"}, "macs")],
)
def test_each_target_is_reached(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: dict[str, Any], left: str
) -> None:
    said = told(prune(PruneConfig(source=root / "source", out=tmp_path / "run", **target, **QUICK)))
    goal = float(next(iter(target.values())))
    assert said[left][1] / said[left][0] == pytest.approx(said["reached"])
    assert abs(said["reached"] - goal) <= 0.03 * goal
    assert said["shortfall"] is None
    shown = capsys.readouterr().out
    for row in ("source ", "after last cut ", "against source ", "MACs ", "parameters ", "latency ", "next "):
        assert f"\n  {row}" in shown, row
    assert "with BatchNorm re-estimated" in shown
    assert "McNemar p = " in shown
    assert "ONNX Runtime, CPU, batch 1, 1 thread; fastest: pruned int8" in shown
    assert f"dsimg evaluate --source {tmp_path / 'run'} --data {root / 'data'}" in shown


def test_a_time_is_a_share_of_the_sources(
    root: Path, tmp_path: Path, pruned: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = 1e-9 * told(pruned)["macs"][0]  # seconds
    options: dict[str, Any] = {"source": root / "source", **QUICK}
    said = told(prune(PruneConfig(out=tmp_path / "run", target_latency=f"{1e6 * whole / 4:.3f}us", **options)))
    assert said["goal"] == pytest.approx(0.25, rel=1e-3)
    assert abs(said["reached"] - 0.25) <= 0.03 * 0.25
    with pytest.raises(ConfigError, match=r"is 9s, and the source takes [\d.]+ ms here already \(int8, batch 2"):
        prune(
            PruneConfig(out=tmp_path / "slow", target_latency="9s", served_as="int8", latency_batch=2, **options),
        )


def test_a_real_session_decides(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: exported, measured in turn with the source, searched, measured again in fp32 and int8."""
    monkeypatch.undo()
    real = dsimg_export.session.latency
    monkeypatch.setattr(dsimg_export.session, "latency", lambda files, **rest: real(files, **{**rest, "seconds": 0.2}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model = {**SOURCE, "model": "tests.dsimg.prune_cases:wide"}
    train(TrainConfig(data=str(root / "data"), out=tmp_path / "wide", **model))
    options = {**QUICK, "round_to": 16, "teacher": "none"}
    run = prune(PruneConfig(source=tmp_path / "wide", out=tmp_path / "run", target_latency="0.7", **options))
    said = told(run)
    assert 0.5 < said["reached"] < 0.9
    if abs(said["reached"] - 0.7) > 0.03 * 0.7:
        assert "the session's latency makes steps there" in said["shortfall"]
    else:
        assert said["shortfall"] is None
    assert said["latency"]["seconds"]["pruned fp32"] < 0.95 * said["latency"]["seconds"]["source fp32"]
    assert all(layer["after"] % 16 == 0 for layer in said["layers"])
    assert list((tmp_path / "temporary").iterdir()) == []  # the ONNX files are gone


def test_a_result_that_is_not_faster_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def equal(self: Any, names: Any, *, int8: Any, **_: Any) -> dict[str, float]:
        return {f"{name} {'int8' if q else 'fp32'}": 1.0 for name in names for q in int8}

    monkeypatch.setattr("tests.dsimg.prune_cases.CountedSessions.seconds", equal)
    options: dict[str, Any] = {"source": root / "source", "target_macs": 0.5, "served_as": "int8", **QUICK}
    prune(PruneConfig(out=tmp_path / "run", **options))
    assert "! not faster in int8, which it is to be served in (--served_as)" in capsys.readouterr().out


def test_without_onnx_runtime_it_prunes_and_says_what_is_missing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ConfigError("measuring a session needs onnxruntime")

    monkeypatch.setattr("dsimg.cutter.Sessions", missing)
    run = prune(PruneConfig(source=root / "source", out=tmp_path / "run", target_macs=0.5, **QUICK))
    assert "latency" not in told(run)
    assert "not measured: measuring a session needs onnxruntime" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="measuring a session needs onnxruntime"):
        prune(PruneConfig(source=root / "source", out=tmp_path / "other", target_latency="0.5", **QUICK))


# What is cut


def test_each_importance_cuts_others(root: Path, tmp_path: Path) -> None:
    kept = {}
    for importance in ("group_norm", "taylor", "bn_scale", "lamp", "random"):
        options: dict[str, Any] = {**QUICK, "teacher": "none", "importance": importance}
        run = prune(PruneConfig(source=root / "source", out=tmp_path / importance, target_macs=0.5, **options))
        assert told(run)["shortfall"] is None
        kept[importance] = json.loads(run.file("pruning").read_text())["kept"]
    assert all(kept["group_norm"] != kept[other] for other in ("taylor", "bn_scale", "random"))
    assert len({json.dumps(lists) for lists in kept.values()}) >= 4  # lamp ranks within a layer as group_norm does


def test_the_cut_is_the_least_important_and_before_training_the_rest_is_the_sources(
    root: Path, pruned: Run, tmp_path: Path
) -> None:
    run = prune(PruneConfig(source=root / "source", out=tmp_path / "run", target_macs=0.5, **{**QUICK, "lr": 0.0}))
    assert run.file("pruning").read_bytes() == pruned.file("pruning").read_bytes()
    record = json.loads(run.file("pruning").read_text())
    whole, left = read_weights(root / "source" / "weights.safetensors"), read_weights(run.file("weights"))
    compared = 0
    for name, tensor in left.items():
        if "running" in name or "num_batches" in name:
            continue
        expected = whole[name]
        for dim, number in record["tensors"].get(name, {}).items():
            expected = expected.index_select(int(dim), torch.tensor(record["kept"][number]))
        assert torch.equal(tensor, expected), name
        compared += 1
    assert compared == 10


def test_protected_layers_and_widths_stay(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "source": root / "source", "teacher": "none"}
    said = told(prune(PruneConfig(out=tmp_path / "run", target_macs=0.5, protect=("0",), **options)))
    assert [layer["name"] for layer in said["layers"]] == ["3"]
    with pytest.raises(DsimgError, match=r"there is no module 'layer1' to protect"):
        prune(PruneConfig(out=tmp_path / "other", target_macs=0.5, protect=("layer1",), **options))
    aligned = {**options, "round_to": 16}
    said = told(prune(PruneConfig(out=tmp_path / "aligned", target_macs=0.4, **aligned)))
    assert [layer["after"] % 16 for layer in said["layers"]] == [0] * len(said["layers"])
    assert said["shortfall"] == "blocks of 16 channels are that coarse here: give a smaller --round_to"


def test_nothing_to_cut_is_one_message(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "source": root / "source"}
    for number, (changes, message) in enumerate(
        [
            (
                {"round_to": 128},
                r"^nothing can be cut: nothing is wider than 128 channels \(--round_to\) that may",
            ),
            ({"max_ratio": 0.01}, r"^nothing can be cut: --max_ratio 0\.01 lets no whole block of 1 channels"),
            (
                {"target_macs": 0.999},
                r"^nothing can be cut: 0\.999 of it is nearest to the whole network\.",
            ),
            (
                {"protect": ("0", "3")},
                r"nothing in Sequential can be pruned: no layer has a width that is not",
            ),
        ]
    ):
        with pytest.raises(DsimgError, match=message):
            prune(PruneConfig(out=tmp_path / str(number), **{"target_macs": 0.5, **options, **changes}))


# Several cuts, sparsity, teachers


STEPS: dict[str, Any] = {"target_macs": 0.25, "cuts": 2, "cut_epochs": 1, "sparsity_epochs": 1, "log_steps": 1, **QUICK}


def test_cuts_with_training_between_them(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prune(PruneConfig(source=root / "source", out=tmp_path / "run", sparsity=0.1, **STEPS))
    shown = capsys.readouterr().out
    assert shown.index("looking for 0.500 of the source's MACs") < shown.index("looking for 0.250 of the source's MACs")
    assert shown.count("right after the cut: Top-1 ") == 2
    assert "target           0.25 of the source's MACs in 2 cuts, 1 epochs after each but the last" in shown
    assert "1 epochs of sparse training first" in shown
    said, phases = told(run), run.path / "phases"
    assert abs(said["reached"] - 0.25) <= 0.03 * 0.25
    assert {path.name for path in run.path.iterdir()} == {*FILES, "phases"}
    training = {"metrics.jsonl", "weights.safetensors"}
    assert {path.name for path in (phases / "sparsity").iterdir()} == training
    assert {path.name for path in (phases / "cut_1").iterdir()} == {*training, "pruning.json", "cut.json"}
    first = json.loads((phases / "cut_1" / "cut.json").read_text())
    assert first["goal"] == 0.5
    assert abs(first["reached"] - 0.5) <= 0.03 * 0.5
    half, quarter = (json.loads((path / "pruning.json").read_text()) for path in (phases / "cut_1", run.path))
    for name, dims in quarter["tensors"].items():
        for dim, number in dims.items():
            there = half["kept"][half["tensors"][name][dim]]
            assert set(quarter["kept"][number]) < set(there) < set(range(96))
    sparse, plain = (metrics(phases / name)[0]["loss"] for name in ("sparsity", "cut_1"))
    assert sparse > plain  # the penalty is part of it
    assert [line["step"] for line in metrics(run.path)] == [1, 2]


def test_max_steps_counts_over_all_trainings_of_a_start(root: Path, tmp_path: Path) -> None:
    config = PruneConfig(source=root / "source", out=tmp_path / "run", sparsity=0.1, **STEPS)
    for steps, where in ((3, "after step 1; "), (1, "after step 2; "), (1, "after step 1; ")):
        with pytest.raises(StopRequested, match=where):
            prune(dataclasses.replace(config, max_steps=steps))
    assert prune(dataclasses.replace(config, max_steps=10)).manifest is not None


@pytest.mark.parametrize(
    "trainings", [{"cuts": 1, "cut_epochs": None}, {"sparsity_epochs": 0}], ids=["sparsity", "two cuts"]
)
def test_the_cap_on_a_layer_is_a_share_of_the_sources(root: Path, tmp_path: Path, trainings: dict[str, Any]) -> None:
    """Neither sparse training nor an earlier cut may change what is measured by."""
    options: dict[str, Any] = {**STEPS, "max_ratio": 0.25, **trainings}
    said = told(prune(PruneConfig(source=root / "source", out=tmp_path / "run", **options)))
    assert "--max_ratio 0.25" in said["shortfall"]
    assert [(layer["before"], layer["after"]) for layer in said["layers"]] == [(64, 48), (96, 72)]


def test_files_that_others_wrote_are_named_before_anything_is_trained(root: Path, tmp_path: Path) -> None:
    config = PruneConfig(source=root / "source", out=tmp_path / "run", **{**STEPS, "sparsity_epochs": 0})
    with pytest.raises(StopRequested):
        prune(dataclasses.replace(config, max_steps=3))  # in the last training
    for name, advice in (("source.json", "Remove it"), ("cut.json", "Remove it"), ("pruning.json", "or --overwrite")):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        path.write_text("{}")
        with pytest.raises(DsimgError, match=rf"{name} .*dsimg wrote there.*{advice}"):
            prune(config)
        path.write_bytes(whole)
    assert prune(config).manifest is not None


def test_what_cannot_work_leaves_no_run_behind(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": root / "source", "out": tmp_path / "run", "target_macs": 0.5, **QUICK}
    for flags, reason in (
        ({"round_to": 1000}, r"nothing is wider than 1000 channels \(--round_to\)"),
        ({"max_ratio": 0.01}, r"--max_ratio 0\.01 lets no whole block of 1 channels"),
        ({"protect": ("nowhere",)}, "there is no module 'nowhere' to protect"),
        ({"loss": "hint", "hint_layers": ("nowhere",)}, "--hint_layers"),
    ):
        with pytest.raises(DsimgError, match=reason):
            prune(PruneConfig(**{**options, **flags}))
    assert not (tmp_path / "run").exists()


def test_teachers(root: Path, tmp_path: Path, pruned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"source": root / "source", "target_macs": 0.5, **QUICK}
    none = prune(PruneConfig(out=tmp_path / "none", teacher="none", **options))
    assert "\n  teacher " not in capsys.readouterr().out
    other = prune(PruneConfig(out=tmp_path / "other", teacher=str(pruned.path), loss="kd", **options))
    shown = capsys.readouterr().out
    assert f"teacher          {pruned.path}: tests.dsimg.prune_cases:middle" in shown
    assert other.manifest is not None
    assert [Path(parent["path"]).name for parent in other.manifest["parents"]] == ["source", "pruned"]
    assert len({(run.path / "weights.safetensors").read_bytes() for run in (none, other, pruned)}) == 3
    assert len({run.file("pruning").read_bytes() for run in (none, other, pruned)}) == 1


# What takes a pruned run


def test_evaluate_measures_the_same(root: Path, pruned: Run, tmp_path: Path) -> None:
    evaluate(EvaluateConfig(source=pruned.path, data=str(root / "data"), out=tmp_path / "again"))
    again, first = report(tmp_path / "again"), report(pruned.path)
    for key in ("images", "correct", "top1", "confusion", "per_class"):
        assert again[key] == first[key]
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_training_goes_on_from_it_and_from_its_checkpoint(
    root: Path, pruned: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**{key: value for key, value in FAST.items() if key != "model"}, "lr": 0.0}
    data = str(root / "data")
    stopped = TrainConfig(data=data, out=tmp_path / "run", weights=str(pruned.path), **options)
    stop_after(stopped, 3)
    run = train(stopped)
    assert "tests.dsimg.prune_cases:middle, pruned" in capsys.readouterr().out
    assert run.file("pruning").read_bytes() == pruned.file("pruning").read_bytes()
    checkpoint = max((pruned.path / "checkpoints").glob("step_*"))
    other = train(TrainConfig(data=data, out=tmp_path / "other", weights=str(checkpoint), **options))
    for child in (run, other):
        assert child.model["arch"] == "tests.dsimg.prune_cases:middle"
        for name, tensor in read_weights(child.file("weights")).items():
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(tensor, read_weights(pruned.file("weights"))[name]), name


def test_it_teaches_and_learns(root: Path, pruned: Run, tmp_path: Path) -> None:
    options: dict[str, Any] = {key: value for key, value in FAST.items() if key != "model"} | {"epochs": 1}
    data = str(root / "data")
    taught = distill(
        DistillConfig(
            source=(str(pruned.path),), model="tests.nets:with_batchnorm", data=data, out=tmp_path / "a", **options
        )
    )
    assert taught.model["arch"] == "tests.nets:with_batchnorm"
    assert not taught.has("pruning")
    student = distill(
        DistillConfig(
            source=(str(root / "source"),), weights=str(pruned.path), data=data, out=tmp_path / "b", **options
        )
    )
    assert student.file("pruning").read_bytes() == pruned.file("pruning").read_bytes()
    assert count_parameters(open_network(student)) == told(pruned)["parameters"][1]


def test_it_is_pruned_again(root: Path, pruned: Run, tmp_path: Path) -> None:
    """Shares are of the source's, positions of the architecture's."""
    run = prune(PruneConfig(source=pruned.path, out=tmp_path / "run", target_macs=0.5, **{**QUICK, "lr": 0.0}))
    said, first = told(run), told(pruned)
    assert said["macs"][0] == first["macs"][1]
    assert abs(said["macs"][1] / said["macs"][0] - 0.5) <= 0.03 * 0.5
    twice, once = (json.loads(path.read_text()) for path in (run.file("pruning"), pruned.file("pruning")))
    whole = read_weights(root / "source" / "weights.safetensors")
    for name, dims in twice["tensors"].items():
        expected_shape = list(whole[name].shape)
        for dim, number in dims.items():
            assert set(twice["kept"][number]) <= set(once["kept"][once["tensors"][name][dim]])
            expected_shape[int(dim)] = len(twice["kept"][number])
        assert list(read_weights(run.file("weights"))[name].shape) == expected_shape
    evaluate(EvaluateConfig(source=run.path, out=tmp_path / "again"))
    assert report(tmp_path / "again")["correct"] == report(run.path)["correct"]


# The same command again


def test_a_finished_run_has_nothing_to_do(root: Path, pruned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pruned.path / "run.json").stat().st_mtime_ns
    config = {"source": root / "source", "out": pruned.path, **QUICK}
    prune(PruneConfig(target_macs=0.5, **config))
    assert "is a finished run of this very config: nothing to do" in capsys.readouterr().out
    assert (pruned.path / "run.json").stat().st_mtime_ns == before
    with pytest.raises(DsimgError, match=r"holds a run with another config: target_macs was 0\.5, now 0\.4"):
        prune(PruneConfig(target_macs=0.4, **config))


def test_a_finished_run_of_a_source_that_was_made_anew_is_refused(root: Path, pruned: Run) -> None:
    manifest = root / "source" / "run.json"
    before = manifest.read_bytes()
    manifest.write_text(json.dumps({**json.loads(before), "created": "later"}))
    try:
        with pytest.raises(DsimgError, match=r"source is not the run that .* began with: .* --overwrite"):
            prune(PruneConfig(target_macs=0.5, source=root / "source", out=pruned.path, **QUICK))
    finally:
        manifest.write_bytes(before)


EVERY = (
    "config.json",
    "source.json",
    "phases/sparsity/checkpoints/step_00000001",
    "phases/sparsity/checkpoints/step_00000002",
    "phases/sparsity/weights.safetensors",
    *(f"phases/cut_1/{name}" for name in ("pruning.json", "cut.safetensors", "begin.safetensors", "cut.json")),
    *(f"phases/cut_1/{name}" for name in ("checkpoints/step_00000001", "checkpoints/step_00000002")),
    "phases/cut_1/weights.safetensors",
    *("pruning.json", "cut.safetensors", "begin.safetensors", "cut.json"),
    *("checkpoints/step_00000001", "checkpoints/step_00000002", "weights.safetensors", "evaluation.json", "run.json"),
)
SOME = tuple(EVERY[number] for number in (1, 6, 8, 10, 14, 17, 20))


@pytest.mark.parametrize(
    ("kills", "sparsity_epochs"), [(SOME, 0), pytest.param(EVERY, 1, marks=pytest.mark.slow, id="every")]
)
def test_killed_many_times_it_ends_as_if_it_had_not_been(
    root: Path, tmp_path: Path, launch: Launch, kills: tuple[str, ...], sparsity_epochs: int
) -> None:
    flags = {**STEPS, "sparsity_epochs": sparsity_epochs, "save_minutes": 1e-6}
    words = [
        "--source",
        str(root / "source"),
        *(word for key, value in flags.items() for word in (f"--{key}", str(value))),
    ]
    program = f"""
from pathlib import Path
from tests.dsimg.prune_cases import ended
words, root = {words!r}, Path({str(tmp_path)!r})
print("WHOLE", ended([*words, "--out", str(root / "whole")]))
for target in {kills!r}:
    print("KILLED", target, ended([*words, "--out", str(root / "run")], root / "run" / target), flush=True)
print("RESUMED", ended([*words, "--out", str(root / "run")]))
"""
    (result,) = launch(1, "-c", program)
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith(("WHOLE", "RESUMED"))] == ["WHOLE 0", "RESUMED 0"], result.stdout
    killed = [line for line in lines if line.startswith("KILLED")]
    assert killed == [f"KILLED {target} -9" for target in kills]
    for name in ("weights.safetensors", "pruning.json", "predictions.csv", "source.json", "cut.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    for folder in (".", "phases/cut_1", *(["phases/sparsity"] if sparsity_epochs else [])):
        whole, run = tmp_path / "whole" / folder, tmp_path / "run" / folder
        assert same_weights(run, whole)
        assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]
        named = {path.name for path in whole.iterdir()}
        assert {path.name for path in run.iterdir() if not path.name.endswith(".tmp")} == named
        assert not named & {"cut.safetensors", "begin.safetensors"}


def test_two_ranks_cut_the_same_at_each_stage_and_go_on_when_they_are_killed(
    root: Path, pruned: Run, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", "tests.dsimg.prune_cases", "--source", str(root / "source"), "--target_macs", "0.5"]
    words += [word for key, value in QUICK.items() for word in (f"--{key}", str(value))]
    whole = [*words, "--out", str(tmp_path / "zero2"), "--deepspeed_config", "zero2"]
    for result in launch(2, *whole):
        assert result.returncode == 0, result.stdout
    resumed = [*words, "--out", str(tmp_path / "zero3"), "--deepspeed_config", "zero3"]
    with monkeypatch.context() as patch:
        patch.setenv("KILL_BEFORE", str(tmp_path / "zero3" / "weights.safetensors"))
        killed = launch(2, *resumed)
    assert [result.returncode for result in killed] == [-9, 1]
    assert "rank 0 " in killed[1].stdout
    assert not (tmp_path / "zero3" / "run.json").exists()
    results = launch(2, *resumed)
    assert [result.returncode for result in results] == [0, 0], results[0].stdout
    assert "resuming after epoch 1, step 2" in results[0].stdout
    runs = [Run.open(tmp_path / stage) for stage in ("zero2", "zero3")]
    for run in runs:
        assert {path.name for path in run.path.iterdir() if not path.name.endswith(".tmp")} == {*FILES, "logs"}
        assert run.file("pruning").read_bytes() == pruned.file("pruning").read_bytes()
        assert told(run)["macs"] == told(pruned)["macs"]
    first, second = (read_weights(run.file("weights")) for run in runs)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-6)


# What is refused


def test_what_a_source_may_be(root: Path, pruned: Run, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_macs": 0.5, "out": tmp_path / "run", **QUICK}
    unfinished = TrainConfig(data=str(root / "data"), out=tmp_path / "unfinished", **SOURCE)
    stop_after(unfinished, 1)
    (tmp_path / "file").touch()
    for source, message in (
        (tmp_path / "unfinished", r"the run .*unfinished is unfinished: give the command that started it again"),
        (tmp_path / "nowhere", r"there is no run folder .*nowhere"),
        (tmp_path / "file", r"there is no run folder .*file"),
        (root / "data", r"data is not a run folder: it has no run\.json \(it holds train, val\)"),
    ):
        with pytest.raises(DsimgError, match=message):
            prune(PruneConfig(source=source, **options))
    with pytest.raises(DsimgError, match="lie in one another"):
        prune(PruneConfig(source=root / "source", **{**options, "out": root / "source" / "pruned"}))
    assert not (tmp_path / "run").exists()


def test_other_classes_are_refused_and_other_images_of_the_same_are_not(
    root: Path, pruned: Run, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"source": root / "source", "target_macs": 0.5, **QUICK}
    wasps = make_folder(tmp_path / "wasps", classes=("ant", "bee", "wasp"), train=2, val=1)
    with pytest.raises(ConfigError, match=r"other classes than .*source was trained on \(3 here, 2 there\)\. Give the"):
        prune(PruneConfig(data=str(wasps), out=tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()
    more = make_folder(tmp_path / "more", train=12, val=2)
    run = prune(PruneConfig(data=str(more), out=tmp_path / "run", **options))
    assert report(run.path)["images"] == 4
    assert told(run)["macs"] == told(pruned)["macs"]


def test_sparse_training_needs_whole_layers(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "deepspeed_config": "zero3", "sparsity_epochs": 1}
    with pytest.raises(ConfigError, match=r"--sparsity_epochs needs whole layers on each rank.* zero2"):
        prune(PruneConfig(source=root / "source", out=tmp_path / "run", target_macs=0.5, **options))


def test_the_script_is_the_stage(root: Path, tmp_path: Path, launch: Launch) -> None:
    words = ["--source", str(root / "data"), "--target_macs", "0.5", "--out", str(tmp_path / "run")]
    (result,) = launch(1, "dsimg/prune.py", *words)
    assert result.returncode == 2
    assert f"error: {root / 'data'} is not a run folder" in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {},
            r"prune needs one target: --target_macs 0\.5, .* or --target_latency 0\.5 \(or 5ms\)\.$",
        ),
        ({"target_macs": 0.5, "target_params": 0.5}, r"It was given --target_macs and --target_params\.$"),
        ({"scan": True, "target_macs": 0.5}, r"--scan prunes nothing, and --target_macs asks for it"),
        ({"target_macs": 1.0}, r"--target_macs is 1\.0; it is a share of the source's, between 0 and 1"),
        ({"target_params": 0.0}, r"--target_params is 0\.0; it is a share"),
        ({"target_macs": float("nan")}, r"--target_macs is nan; it is a share"),
        ({"target_latency": "1.5"}, r"--target_latency is 1\.5; give a share .* or a time \(5ms\)"),
        ({"target_latency": "5 minutes"}, r"--target_latency is 5 minutes; give a share"),
        ({"target_latency": "1.2.3ms"}, r"--target_latency is 1\.2\.3ms; give a share"),
        ({"target_latency": "0ms"}, r"--target_latency is 0ms; give a share"),
        ({"target_macs": 0.5, "round_to": 0}, r"--round_to is 0; it must be at least 1"),
        ({"target_macs": 0.5, "cuts": 0}, r"--cuts is 0; it must be at least 1"),
        ({"target_macs": 0.5, "cut_epochs": 0}, r"--cut_epochs is 0; it must be at least 1"),
        ({"target_macs": 0.5, "latency_batch": 0}, r"--latency_batch is 0; it must be at least 1"),
        ({"target_macs": 0.5, "latency_threads": 0}, r"--latency_threads is 0; it must be at least 1"),
        ({"target_macs": 0.5, "max_ratio": 1.0}, r"--max_ratio is 1\.0; it must be between 0 and 1"),
        (
            {"target_macs": 0.5, "sparsity_epochs": -1},
            r"--sparsity_epochs must be 0 or more, and --spars",
        ),
        ({"target_macs": 0.5, "sparsity": float("inf")}, r"and --sparsity a positive number"),
        ({"target_macs": 0.5, "epochs": 0}, r"--epochs is 0"),
        ({"target_macs": 0.5, "temperature": -1.0}, r"--temperature is -1\.0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PruneConfig(source=Path("run"), **flags)


def test_where_a_run_goes_without_out() -> None:
    assert PruneConfig(source=Path("a/run"), target_macs=0.5).run_path == Path("a/run-pruned")
    assert PruneConfig(source=Path("a/run"), scan=True).run_path == Path("a/run-scan")
    assert PruneConfig(source=Path("a/run"), scan=True, out=Path("b")).run_path == Path("b")


@pytest.mark.parametrize(
    ("text", "goal"),
    [("0.5", (0.5, False)), (" 5ms ", (0.005, True)), ("800us", (8e-4, True)), ("1.5 s", (1.5, True))],
)
def test_a_latency_is_a_share_or_a_time(text: str, goal: tuple[float, bool]) -> None:
    assert latency_goal(text) == (pytest.approx(goal[0]), goal[1])
