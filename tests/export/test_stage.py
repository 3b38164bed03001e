import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsimg import cli
from dsimg.console import Terminal
from dsimg.errors import ModelError, RunError
from dsimg.run import Run
from dsimg_export.stage import copy_described, run_short
from tests.conftest import ROOT, without_rights
from tests.export.golden_runs import edit_manifest
from tests.export.runs import CLASSES, MODEL, write_run


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags of a stage that copies a file."""

    source: Path
    out: Path
    overwrite: bool = False


@pytest.fixture
def said(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(cli, "_context", cli.Context(Terminal(stream=stream), None))
    return stream


def copy(config, body=None):
    """Run the stage; return the run, and how often its body ran."""
    source = Run.open(config.source)
    times = []

    def work(out, model):
        times.append(1)
        if body is not None:
            body(out)
        shutil.copyfile(model, out.path / "model.onnx")
        out.finish(seed=None, model=MODEL, metrics={})

    run = run_short(config, stage="copy", parents=[source], prepare=lambda: source.file("model"), body=work)
    return run, len(times)


def make_anew(path):
    edit_manifest(path, lambda content: content.update(created="later"))


def test_a_finished_run_is_left_alone(tmp_path, said):
    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out")
    assert copy(config)[1] == 1
    before = (tmp_path / "out" / "run.json").read_bytes()
    assert copy(config)[1] == 0
    assert (tmp_path / "out" / "run.json").read_bytes() == before
    assert "out is a finished run of this very config: nothing to do." in said.getvalue()


def killed(out):
    raise KeyboardInterrupt


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_whose_parent_was_made_anew_since_is_not_up_to_date(tmp_path, said, finished):
    source = write_run(tmp_path / "source").path
    config = Config(source=source, out=tmp_path / "out")
    if finished:
        copy(config)
    else:
        with pytest.raises(KeyboardInterrupt):
            copy(config, killed)
    make_anew(source)
    message = r"source is not the run that .*out began with: it has been made anew since\. .* --overwrite"
    with pytest.raises(RunError, match=message):
        copy(config)
    run, times = copy(Config(source=source, out=tmp_path / "out", overwrite=True))
    assert times == 1
    assert json.loads((source / "run.json").read_bytes())["created"] == "later"
    assert copy(config)[1] == 0
    assert run.path == tmp_path / "out"


def test_what_a_killed_process_was_writing_is_removed(tmp_path, said):
    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out")

    def kill(out):
        (out.path / ".model.onnx.123.tmp").write_bytes(b"half of it")
        (out.path / ".trials.123.tmp").mkdir()
        (out.path / ".trials.123.tmp" / "1.onnx").write_bytes(b"a try")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(config, kill)
    copy(config)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "run.json", "model.onnx", ".lock"}


def test_what_is_refused_leaves_the_folder_to_the_command_put_right(tmp_path, said):
    source = write_run(tmp_path / "source").path
    out = tmp_path / "out"

    def refused(run):
        (run.path / "model.onnx").write_bytes(b"half")
        raise ModelError("no. Give another.")

    with pytest.raises(ModelError):
        copy(Config(source=source, out=out), refused)
    assert not out.exists()

    def missing():
        raise ModelError("not there. Give another.")

    with pytest.raises(ModelError):
        run_short(Config(source=source, out=out), stage="copy", parents=[], prepare=missing, body=lambda run, _: None)
    assert not out.exists()
    other = write_run(tmp_path / "other").path
    assert copy(Config(source=other, out=out))[1] == 1


def test_a_finished_run_is_not_prepared_again(tmp_path, said):
    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out")
    copy(config)
    source = Run.open(config.source)
    run = run_short(config, stage="copy", parents=[source], prepare=pytest.fail, body=lambda run, _: None)
    assert run.has("model")


def test_what_another_process_finished_while_this_one_prepared_stays(tmp_path, said):
    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out")
    source, body = Run.open(config.source), lambda out, _: pytest.fail("it was done")
    run = run_short(config, stage="copy", parents=[source], prepare=lambda: copy(config), body=body)
    assert run.manifest == Run.open(tmp_path / "out").manifest
    assert run.file("model").exists()
    assert "out is a finished run of this very config: nothing to do." in said.getvalue()


def test_what_another_process_began_while_this_one_prepared_is_not_overwritten(tmp_path, said):
    code = (
        "import sys; from pathlib import Path; from dsimg.run import Run, hold_lock; out = Path(sys.argv[1]); "
        "Run.begin(out, stage='copy', config={}); hold_lock(out); print('locked', flush=True); input()"
    )
    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out", overwrite=True)
    words = [sys.executable, "-c", code, str(config.out)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as other:
        with pytest.raises(RunError, match=r"another process is writing the run .*out"):
            run_short(
                config,
                stage="copy",
                parents=[],
                prepare=other.stdout.readline,
                body=lambda run, _: pytest.fail("it is not ours"),
            )
        assert (config.out / "config.json").exists()
        other.communicate("\n")
    assert other.returncode == 0


def test_a_stage_may_prepare_nothing(tmp_path, said):
    config = Config(source=tmp_path, out=tmp_path.with_name("out"))

    def finish(run, nothing):
        assert nothing is None
        run.finish(seed=None, model=MODEL, metrics={})

    run = run_short(config, stage="copy", parents=[], prepare=lambda: None, body=finish)
    assert run.manifest["stage"] == "copy"
    assert said.getvalue() == ""


def test_what_cannot_be_given_up_does_not_hide_why_the_stage_refused(tmp_path, said):
    def refused(run):
        (run.path / "model.onnx").mkdir()  # which is no file to remove
        raise ModelError("no. Give another.")

    with pytest.raises(ModelError, match=r"^no\. Give another\.$"):
        copy(Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out"), refused)


def test_a_finished_run_where_nothing_can_be_written_needs_nothing_to_be_done(open_folder, said):
    config = Config(source=write_run(open_folder / "source").path, out=open_folder / "out")
    copy(config)
    (config.out / ".lock").unlink()  # as in a copy
    config.out.chmod(0o555)
    with without_rights():
        assert copy(config)[1] == 0
    assert "nothing to do" in said.getvalue()


def test_a_folder_that_cannot_be_written_is_named(open_folder, said):
    source = write_run(open_folder / "source").path
    overwritten = Config(source=source, out=open_folder / "out", overwrite=True)
    copy(overwritten)
    hidden = open_folder / "hidden"
    hidden.mkdir()
    for folder, mode in ((open_folder, 0o555), (overwritten.out, 0o555), (hidden, 0)):
        folder.chmod(mode)
    (overwritten.out / ".lock").unlink()
    new, below = (Config(source=source, out=open_folder / name) for name in ("new", "hidden/run"))
    for config in (new, below, overwritten):
        message = rf"cannot write in --out {config.out}: Permission denied\. Choose another --out\."
        with without_rights(), pytest.raises(RunError, match=message):
            copy(config)


def test_a_full_disk_is_named(tmp_path, said):
    parent, _ = Run.begin(tmp_path / "trained", stage="train", config={})
    (parent.path / "index.jsonl.gz").write_bytes(b"the list of images")
    parent.finish(seed=0, model=MODEL, metrics={})

    def describe(run):
        (run.path / "index.jsonl.gz").symlink_to("/dev/full")
        copy_described(Run.open(parent.path), run, CLASSES)

    config = Config(source=write_run(tmp_path / "source").path, out=tmp_path / "out")
    with pytest.raises(
        RunError, match=r"cannot write in --out .*out: No space left on device\. Choose another --out\."
    ):
        copy(config, describe)
    assert not config.out.exists()
