"""The examples run, and the pages say what is so: commands, tables and links."""

import dataclasses
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import tyro

from dsimg import cli, losses, models
from dsimg.__main__ import STAGES
from dsimg.errors import ConfigError, RunError
from dsimg.run import Run
from dsimg.stage import data_of
from dsimg.weights import open_network, save_weights

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/data.md", "docs/training.md"]
PAGES += [
    "docs/distillation.md",
    "docs/pruning.md",
    "docs/exporting.md",
    "docs/quantization.md",
    "docs/verifying.md",
    "docs/compression.md",
    "docs/safety.md",
    "docs/log.md",
    "examples/README.md",
    "ds_configs/README.md",
]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(importlib.import_module(place.partition(":")[0]), place.partition(":")[2])
    for name, (place, _) in STAGES.items()
}


def run_python(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )


def commands() -> list[str]:
    """Return the commands of dsimg on the pages: on a line of their own in a code block, or in backquotes."""
    found = []
    for page in PAGES:
        fenced = False
        for line in (ROOT / page).read_text().splitlines():
            fenced ^= line.startswith("```")
            if fenced or line.startswith("    "):
                found.append(line.strip())
            else:
                found += re.findall(r"`([^`]+ [^`]+)`", line)
    starts = (
        "dsimg --",
        *(f"dsimg {name} " for name in STAGES),
        "python -m dsimg",
        "deepspeed",
        "torchrun",
    )
    return [command for command in dict.fromkeys(found) if command.startswith(starts) and "..." not in command]


def stage_and_flags(command: str) -> tuple[str, list[str]]:
    """Return the stage that a command runs and the flags it gives it; ("", []) where it shows a launcher alone."""
    words = shlex.split(command, comments=True)
    for place, word in enumerate(words):
        name = re.fullmatch(r"dsimg[/.](\w+?)(?:\.py)?", word)
        if name:
            return name[1], words[place + 1 :]
        if word == "dsimg":
            return words[place + 1], words[place + 2 :]
    return "", []


def is_required(stage: Callable[[Any], Any], flag: str) -> bool:
    """Tell whether a stage has this flag and no default for it."""
    config_type = cli.config_type_of(stage)
    field = config_type.__dataclass_fields__.get(flag)
    if field is None or field.default is not dataclasses.MISSING:
        return False
    return get_type_hints(config_type, include_extras=True)[flag] != tyro.conf.Positional[Path]


def test_training_from_python(tmp_path: Path) -> None:
    answer = run_python(str(ROOT / "examples/train_your_folder.py"), cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    right, classes, weights = answer.stdout.splitlines()[-3:]
    counted = re.fullmatch(r"(\d+) of 40 images right", right)
    assert counted is not None
    assert int(counted[1]) >= 30
    assert classes == "classes: disc, square"
    assert weights == "weights: runs/shapes/weights.safetensors"
    run = json.loads((tmp_path / "runs/shapes/run.json").read_text())
    assert run["metrics"]["validation"]["correct"] == int(counted[1])


def test_the_network_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    model = models.build_model("examples.my_model:tiny_net", num_classes=3)
    models.check_input_size(model, 32, "tiny_net", num_classes=3)
    assert models.count_parameters(model) == 3 * 16 * 9 + 16 * 32 * 9 + 32 * 64 * 9 + 2 * (16 + 32 + 64) + 65 * 3
    assert model(torch.zeros(2, 3, 20, 24)).shape == (2, 3)


def test_the_trained_run_is_whole_and_asks_for_images_where_it_needs_them() -> None:
    run = Run.open(ROOT / "examples/cifar_resnet56")
    network = open_network(run).eval()  # its weights are checked against their hash
    with torch.no_grad():
        logits = network(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 10)
    assert float(logits.std()) > 0.1
    assert run.file("labels").read_text().splitlines() == run.model["classes"]
    with pytest.raises(ConfigError, match=r"does not say what images it was trained on\. Give them with --data\."):
        data_of(run.path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folder"), [("examples.my_model", "."), ("my_model", "examples")])
def test_the_network_of_ones_own_is_found_from_its_folder(
    name: str, folder: str, small_folder: Path, tmp_path: Path
) -> None:
    flags = ["--data", str(small_folder), "--epochs", "1", "--batch_size", "8", "--out", str(tmp_path / "run")]
    answer = run_python("-m", "dsimg", "train", "--model", f"{name}:tiny_net", *flags, cwd=ROOT / folder)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert Run.open(tmp_path / "run").model["arch"] == f"{name}:tiny_net"


@pytest.mark.parametrize("command", commands())
def test_a_command_on_the_pages_names_a_stage_and_its_flags(command: str) -> None:
    stage, flags = stage_and_flags(command)
    named_only = stage != "train" and not flags
    if stage in ("", "--help", "--version") or flags == ["--help"] or named_only:
        return
    assert stage in STAGES
    for name in ("source", "out", "data"):  # in the text a command may leave out what does not matter there
        if f"--{name}" not in flags and is_required(FUNCTIONS[stage], name):
            flags += [f"--{name}", "RUN"]
    try:
        cli.parse(FUNCTIONS[stage], flags, quiet=True)
    except SystemExit:
        pytest.fail("it is not taken")


def test_the_readme_lists_the_stages_and_no_other() -> None:
    shown = set(re.findall(r"^\| `dsimg (\w+)[^|]*\|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert shown == set(STAGES) == set(FUNCTIONS)


def test_the_readme_lists_every_file_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "dsimg").glob("*.py"))


def test_the_table_of_losses_is_complete() -> None:
    section = (ROOT / "docs/training.md").read_text().partition("## Losses")[2].partition("\n## ")[0]
    table = [
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    written = re.findall(r"^def ([a-z]\w+)", (ROOT / "dsimg/losses.py").read_text(), re.MULTILINE)
    assert sorted(written) == sorted(table)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def python_blocks() -> list[str]:
    """Return CONTRIBUTING's pieces of Python: a loss, its test, a stage."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def test_the_loss_of_contributing_passes_its_test() -> None:
    loss, test, _ = python_blocks()
    names: dict[str, Any] = {**vars(losses), "torch": torch, "math": math}
    exec(compile(loss + test, "CONTRIBUTING.md", "exec"), names)
    names["test_focal_cross_entropy_weighs_by_what_is_missing"]()


def test_the_stage_of_contributing_makes_a_run(tmp_path: Path) -> None:
    source, _ = Run.begin(tmp_path / "source", stage="train", config={})
    save_weights({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "source/weights.safetensors")
    source.finish(seed=0, model={"arch": "toy"}, metrics={})
    names: dict[str, Any] = {"__name__": "dsimg_count"}
    exec(compile(python_blocks()[2], "CONTRIBUTING.md", "exec"), names)
    count, config = names["count"], names["CountConfig"]
    run = count(config(source=source.path, out=tmp_path / "run"))
    assert run.manifest["metrics"] == {"numbers": 8}
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "run.json"]
    assert count(config(source=source.path, out=tmp_path / "run")).manifest == run.manifest
    with pytest.raises(RunError, match="there is no run folder"):
        count(config(source=tmp_path / "none", out=tmp_path / "other"))
