"""Long: ZeRO stages, worlds and precisions agree on the embedded digits. Run by hand: pytest -m slow."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch

pytestmark = pytest.mark.slow


def losses(launch: Launch, out: Path, ranks: int, *flags: str) -> list[float]:
    """Train the digits through the command line and return the loss of every step."""
    words = ["-m", "dsimg", "train", "--out", str(out), "--log_steps", "1", "--eval_epochs", "99", *flags]
    results = launch(ranks, *words, timeout=900)
    assert [result.returncode for result in results] == [0] * ranks, results[0].stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def config(path: Path, **values: Any) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def test_sixty_steps_at_every_stage(launch: Launch, tmp_path: Path) -> None:
    found = {}
    for stage in (0, 1, 2, 3):
        json_path = config(tmp_path / f"{stage}.json", gradient_clipping="auto", zero_optimization={"stage": stage})
        found[stage] = losses(launch, tmp_path / str(stage), 2, "--deepspeed_config", json_path, "--epochs", "5")
        assert len(found[stage]) == 60
    for stage in (1, 2, 3):
        worst = max(abs(a - b) / b for a, b in zip(found[stage], found[0], strict=True))
        print(f"ZeRO {stage} against 0: largest relative difference {worst:.2g}")
        assert worst < 1e-4


def test_sixty_steps_however_the_batch_is_split(launch: Launch, tmp_path: Path) -> None:
    flags = ["--model", "tests.nets:without_batchnorm", "--epochs", "3", "--lr", "0.2", "--mixup", "0.2"]
    whole = losses(launch, tmp_path / "1x64", 1, *flags, "--batch_size", "64")
    assert len(whole) == 69
    accumulate = config(
        tmp_path / "a.json", train_batch_size=64, gradient_accumulation_steps=2, gradient_clipping="auto"
    )
    two = losses(launch, tmp_path / "2x32", 2, *flags, "--batch_size", "64")
    accumulated = losses(launch, tmp_path / "1x32x2", 1, *flags, "--deepspeed_config", accumulate)
    for name, other in (("2 x 32", two), ("1 x 32 x 2", accumulated)):
        worst = max(abs(a - b) / b for a, b in zip(other, whole, strict=True))
        print(f"{name} against 1 x 64: largest relative difference {worst:.2g}")
        assert worst < 1e-4


def test_fp16_and_bf16_reach_what_fp32_reaches(launch: Launch, tmp_path: Path) -> None:
    reached = {}
    for precision in ("fp32", "bf16", "fp16"):
        blocks = {precision: {"enabled": True}} if precision != "fp32" else {}
        json_path = config(tmp_path / f"{precision}.json", gradient_clipping="auto", **blocks)
        losses(launch, tmp_path / precision, 2, "--deepspeed_config", json_path, "--epochs", "20")
        report = json.loads((tmp_path / precision / "evaluation.json").read_text())
        reached[precision] = report["top1"]["value"]
        print(f"{precision}: Top-1 {reached[precision]:.2%}")
    for precision in ("bf16", "fp16"):
        assert reached[precision] >= reached["fp32"] - 0.01
