"""`dsimg show`: the ancestry of a run, and what has become of what it was made of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dsimg.errors import DsimgError
from dsimg.folder import find_images, write_index
from dsimg.run import Run, write_json
from dsimg.show import ShowConfig, ancestry, count_parameters, show
from tests.conftest import make_folder
from tests.export.runs import MODEL, write_run

SHARE = {"value": 0.75, "interval": [0.41, 0.93]}


def training_run(path: Path, *, data: Path) -> Run:
    """Write a run of 21 trained values, measured on eight images."""
    run, _ = Run.begin(path, stage="train", config={"weights": "Net_Weights.DEFAULT"})
    tensors = {"conv.weight": np.zeros((2, 3, 3), np.float32), "conv.bias": np.zeros(3, np.float32)}
    tensors |= {"norm.running_mean": np.zeros(7, np.float32), "norm.num_batches_tracked": np.zeros((), np.int64)}
    save_file(tensors, path / "weights.safetensors")
    write_index(find_images(data, seed=0), path / "index.jsonl.gz")
    run.finish(seed=3, model=MODEL, metrics={"validation": {"images": 8, "top1": SHARE}})
    return Run.open(path)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder with the runs `trained`, `pruned`, made of it, and `file`, made of that."""
    trained = training_run(tmp_path / "runs" / "trained", data=make_folder(tmp_path / "data"))
    seconds = {"source fp32": 0.004, "source int8": 0.002, "pruned fp32": 0.003, "pruned int8": 0.001}
    metrics = {"pruning": {"latency": {"seconds": seconds}}}
    pruned = write_run(tmp_path / "runs" / "pruned", stage="prune", parents=(trained,), metrics=metrics)
    write_run(tmp_path / "runs" / "file", parents=(pruned,))
    return tmp_path / "runs"


def test_each_step_is_told_back_to_the_images(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = show(ShowConfig(source=chain / "file"))
    assert [step.run.path.name for step in steps] == ["file", "pruned", "trained"]
    assert [parent.state for step in steps for parent in step.parents] == ["here", "here"]
    assert [step.parameters for step in steps] == [None, None, 21]
    assert steps[1].latency == {"fp32": 0.003, "int8": 0.001}
    assert steps[2].accuracy == {"validation": {"images": 8, "top1": SHARE}}
    folder = str(chain.parent / "data")
    assert steps[2].data == {"folder": folder, "classes": 2, "train": 16, "val": 8, "there": True}
    said = capsys.readouterr().out
    for words in (
        f"train  {chain / 'trained'}",
        "75.00%  (95 % interval 41.00% to 93.00%), 8 images",
        "1 ms, int8",
        "begun from       Net_Weights.DEFAULT",
        f"{folder}: 16 training and 8 validation images, 2 classes",
    ):
        assert words in said
    assert "!" not in said


def test_a_chain_that_moved_as_a_whole_is_found_beside_the_run(chain: Path, tmp_path: Path) -> None:
    shutil.move(chain, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "data")
    steps = ancestry(Run.open(tmp_path / "elsewhere" / "file"))
    assert [step.run.path.name for step in steps] == ["file", "pruned", "trained"]
    assert [parent.state for step in steps for parent in step.parents] == ["moved", "moved"]
    assert steps[2].data is not None
    assert steps[2].data["there"] is False


def test_a_path_that_was_given_from_another_folder_is_no_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parent = write_run(Path("runs") / "parent")
    write_run(Path("runs") / "search" / "file", parents=(parent,))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    step, above = ancestry(Run.open(tmp_path / "runs" / "search" / "file"))
    assert (step.parents[0].path, step.parents[0].state) == (tmp_path / "runs" / "parent", "here")
    assert above.run.path == tmp_path / "runs" / "parent"


def test_a_parent_that_was_made_anew_or_is_gone_is_said_and_not_followed(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(chain / "trained" / "run.json", {**json.loads((chain / "trained" / "run.json").read_text()), "seed": 4})
    assert [step.run.path.name for step in show(ShowConfig(source=chain / "file"))] == ["file", "pruned"]
    assert "made anew since" in capsys.readouterr().out
    shutil.rmtree(chain / "pruned")
    (step,) = show(ShowConfig(source=chain / "file"))
    assert step.parents[0].state == "gone"
    assert f"{chain / 'pruned'}  (! no longer there)" in capsys.readouterr().out


def test_what_quantize_and_bench_measured_is_told(chain: Path) -> None:
    own = {"images": 8, "top1": SHARE, "latency_ms": {"p50": 2.5}}
    run = write_run(chain / "int8", stage="quantize", parents=(Run.open(chain / "file"),), metrics={"int8": own})
    runs = [{"run": "a", "sha256": "another"}, {"run": "b", "sha256": ancestry(run)[0].sha256}]
    rows = [{"run": name, "threads": 1, "batch_size": 8, "p50_ms": ms} for name, ms in (("a", 9.0), ("b", 4.0))]
    (chain / "bench").mkdir()
    write_json(chain / "bench" / "bench.json", {"runs": runs, "measurements": rows})
    step = ancestry(run)[0]
    assert step.accuracy == {"validation": {"images": 8, "top1": SHARE}}
    assert step.latency == {"int8": 0.0025, "bench, 1 thread, 8 images": 0.004}


def test_what_two_steps_were_made_of_is_told_once(chain: Path) -> None:
    trained, pruned = Run.open(chain / "trained"), Run.open(chain / "pruned")
    student = write_run(chain / "student", stage="distill", parents=(trained, pruned))
    assert [step.run.path.name for step in ancestry(student)] == ["student", "trained", "pruned"]


def test_json_needs_no_torch_and_has_what_was_evaluated_since(chain: Path) -> None:
    (chain / "file" / "evaluations" / "held_out").mkdir(parents=True)
    write_json(chain / "file" / "evaluations" / "held_out" / "evaluation.json", {"images": 8, "top1": SHARE})
    code = (
        "import sys; from dsimg.show import *; cli.context(); show(ShowConfig(source=Path(sys.argv[1]), json=True)); "
        "assert not {'torch', 'onnxruntime'} & sys.modules.keys()"
    )
    words = [sys.executable, "-c", code, str(chain / "file")]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    steps = json.loads(answer.stdout)["steps"]
    assert [step["stage"] for step in steps] == ["export", "prune", "train"]
    assert steps[0]["accuracy"] == {"held_out": {"images": 8, "top1": SHARE}}
    assert steps[0]["bytes"]["model"] == (chain / "file" / "model.onnx").stat().st_size
    assert steps[0]["parents"][0]["sha256"] == steps[1]["sha256"]
    assert steps[2]["begun_from"] == "Net_Weights.DEFAULT"


def test_values_are_counted_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    buffers = {"norm.running_mean": np.zeros(7, np.float32), "norm.num_batches_tracked": np.zeros((), np.int64)}
    trained = {"conv.weight": np.zeros((2, 3, 3), np.float32), "scale": np.zeros((), np.float32)}
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_file({**trained, **buffers}, path, metadata={"format": "pt"})
    assert count_parameters(path) == 19
    save_file(buffers, path)
    assert count_parameters(path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\2" + bytes(7) + b"[]", b"\7" + bytes(7) + b'{"a":1}'])
def test_a_damaged_weights_file_has_no_count(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.safetensors").write_bytes(content)
    assert count_parameters(tmp_path / "weights.safetensors") is None
    with pytest.raises(DsimgError, match="there is no run folder"):
        show(ShowConfig(source=tmp_path / "nowhere"))
