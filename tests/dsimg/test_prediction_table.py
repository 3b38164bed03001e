"""`dsimg predict --out`: one row a file, whatever happens on the way."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsimg import prediction_table
from dsimg.errors import ConfigError, RunError
from dsimg.predict import PredictConfig, predict
from dsimg.prediction_table import PredictionTable
from tests.export.runs import write_run

FILES = 400


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 400 small pictures, every fiftieth of them broken."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(FILES):
        path = folder / f"{number:04}.png"
        if number % 50 == 7:
            path.write_bytes(b"no picture")
        else:
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "run").path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def left_beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name != path.name)


def test_a_row_a_file_in_their_order_and_the_reason_where_there_is_no_answer(
    run: Path, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deeper" / "predictions.csv"
    assert predict(PredictConfig(source=run, images=(pictures,), out=out, top=2)) == []
    rows = rows_of(out)
    assert [row["file"] for row in rows] == [str(pictures / f"{number:04}.png") for number in range(FILES)]
    plain = predict(PredictConfig(source=run, images=(pictures / "0000.png",), top=2))[0].classes
    assert rows[0]["class"] == plain[0][0]
    assert float(rows[0]["probability"]) == pytest.approx(plain[0][1], rel=1e-5)
    assert rows[0]["class_2"] == plain[1][0]
    bad = [place for place, row in enumerate(rows) if row["error"]]
    assert bad == list(range(7, FILES, 50))
    assert "not an image" in rows[7]["error"]
    assert rows[7]["class"] == rows[7]["probability_2"] == ""
    assert left_beside(out) == ["predictions.csv.state.json"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_table_that_was_stopped_goes_on_without_a_gap_or_a_double(
    run: Path, pictures: Path, tmp_path: Path, sig: signal.Signals
) -> None:
    whole = tmp_path / "whole.csv"
    predict(PredictConfig(source=run, images=(pictures,), out=whole))
    out = tmp_path / "stopped.csv"
    # Slow enough to be stopped in the middle, and its place synced often.
    code = (
        "import time, dsimg.prediction_table as t, dsimg.predict as p\n"
        "t.SYNC_SECONDS = 0.02\n"
        "add = t.PredictionTable.add\n"
        "t.PredictionTable.add = lambda *args: (time.sleep(0.005), add(*args))\n"
        "from dsimg import cli\n"
        "cli.run(p.predict)\n"
    )
    words = [sys.executable, "-c", code, "--source", str(run), str(pictures), "--out", str(out)]
    starts = 0
    while not out.exists():
        starts += 1
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heeding)
        state = out.with_name("stopped.csv.state.json")
        before = state.read_text() if state.exists() else ""
        deadline = time.monotonic() + 60
        while starts < 3 and process.poll() is None and (not state.exists() or state.read_text() == before):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if starts < 3:
            time.sleep(0.2)
            process.send_signal(sig)
        process.wait(60)
        assert starts < 5
    assert starts == 3
    assert out.read_bytes() == whole.read_bytes()
    assert left_beside(out) == ["stopped.csv.state.json", "whole.csv", "whole.csv.state.json"]


def heeding() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_rows_beyond_the_last_sync_are_written_again(tmp_path: Path) -> None:
    out, files = tmp_path / "t.csv", [Path(f"{number}.png") for number in range(4)]
    asked = {"source": "s"}
    with PredictionTable(out, files, asked=asked, top=1) as table:
        table.add(files[0], [("a", 0.5)], None)
        table.sync()
    partial = tmp_path / "t.csv.partial"
    partial.write_bytes(partial.read_bytes() + b"1.png,a,0.5,\n2.pn")  # what a kill leaves
    with PredictionTable(out, files, asked=asked, top=1) as table:
        assert table.rows == 1
        for file in files[1:]:
            table.add(file, [("b", 0.25)], None)
        table.finish()
    assert [row["file"] for row in rows_of(out)] == [str(file) for file in files]


@pytest.mark.parametrize("left", [None, b"", b"file,cla"])
def test_a_table_whose_rows_are_gone_begins_anew(tmp_path: Path, left: bytes | None) -> None:
    out, files = tmp_path / "t.csv", [Path("a"), Path("b")]
    with PredictionTable(out, files, asked={}, top=1) as table:
        table.add(files[0], [("x", 0.5)], None)
    partial = tmp_path / "t.csv.partial"
    partial.unlink()
    if left is not None:
        partial.write_bytes(left)
    with PredictionTable(out, files, asked={}, top=1) as table:
        assert table.rows == 0
        for file in files:
            table.add(file, [("x", 0.5)], None)
        table.finish()
    assert out.read_text() == "file,class,probability,error\na,x,0.5,\nb,x,0.5,\n"


# In a process of its own, which has no threads: a copy of it is stopped at each line of the table's code in turn.
STOPPED = """
import json, os, pathlib, sys
from dsimg import prediction_table
out, overwrite, killed = pathlib.Path(sys.argv[1]), sys.argv[2] == "overwrite", sys.argv[3] == "killed"
files = [pathlib.Path(name) for name in "abc"]
os.fsync = lambda number: None  # only a power cut needs it
if out.suffix == ".parquet":
    import pyarrow.csv, pyarrow.parquet

