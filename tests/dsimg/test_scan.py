"""`dsimg prune --scan`: what cutting each group alone does, as JSON, a table and a picture; nothing is pruned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsimg.channels import Unit
from dsimg.errors import DsimgError
from dsimg.evaluate import EvaluateConfig, evaluate
from dsimg.prune import prune
from dsimg.recipe import PruneConfig, TrainConfig
from dsimg.run import Run
from dsimg.scan import Scan, write_scan
from dsimg.train import train
from tests.conftest import make_folder
from tests.dsimg.train_cases import FAST


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images in `data`, a run on them in `source` and its scan in `scan`."""
    root = tmp_path_factory.mktemp("scan")
    make_folder(root / "data")
    train(TrainConfig(data=str(root / "data"), out=root / "source", **FAST))
    prune(PruneConfig(source=root / "source", out=root / "scan", scan=True))
    return root


def units(count: int) -> tuple[Unit, ...]:
    return tuple(Unit(f"layer{number}.conv1", "", 16, (), 2) for number in range(count))


def test_a_run_of_a_scan(root: Path) -> None:
    run = Run.open(root / "scan")
    assert {path.name for path in run.path.iterdir()} == {
        *("run.json", "config.json", "ds_config.json", "index.jsonl.gz", "labels.txt", "scan.json", "scan.png", ".lock")
    }
    scan = json.loads((run.path / "scan.json").read_text())
    assert run.manifest is not None
    assert run.manifest["metrics"] == {"scan": scan}
    assert (scan["images"], scan["ratios"]) == (8, [0.25, 0.5, 0.75])
    assert scan["whole"] * 8 in range(9)  # with BatchNorm re-estimated, as after each cut
    assert [(unit["name"], unit["channels"], unit["width"]) for unit in scan["units"]] == [("0", 8, 1), ("3", 16, 1)]
    for unit in scan["units"]:
        assert len(unit["top1"]) == 3
        assert all(value * 8 in range(9) for value in unit["top1"])


def test_a_scan_is_repeated_to_the_bit_by_each_importance(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"source": root / "source", "scan": True}
    prune(PruneConfig(out=tmp_path / "again", **options))
    shown = capsys.readouterr().out
    assert (tmp_path / "again" / "scan.json").read_bytes() == (root / "scan" / "scan.json").read_bytes()
    assert (tmp_path / "again" / "scan.png").read_bytes() == (root / "scan" / "scan.png").read_bytes()
    for text in (
        "1/2  0: ",
        "2/2  3: ",
        " channels of  width  25% cut  50% cut  75% cut",
        "nothing is trained or kept",
    ):
        assert text in shown
    assert "teacher" not in shown
    assert "picture          " in shown
    assert "on 8 validation images" in shown
    for importance in ("taylor", "random"):
        prune(PruneConfig(out=tmp_path / importance, importance=importance, **options))
        assert (tmp_path / importance / "scan.json").exists()


def test_protected_layers_are_not_scanned(root: Path, tmp_path: Path) -> None:
    prune(PruneConfig(source=root / "source", out=tmp_path / "run", scan=True, protect=("0",)))
    assert [unit["name"] for unit in json.loads((tmp_path / "run" / "scan.json").read_text())["units"]] == ["3"]


def test_a_scan_is_done_once_and_is_no_network(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prune(PruneConfig(source=root / "source", out=root / "scan", scan=True))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(DsimgError, match=r"the run .*scan has no weights \(weights\.safetensors\)"):
        evaluate(EvaluateConfig(source=root / "scan"))
    with pytest.raises(DsimgError, match=r"the run .*scan has no weights \(weights\.safetensors\)"):
        prune(PruneConfig(source=root / "scan", target_macs=0.5))


def test_the_table_begins_with_the_most_sensitive() -> None:
    scan = Scan(units(3), (0.25, 0.5), 0.9, 100, [[0.8, 0.5], [0.6, 0.5], [0.8, 0.4]])
    assert scan.rows() == [
        ("layer1.conv1", "32", "60.0%", "50.0%"),
        ("layer2.conv1", "32", "80.0%", "40.0%"),
        ("layer0.conv1", "32", "80.0%", "50.0%"),
    ]


@pytest.mark.parametrize("count", [1, 12, 40])
def test_the_picture_shows_lines_and_a_legend(tmp_path: Path, count: int) -> None:
    accuracy = [[0.9 - 0.01 * number, 0.7 - 0.01 * number, 0.5 - 0.01 * number] for number in range(count)]
    write_scan(tmp_path, Scan(units(count), (0.25, 0.5, 0.75), 0.95, 1000, accuracy))
    with Image.open(tmp_path / "scan.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1350, 825))
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour, wanted in (((31, 119, 180), True), ((255, 127, 14), count > 1), ((191, 191, 191), count > 12)):
        assert ((pixels == colour).all(1).sum() > 600) == wanted, colour
