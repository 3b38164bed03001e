"""`dsimg predict --out`: one row a file, whatever happens on the way."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
    assert left_beside(out) == []


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
    assert left_beside(out) == ["whole.csv"]


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


def test_a_table_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    out, files = tmp_path / "t.csv", [Path("a"), Path("b")]
    with PredictionTable(out, files, asked={"source": "s"}, top=1) as table:
        table.add(files[0], [("a", 0.5)], None)
    for other in ({"asked": {"source": "t"}}, {"files": [Path("a")]}, {"top": 2}):
        values = {"files": files, "asked": {"source": "s"}, "top": 1} | other
        with pytest.raises(RunError, match=f"another {'source' if 'asked' in other else next(iter(other))}"):
            PredictionTable(out, values["files"], asked=values["asked"], top=values["top"])


def test_two_processes_do_not_write_one_table(tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    code = (
        "import sys, pathlib\nfrom dsimg.prediction_table import PredictionTable\n"
        "PredictionTable(pathlib.Path(sys.argv[1]), [], asked={}, top=1)"
    )
    with PredictionTable(out, [], asked={}, top=1):
        answer = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert "another process is writing" in answer.stderr


def test_a_finished_table_stays_unless_it_is_to_be_replaced(run: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    out.write_text("mine\n")
    predict(PredictConfig(source=run, images=(pictures / "0000.png",), out=out))
    assert out.read_text() == "mine\n"
    predict(PredictConfig(source=run, images=(pictures / "0000.png",), out=out, overwrite=True))
    assert len(rows_of(out)) == 1


@pytest.mark.parametrize(("name", "words"), [("t.txt", "ends in"), ("folder.csv", "is a folder")])
def test_where_no_table_can_be_is_said_at_once(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=words):
        PredictConfig(source=tmp_path, images=(tmp_path,), out=tmp_path / name)


def test_names_that_are_no_text_and_names_with_lines_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    files = [Path(os.fsdecode(b"a\xff.png")), Path('b\n"c",d.png')]
    with PredictionTable(out, files, asked={}, top=1) as table:
        for file in files:
            table.add(file, [("x,y", 1.0)], None)
        table.finish()
    rows = rows_of(out)
    assert [row["file"] for row in rows] == ["a\\udcff.png", 'b\n"c",d.png']
    assert rows[1]["class"] == "x,y"


def test_parquet_holds_the_same(run: Path, pictures: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow to run this one")
    out = tmp_path / "t.parquet"
    predict(PredictConfig(source=run, images=(pictures,), out=out, top=1))
    table = parquet.read_table(out).to_pylist()
    assert len(table) == FILES
    assert table[0]["probability"] > 0
    assert table[7]["class"] is None
    assert "not an image" in table[7]["error"]
    assert left_beside(out) == []
