"""One run on three worlds: 2 ranks at ZeRO-2, then 1 at ZeRO-0, then 3 at ZeRO-3, each for a third of the way."""

import json
import shutil
from collections import Counter
from pathlib import Path

import torch

from dsimg.run import Run
from dsimg.shards import Pieces, checkpoints, read_state
from tests.conftest import Launch, make_folder

# ranks, stage, steps to take: of 3 epochs of 6 steps, cut within the second and the third
LEGS = ((2, "zero2", 8), (1, "zero0", 7), (3, "zero3", None))


def test_a_run_goes_on_in_any_world(tmp_path: Path, launch: Launch) -> None:
    data = make_folder(tmp_path / "data", train=18)
    out = tmp_path / "run"
    words = ["--data", str(data), "--out", str(out), "--model", "tests.nets:with_batchnorm", "--epochs", "3"]
    words += ["--batch_size", "6", "--optimizer", "adamw", "--ema", "0.9", "--log_steps", "1"]
    seen: Counter[tuple[int, int]] = Counter()
    saved: Path | None = None
    for leg, (size, stage, steps) in enumerate(LEGS):
        notes = tmp_path / f"leg_{leg}"
        notes.mkdir()
        more = ["--deepspeed_config", stage, *(["--max_steps", str(steps)] if steps else [])]
        results = launch(size, "-m", "tests.dsimg.handover_program", str(notes), *words, *more)
        assert [result.returncode for result in results] == [75 if steps else 0] * size, results[0].stdout
        for file in notes.glob("samples_*.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                seen.update((line["epoch"], index) for index in line["ids"])
        if saved is not None:
            (loaded,) = checkpoints(notes / "loaded")
            assert_equal(saved, loaded)
        newest = checkpoints(out / "checkpoints")[0]
        saved = Path(shutil.copytree(newest, tmp_path / "saved" / f"{leg}" / newest.name))
    # Every image of every epoch once, over all legs and ranks.
    assert seen == Counter((epoch, index) for epoch in range(3) for index in range(36))
    steps_recorded = [
        line["step"]
        for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "train"
    ]
    assert steps_recorded == list(range(1, 19))
    assert Run.open(out).file("weights").exists()


def assert_equal(saved: Path, loaded: Path) -> None:
    """Every weight, moment, average and BatchNorm statistic of two checkpoints is equal to the bit."""
    states = [read_state(path) for path in (saved, loaded)]
    old, new = (Pieces(path, state) for path, state in zip((saved, loaded), states, strict=True))
    assert old.kinds == new.kinds == {"weight", "ema", "exp_avg", "exp_avg_sq", "buffer"}
    assert states[0]["scalars"] == states[1]["scalars"] == {"step": states[0]["step"]}
    for kind in ("weight", "ema", "exp_avg", "exp_avg_sq"):
        assert sorted(old.names(kind)) == sorted(new.names(kind))
        for name in new.names(kind):
            numel = torch.Size(states[0]["tensors"][name][0]).numel()
            assert torch.equal(old.whole(kind, name, numel=numel), new.whole(kind, name, numel=numel)), (kind, name)
    pooled, taken = old.buffers(), new.buffers()
    assert pooled.keys() == taken.keys()
    assert {"1.running_mean", "1.running_var", "ema:1.running_mean", "ema:1.running_var"} <= pooled.keys()
    assert all(torch.equal(value, taken[name]) for name, value in pooled.items())
    assert any(value.abs().max() > 0 for name, value in pooled.items() if name.endswith("running_mean"))
