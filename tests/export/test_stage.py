import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsimg import cli
from dsimg.console import Terminal
from dsimg.errors import ModelError, RunError
from dsimg.run import Run
from dsimg_export.stage import run_short
from tests.export.golden_runs import edit_manifest
from tests.export.runs import MODEL, write_run


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
