import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from dsimg import cli
from dsimg.console import Terminal
from dsimg.errors import ConfigError, RunError
from dsimg.run import Run, sha256
from dsimg_export import bench as module
from dsimg_export.bench import BenchConfig, bench, ratio_interval, rows_of
from dsimg_export.footprint import Footprint
from dsimg_export.session import MIN_REPEATS, Times
from tests.export.files import write_network
from tests.export.golden_runs import write_golden_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A narrow and a wide network."""
    folder = tmp_path_factory.mktemp("runs")
    widths = {"narrow": 4, "wide": 128}
    return [
        write_golden_run(folder / name, networks={"model": lambda path, width=width: write_network(path, width=width)})
        for name, width in widths.items()
    ]


@pytest.fixture
def said(monkeypatch):
    """What the command prints; processes of their own are left out."""
    stream = io.StringIO()
    monkeypatch.setattr(cli, "_context", cli.Context(Terminal(stream=stream), None))
    cost = Footprint(load_seconds=0.0125, loaded_bytes=3 * 2**20, peak_bytes=5 * 2**20)
    monkeypatch.setattr(module, "footprint", lambda path, **rest: cost)
    return stream


def quick(runs, **flags):
    defaults = {"batch_sizes": (1,), "threads": (1,), "seconds": 0.05}
    return BenchConfig(source=tuple(run.path for run in runs), **{**defaults, **flags})


def test_runs_are_compared_with_the_first_at_each_setting(runs, said, tmp_path):
    out = tmp_path / "out"
    report = bench(quick(runs, batch_sizes=(1, 3), threads=(1, 2), out=out))
    assert sorted(file.name for file in out.iterdir()) == ["bench.json", "bench.png"]
    assert json.loads((out / "bench.json").read_bytes()) == report
    with Image.open(out / "bench.png") as picture:
        assert picture.width > picture.height > 500
    rows = report["measurements"]
    settings = [(threads, batch) for threads in (1, 2) for batch in (1, 3)]
    expected = [(name, *setting) for setting in settings for name in ("narrow", "wide")]
    assert [(row["run"], row["threads"], row["batch_size"]) for row in rows] == expected
    for row in rows:
        assert row["calls"] >= MIN_REPEATS
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    narrow, wide = rows[:2]
    assert (narrow["speedup"], narrow["interval"]) == (1.0, [1.0, 1.0])
    assert 0 < wide["interval"][0] <= wide["speedup"] <= wide["interval"][1] < 0.5
    assert wide["speedup"] == pytest.approx(narrow["p50_ms"] / wide["p50_ms"])
    assert wide["waited"] > 0.9
    assert rows[4]["waited"] is None  # with two threads, the caller's processor time is not all
    first = report["runs"][0]
    assert (first["run"], first["path"], first["sha256"]) == (
        "narrow",
        str(runs[0].path),
        sha256(runs[0].path / "run.json"),
    )
    assert (first["load_seconds"], first["loaded_bytes"], first["peak_bytes"]) == (0.0125, 3 * 2**20, 5 * 2**20)
    assert report["footprint_at"] == {"threads": 2, "batch_size": 3}
    assert report["machine"]["processor"]
    assert report["machine"]["gpu"] is None
    text = said.getvalue()
    assert "12.5" in text
    assert "5.0 MiB" in text
    assert f"{wide['speedup']:.2f} ({wide['interval'][0]:.2f} to {wide['interval'][1]:.2f})" in text
    assert f"written: {out}/bench.json, {out}/bench.png" in text


def test_without_a_folder_nothing_is_written_and_one_run_has_no_ratio(runs, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench(quick(runs[:1]))
    assert list(tmp_path.iterdir()) == []
    assert "times as fast" not in said.getvalue()


def test_without_matplotlib_there_is_no_picture_and_that_is_said(runs, said, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "dsimg_export.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench(quick(runs[:1], out=tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["bench.json"]
    assert "no bench.png: there is no matplotlib here (pip install matplotlib)" in said.getvalue()


def test_a_peak_that_is_not_known_is_said(runs, said, monkeypatch):
    cost = Footprint(load_seconds=0.0125, loaded_bytes=3 * 2**20, peak_bytes=None)
    monkeypatch.setattr(module, "footprint", lambda path, **rest: cost)
    assert bench(quick(runs[:1]))["runs"][0]["peak_bytes"] is None
    assert "not known here" in said.getvalue()


def test_threads_are_one_and_all_cores_by_default(runs, said, monkeypatch):
    monkeypatch.setattr(module, "all_cores", lambda: 3)
    report = bench(quick(runs[:1], threads=None))
    assert [row["threads"] for row in report["measurements"]] == [1, 3]


def test_figures_are_those_of_the_rounds():
    wall = {"a": [0.010] * 99 + [0.110], "b": [0.005] * 100}
    times = {name: Times(np.array(values), np.array(values) / 2) for name, values in wall.items()}
    first, second = rows_of(times, threads=1, batch=4)
    assert first["p50_ms"] == pytest.approx(10)
    assert first["p99_ms"] == pytest.approx(11)  # numpy's: linear between the 99th and the 100th of 100
    assert first["images_per_second"] == pytest.approx(4 * 100 / 1.1)
    assert first["waited"] == pytest.approx(2)
    assert second["images_per_second"] == pytest.approx(800)
    assert (second["speedup"], second["interval"]) == (pytest.approx(2), pytest.approx([2, 2]))


def test_an_interval_covers_the_ratio_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 200)
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        # What slows both alike, in rounds that follow one another, and noise of each: the medians' ratio is 2.
        drift = np.repeat(random.lognormal(0, 0.3, 12), 12)
        first, other = (drift * base * random.lognormal(0, 0.1, len(drift)) for base in (2.0, 1.0))
        low, high = ratio_interval(first, other)
        assert high - low < 0.6
        covered += low <= 2 <= high
    assert covered >= 34


def test_runs_of_one_name_are_told_apart_by_their_paths(runs, said, tmp_path):
    twin = write_golden_run(tmp_path / "narrow")
    report = bench(quick([runs[0], twin], seconds=0.01))
    assert [run["run"] for run in report["runs"]] == [str(runs[0].path), str(twin.path)]
    with pytest.raises(ConfigError, match=r"--source names .*narrow twice; give each run once\."):
        bench(quick([runs[0], runs[0]]))


def test_what_cannot_be_measured_is_an_error(runs, said, tmp_path):
    with pytest.raises(ConfigError, match="--provider cuda: "):
        bench(quick(runs, provider="cuda"))
    with pytest.raises(RunError, match=r"narrow is a run folder, .* Choose another --out\."):
        bench(quick(runs, out=runs[0].path))
    trained, _ = Run.begin(tmp_path / "trained", stage="train", config={})
    trained.finish(seed=0, model={}, metrics={})
    with pytest.raises(RunError, match=r"trained has no model \(model\.onnx\); .* `dsimg export` makes it\."):
        bench(quick([trained]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_sizes": (0,)}, r"--batch_sizes is 0; give different whole numbers, at least 1\."),
        ({"batch_sizes": ()}, r"--batch_sizes is empty; give different whole numbers"),
        ({"threads": (2, 2)}, r"--threads is 2 2; give different whole numbers"),
        ({"seconds": 0.0}, r"--seconds is 0\.0; it must be above 0\."),
    ],
)
def test_senseless_flags_are_named(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        BenchConfig(source=(tmp_path,), **flags)
    with pytest.raises(ConfigError, match="--source names no run"):
        BenchConfig(source=())


def test_the_flags_take_several_values(runs, tmp_path):
    words = ["--source", "a", "b", "--batch_sizes", "1", "16", "--threads", "2", "--out", "c"]
    config = cli.parse(bench, words)
    assert [str(path) for path in config.source] == ["a", "b"]
    assert (config.batch_sizes, config.threads, str(config.out)) == ((1, 16), (2,), "c")
