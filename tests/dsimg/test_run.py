"""The run folder: claimed, finished, opened, and its files verified."""

import json
from pathlib import Path

import pytest

from dsimg.errors import RunError
from dsimg.run import Run, make_folder, remove_run, write_atomically, write_json
from tests.conftest import without_rights

CONFIG = {"model": "resnet18", "epochs": 3, "workers": 2, "size": (1, 2)}
MODEL = {"arch": "resnet18", "num_classes": 2, "classes": ["ant", "bee"], "preprocess": {}}


def finished_run(path: Path) -> Run:
    run, _ = Run.begin(path, stage="train", config=CONFIG)
    (path / "labels.txt").write_text("ant\nbee\n")
    run.finish(seed=0, model=MODEL, metrics={"top1": 0.5})
    return run


def test_a_run_is_new_then_unfinished_then_finished(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    assert Run.state(path) == "new"
    assert Run.begin(path, stage="train", config=CONFIG)[1] == "new"
    assert Run.begin(path, stage="train", config=CONFIG)[1] == "unfinished"
    finished_run(path)
    run, state = Run.begin(path, stage="train", config=CONFIG)
    assert state == "finished"
    assert run.manifest is not None
    assert {entry.name for entry in path.iterdir()} == {"config.json", "labels.txt", "run.json"}


def test_the_manifest_says_what_was_made_of_what(tmp_path: Path) -> None:
    parent = finished_run(tmp_path / "parent")
    child, _ = Run.begin(tmp_path / "child", stage="prune", config={"ratio": 0.5}, parents=[parent])
    child.finish(seed=7, model=MODEL, metrics={})
    manifest = json.loads((tmp_path / "child" / "run.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["stage"] == "prune"
    assert manifest["seed"] == 7
    assert [entry["path"] for entry in manifest["parents"]] == [str(tmp_path / "parent")]
    assert set(manifest["files"]) == {"config"}
    assert Run.open(tmp_path / "child").model["classes"] == ["ant", "bee"]


def test_another_config_is_refused_and_named(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    with pytest.raises(RunError, match=r"epochs was 3, now 5\. Choose another --out"):
        Run.begin(tmp_path / "a", stage="train", config={**CONFIG, "epochs": 5})
    Run.begin(tmp_path / "a", stage="train", config={**CONFIG, "workers": 9}, free=("workers",))
    with pytest.raises(RunError, match=r"stage was 'train', now 'prune'"):
        Run.begin(tmp_path / "a", stage="prune", config=CONFIG)


def test_overwrite_replaces_a_run_but_no_other_folder(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    _, state = Run.begin(tmp_path / "a", stage="train", config={**CONFIG, "epochs": 5}, overwrite=True)
    assert state == "new"
    assert {entry.name for entry in (tmp_path / "a").iterdir()} == {"config.json"}
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"precious")
    with pytest.raises(RunError, match="something other than a run"):
        Run.begin(tmp_path / "photos", stage="train", config=CONFIG, overwrite=True)
    assert (tmp_path / "photos" / "me.jpg").read_bytes() == b"precious"


def test_opening_what_is_no_finished_run_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run folder"):
        Run.open(tmp_path / "nowhere")
    Run.begin(tmp_path / "a", stage="train", config=CONFIG)
    with pytest.raises(RunError, match="is unfinished: give the command that started it again"):
        Run.open(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(RunError, match=r"no run\.json \(it holds nothing\)"):
        Run.open(tmp_path / "b")


def test_a_run_of_another_schema_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "a")
    write_json(tmp_path / "a" / "run.json", {**(run.manifest or {}), "schema": 2})
    with pytest.raises(RunError, match="schema 2"):
        Run.open(tmp_path / "a")


def test_a_file_is_verified_when_asked_for(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    run = Run.open(tmp_path / "a")
    assert run.file("labels") == tmp_path / "a" / "labels.txt"
    with pytest.raises(RunError, match="has no weights"):
        run.file("weights")
    (tmp_path / "a" / "labels.txt").write_text("ant\nbeE\n")
    with pytest.raises(RunError, match="is damaged"):
        run.file("labels")
    (tmp_path / "a" / "labels.txt").unlink()
    with pytest.raises(RunError, match="is missing"):
        run.file("labels")


def test_a_torn_manifest_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text('{"schema": 1, ')
    with pytest.raises(RunError, match=r"cannot read .*run\.json"):
        Run.open(tmp_path / "a")


def test_writing_is_atomic_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    write_json(target, {"a": "é"})
    assert json.loads(target.read_text()) == {"a": "é"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(target, {"a": float("nan")})
    with pytest.raises(RunError, match=r"cannot write .*Choose another --out|cannot write"):
        write_atomically(tmp_path / "missing" / "x", b"")
    assert json.loads(target.read_text()) == {"a": "é"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_run_cannot_replace_the_run_that_it_reads(tmp_path: Path) -> None:
    parent = finished_run(tmp_path / "a")
    with pytest.raises(RunError, match="lie in one another"):
        Run.begin(tmp_path / "a", stage="train", config=CONFIG, parents=[parent], overwrite=True)
    assert Run.open(tmp_path / "a").manifest == parent.manifest


def test_a_folder_for_other_files_is_made_and_is_no_run(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b").is_dir()
    assert make_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    with pytest.raises(RunError, match=r"run is a run folder, whose files would be replaced\. Choose another --out\."):
        make_folder(finished_run(tmp_path / "run").path)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match=r"cannot make the folder .*file.*: .+\. Choose another --out\."):
            make_folder(path)


def test_a_folder_that_is_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(RunError, match=r"cannot write into .*: it is read-only for this user\. Choose another --out\."):
        make_folder(tmp_path)


def test_a_finished_run_is_not_given_up(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "a")
    run.withdraw()
    assert {entry.name for entry in run.path.iterdir()} == {"config.json", "labels.txt", "run.json"}
    unfinished, _ = Run.begin(tmp_path / "b", stage="train", config=CONFIG)
    unfinished.withdraw()
    assert not unfinished.path.exists()


def test_a_run_that_cannot_be_removed_whole_is_out_of_the_way_and_goes_with_the_next(open_folder: Path) -> None:
    path, aside = open_folder / "a", open_folder / ".a.overwritten"
    kept = finished_run(path).path / "evaluations"
    kept.mkdir()
    (kept / "evaluation.json").touch()
    kept.chmod(0o555)
    open_folder.chmod(0o777)
    path.chmod(0o777)
    with without_rights():
        remove_run(path)
    assert not path.exists()
    assert (aside / "evaluations" / "evaluation.json").exists()
    (aside / "evaluations").chmod(0o755)
    remove_run(finished_run(path).path)
    assert not path.exists()
    assert not aside.exists()


def test_a_folder_that_cannot_be_made_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    message = r"cannot write in --out .*/a/b: Permission denied\. Choose another --out\."
    with without_rights(), pytest.raises(RunError, match=message):
        Run.begin(open_folder / "a" / "b", stage="train", config=CONFIG)