def write():
    prediction_table.SYNC_SECONDS = -1
    table = prediction_table.PredictionTable(out, files, asked={}, top=1, overwrite=overwrite)
    if not overwrite and table.is_finished():
        return
    with table:
        for file in files[table.rows:]:
            table.add(file, [("x", 0.5)], None if file.name == "a" else "bad")
        assert table.bad == 2, table.bad
        table.finish()

def in_a_copy(lines):
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("dsimg/prediction_table.py", "dsimg/run.py")):
            return None
        lines -= event == "line"
        if not lines:
            if killed:
                os._exit(9)
            raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        write()
    except KeyboardInterrupt:
        os._exit(9)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

found, lines, code = [], 1, 9
while code == 9:
    for path in out.parent.iterdir():
        path.unlink()
    if overwrite:
        out.write_text("old")
    code = in_a_copy(lines)
    between = out.read_bytes().hex() if out.exists() else None
    again = in_a_copy(-1)
    found.append((code, between, again, out.read_bytes().hex()))
    lines += 1
print(json.dumps(found))
"""


@pytest.mark.parametrize("how", ["anew", "overwrite"])
@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
@pytest.mark.parametrize("stopped", ["killed", "interrupted"])
def test_stopped_at_any_line_the_same_command_makes_it_whole(tmp_path: Path, name: str, how: str, stopped: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pip install pyarrow to run this one")
    words = [sys.executable, "-c", STOPPED, str(tmp_path / name), how, stopped]
    answer = subprocess.run(words, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert len(found) > 100
    whole = found[-1][3]
    if name.endswith(".csv"):
        assert bytes.fromhex(whole) == b"file,class,probability,error\na,x,0.5,\nb,x,0.5,bad\nc,x,0.5,bad\n"
    before = b"old".hex() if how == "overwrite" else None
    for code, between, again, after in found:
        assert code in (0, 9)
        assert between in (before, whole)
        assert again == 0
        assert after == whole
    assert left_beside(tmp_path / name) == [f"{name}.state.json"]


def test_a_table_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    out, files = tmp_path / "t.csv", [Path("a"), Path("b")]
    with PredictionTable(out, files, asked={"source": "s"}, top=1) as table:
        table.add(files[0], [("a", 0.5)], None)
    for other in ({"asked": {"source": "t"}}, {"files": [Path("a")]}, {"top": 2}):
        values = {"files": files, "asked": {"source": "s"}, "top": 1} | other
        table = PredictionTable(out, values["files"], asked=values["asked"], top=values["top"])
        words = f"another {'source' if 'asked' in other else next(iter(other))}. Replace it with --overwrite"
        with pytest.raises(RunError, match=words), table:
            pass
    with PredictionTable(out, files, asked={"source": "t"}, top=1, overwrite=True) as table:
        assert table.rows == 0


def intruder(out: Path) -> str:
    """What a second process says that begins the same table."""
    code = (
        "import sys, pathlib\nfrom dsimg.prediction_table import PredictionTable\n"
        "with PredictionTable(pathlib.Path(sys.argv[1]), [], asked={}, top=1): print('in')"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    return answer.stdout + answer.stderr


def test_two_processes_do_not_write_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t.csv"
    said: list[str] = []
    read, replace = prediction_table.read_json, Path.replace

    def reading(path: Path) -> dict[str, object]:
        said.append(intruder(out))
        return read(path)

    def replacing(path: Path, target: Path) -> Path:
        said.append(intruder(out))
        return replace(path, target)

    monkeypatch.setattr(prediction_table, "read_json", reading)
    with PredictionTable(out, [], asked={}, top=1) as table:
        said.append(intruder(out))
        monkeypatch.setattr(Path, "replace", replacing)
        table.finish()
        monkeypatch.undo()
        said.append(intruder(out))
    assert len(said) > 3
    for words in said:
        assert f"another process is writing {out}" in words
    assert "t.csv is there" in intruder(out)
    assert left_beside(out) == ["t.csv.state.json"]


def test_a_finished_table_stays_unless_it_is_to_be_replaced(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, images = tmp_path / "t.csv", (pictures / "0000.png", pictures / "0001.png")
    out.write_text("mine\n")
    with pytest.raises(
        RunError, match=r"t.csv is there, and may not be what is asked for. Replace it with --overwrite"
    ):
        predict(PredictConfig(source=run, images=images, out=out))
    assert out.read_text() == "mine\n"
    predict(PredictConfig(source=run, images=images, out=out, overwrite=True))
    assert len(rows_of(out)) == 2
    before = out.stat()
    capsys.readouterr()
    predict(PredictConfig(source=run, images=images, out=out))
    assert "t.csv is there, whole: nothing to do" in capsys.readouterr().out
    other = write_run(tmp_path / "other").path
    for name, config in {
        "source": PredictConfig(source=other, images=images, out=out),
        "files": PredictConfig(source=run, images=images[:1], out=out),
        "top": PredictConfig(source=run, images=images, out=out, top=1),
    }.items():
        with pytest.raises(RunError, match=f"t.csv is there, made with another {name}. Replace it with --overwrite"):
            predict(config)
    assert out.stat() == before
    out.write_text("mine\n")
    with pytest.raises(RunError, match="may not be what is asked for"):
        predict(PredictConfig(source=run, images=images, out=out))
    assert out.read_text() == "mine\n"


def test_a_table_is_replaced_at_the_end_and_counts_the_errors_of_all_its_rows(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.csv"
    out.write_text("old\n")
    config = PredictConfig(source=run, images=(pictures,), out=out, overwrite=True)
    add = PredictionTable.add

    def some(table: PredictionTable, file: Path, classes: list[tuple[str, float]], error: str | None) -> None:
        if file.name == "0300.png":
            raise KeyboardInterrupt
        add(table, file, classes, error)

    with monkeypatch.context() as patch:
        patch.setattr(PredictionTable, "add", some)
        with pytest.raises(KeyboardInterrupt):
            predict(config)
    assert out.read_text() == "old\n"
    with pytest.raises(RunError, match="Replace it with --overwrite"):
        predict(PredictConfig(source=run, images=(pictures,), out=out))
    capsys.readouterr()
    predict(config)
    said = capsys.readouterr().out
    assert "300 rows of" in said
    assert "400, 100 of them now" in said
    assert "8: see the column `error`" in said
    assert len([row for row in rows_of(out) if row["error"]]) == 8


@pytest.mark.parametrize(("name", "words"), [("t.txt", "ends in"), ("folder.csv", "is a folder")])
def test_where_no_table_can_be_is_said_at_once(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=words):
        PredictConfig(source=tmp_path, images=(tmp_path,), out=tmp_path / name)


NAMES = [
    Path(os.fsdecode(b"a\xff.png")),
    *(
        Path(name)
        for name in ('b\n"c",d.png', "\r.png", "e\rf.png", "g\r\nh.png", "'", " i ", ",", '"', "NA", "null", "nan")
    ),
]


def write_names(out: Path) -> None:
    with PredictionTable(out, NAMES, asked={}, top=2) as table:
        for file in NAMES[1:]:
            table.add(file, [(str(file), 1.0), ("x\udcff,y", 0.0)], None)
        table.add(NAMES[0], [], "a \r b")
        table.finish()


def test_names_that_are_no_text_and_names_with_lines_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    write_names(out)
    rows = rows_of(out)
    names = [str(name) for name in NAMES[1:]]
    assert [row["file"] for row in rows] == [*names, "a\\udcff.png"]
    assert [row["class"] for row in rows] == [*names, ""]
    assert [row["class_2"] for row in rows] == [*["x\\udcff,y"] * len(names), ""]
    assert [row["error"] for row in rows] == [*[""] * len(names), "a \r b"]
    assert b"\r\n" not in out.read_bytes().replace(b"g\r\nh", b"")


def test_parquet_holds_the_same(run: Path, pictures: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow to run this one")
    out = tmp_path / "t.parquet"
    predict(PredictConfig(source=run, images=(pictures,), out=out, top=1))
    table = parquet.read_table(out).to_pylist()
    assert len(table) == FILES
    assert table[0]["probability"] > 0
    assert table[7]["class"] is None
    assert "not an image" in table[7]["error"]
    assert left_beside(out) == ["t.parquet.state.json"]


def test_parquet_has_null_only_where_there_is_nothing(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow to run this one")
    out = tmp_path / "t.parquet"
    write_names(out)
    table = parquet.read_table(out).to_pydict()
    names = [str(name) for name in NAMES[1:]]
    assert table["file"] == [*names, "a\\udcff.png"]
    assert table["class"] == [*names, None]
    assert table["probability_2"] == [*[0.0] * len(names), None]
    assert table["error"] == [*[None] * len(names), "a \r b"]
