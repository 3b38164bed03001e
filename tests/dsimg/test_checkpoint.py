"""Saving an engine and loading it again, in one process; on several ranks and stages it is test_engine.py's."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import nn

from dsimg import checkpoint
from dsimg.checkpoint import Saver, choose_checkpoint, load_checkpoint, set_aside_newer
from dsimg.console import Terminal
from dsimg.engine import Engine
from dsimg.errors import RunError
from dsimg.shards import checkpoints, read_model, read_state
from dsimg.world import start_world
from tests import nets
from tests.dsimg.rank_program import make_engine, take_steps
from tests.dsimg.test_engine import PRECISIONS, STAGES, one_step
from tests.dsimg.test_engine import make_engine as engine_of_precision
from tests.dsimg.train_cases import save_now


def saver_of(folder: Path, engine: Engine, **options: Any) -> Saver:
    settings: dict[str, Any] = {"keep": 2, "on_error": "stop", "saved_step": None, "terminal": Terminal()}
    return Saver(folder, engine, **{**settings, **options})


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """What is written is what the weights were when the save began."""
    world = start_world()
    engine = make_engine(world, stage, norm=True, ema=0.9)
    take_steps(engine, world, 0, 2)
    go = threading.Event()
    write = checkpoint.write_shard

    def slow_write(*arguments: Any) -> dict[str, Any]:
        go.wait(20)
        return write(*arguments)

    monkeypatch.setattr("dsimg.checkpoint.write_shard", slow_write)
    saver = saver_of(tmp_path, engine)
    saver.begin({"step": 2, "engine": engine.counters()})
    assert saver.busy
    assert not saver.written
    expected = take_steps(engine, world, 2, 4)
    assert checkpoints(tmp_path) == []
    go.set()
    saver.finish()
    (path,) = checkpoints(tmp_path)
    state = read_state(path)
    other = make_engine(world, stage, seed=9, norm=True, ema=0.9)
    load_checkpoint(path, state, other)
    other.load_counters(state["engine"])
    assert take_steps(other, world, 2, 4) == expected
    assert (saver.saves, saver.saved_step) == (1, 2)


def test_the_newest_stay_and_the_same_step_is_not_saved_twice(tmp_path: Path) -> None:
    engine = make_engine(start_world(), 0)
    saver = saver_of(tmp_path, engine, keep=2)
    for step in (1, 2, 3, 3):
        saver.begin({"step": step})
        saver.finish()
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000003", "step_00000002"]
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    assert saver.saves == 3
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "step_00000003").iterdir()}
    assert len(modes) == 1  # safetensors alone would leave the shard to its owner
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000003", "step_00000002", "latest"}


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_refuses_is_one_line_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_error: str
) -> None:
    engine = make_engine(start_world(), 0)
    saver = saver_of(tmp_path, engine, on_error=on_error)
    saver.begin({"step": 1})
    saver.finish()

    def full(*arguments: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dsimg.checkpoint.write_shard", full)
        saver.begin({"step": 2})
        words = "cannot save the checkpoint of step 2: rank 0: No space left on device. That of step 1 stays;"
        if on_error == "stop":
            with pytest.raises(RunError, match=words):
                saver.finish()
        else:
            saver.finish()
            assert words in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "latest"}
    saver.begin({"step": 3})
    saver.finish()
    assert saver.saved_step == 3


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_00000007.abcd.tmp").mkdir()
    (tmp_path / ".step_00000007.abcd.tmp" / "shard_0.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.12.tmp").write_bytes(b"")
    saver_of(tmp_path, make_engine(start_world(), 0))
    assert list(tmp_path.iterdir()) == []


def test_the_newest_that_is_whole_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = start_world()
    assert choose_checkpoint(tmp_path, world, Terminal()) is None
    engine = make_engine(world, 0)
    saver = saver_of(tmp_path, engine, keep=3)
    for step in (1, 2, 3):
        saver.begin({"step": step})
        saver.finish()
    newest, middle, oldest = checkpoints(tmp_path)
    (newest / "shard_0.safetensors").unlink()
    shard = middle / "shard_0.safetensors"
    flipped = bytearray(shard.read_bytes())
    flipped[-1] ^= 1
    shard.write_bytes(flipped)
    chosen = choose_checkpoint(tmp_path, world, Terminal())
    assert chosen is not None
    assert chosen[0] == oldest
    assert chosen[1]["step"] == 1
    shown = capsys.readouterr().out
    assert f"{newest / 'shard_0.safetensors'}: No such file or directory; trying an older checkpoint" in shown
    assert f"{shard} is not the file that was saved: its hash differs" in shown
    set_aside_newer(oldest)
    assert checkpoints(tmp_path) == [oldest]
    saver.begin({"step": 4})
    saver.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000004", "step_00000001", "latest"}
    for path in checkpoints(tmp_path):
        (path / "state.json").write_text("{")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole: .*step_00000004/state.json is damaged"):
        choose_checkpoint(tmp_path, world, Terminal())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_are_in_a_checkpoint(tmp_path: Path, stage: int) -> None:
    """They may have come from --weights, which a resumed run does not read again."""

    def half_frozen(num_classes: int) -> nn.Module:
        model = nets.Tiny(num_classes=num_classes, norm=False)
        model[0].requires_grad_(False)
        return model

    engine = engine_of_precision(stage, make=half_frozen)
    expected = engine.full_state()
    path = save_now(tmp_path, engine, step=1)
    other = engine_of_precision(stage, make=half_frozen, seed=1)
    assert not torch.equal(other.full_state()["0.weight"], expected["0.weight"])
    load_checkpoint(path, read_state(path), other)
    assert all(torch.equal(value, expected[name]) for name, value in other.full_state().items())


def test_plain_pytorch_reads_a_checkpoint(tmp_path: Path) -> None:
    world = start_world()
    engine = make_engine(world, 3, norm=True, ema=0.5)
    take_steps(engine, world, 0, 3)
    path = save_now(tmp_path, engine, step=3)
    model: nn.Module = nets.Tiny(num_classes=3, norm=True)
    model.load_state_dict(read_model(path))
    with engine.ema_weights():
        expected = engine.full_state()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    world = start_world()
    engine = make_engine(world, 0)
    take_steps(engine, world, 0, 1)
    path = save_now(tmp_path, engine, step=1)
    with pytest.raises(RunError, match=r"has 0 of 216 values of ema 0.weight"):
        load_checkpoint(path, read_state(path), make_engine(world, 0, ema=0.9))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_precision_goes_on_to_the_bit(tmp_path: Path, stage: int, precision: str) -> None:
    engine = engine_of_precision(stage, precision, clip=0.5, optimizer="adamw", ema=0.9)
    one_step(engine, seed=0)
    one_step(engine, seed=1, poison=True)
    path = save_now(tmp_path, engine, step=2)
    infos = [one_step(engine, seed=seed) for seed in (2, 3)]
    other = engine_of_precision(stage, precision, clip=0.5, optimizer="adamw", ema=0.9)
    state = read_state(path)
    load_checkpoint(path, state, other)
    other.load_counters(state["engine"])
    assert [one_step(other, seed=seed) for seed in (2, 3)] == infos
    assert all(torch.equal(value, engine.full_state()[name]) for name, value in other.full_state().items())
    assert all(torch.equal(a, b) for a, b in zip(engine.ema, other.ema, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("stage", [0, 2])
def test_every_optimizer_goes_on_to_the_bit(tmp_path: Path, stage: int, optimizer: str) -> None:
    """timm's LAMB counts its steps beside the parameters' states."""
    engine = engine_of_precision(stage, optimizer=optimizer)
    for seed in range(3):
        one_step(engine, seed=seed)
    path = save_now(tmp_path, engine, step=3)
    infos = [one_step(engine, seed=seed) for seed in (3, 4, 5)]
    other = engine_of_precision(stage, optimizer=optimizer)
    load_checkpoint(path, read_state(path), other)
    assert [one_step(other, seed=seed) for seed in (3, 4, 5)] == infos


@pytest.mark.parametrize(("saved", "loaded"), [(0, 2), (2, 0), (0, 0), (3, 1)])
def test_the_loss_scale_goes_on_at_any_stage(saved: int, loaded: int) -> None:
    """And grows there after as many steps as ever."""
    engine = engine_of_precision(saved, "fp16 autocast")
    one_step(engine, poison=True)
    one_step(engine)
    state = engine.counters()
    assert state["scaler"] == {"scale": 32768.0, "steps": 1}
    other = engine_of_precision(loaded, "fp16 autocast")
    other.load_counters(state)
    assert other.counters()["scaler"] == {"scale": 32768.0, "steps": 1}
    assert one_step(other).loss_scale == 32768.0
    assert other.counters()["scaler"] == {"scale": 32768.0, "steps": 2}
    interval = other._scaler.get_growth_interval()
    assert interval == engine_of_precision(loaded, "fp16 autocast")._scaler.get_growth_interval()


def test_deepspeeds_own_loss_scaler_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fp16 runs on GPUs only: here its scaler is put into an engine that has a static one."""
    engine = engine_of_precision(2, "bf16")
    assert engine.counters()["fp16_scaler"] == {}
    saved = {"cur_scale": 4.0, "cur_iter": 9, "last_overflow_iter": 7, "cur_hysteresis": 1}
    engine.load_counters({**engine.counters(), "fp16_scaler": saved})  # of a run in fp16: not this one's
    scaler = DynamicLossScaler(
        init_scale=8.0, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    monkeypatch.setattr(engine._engine.optimizer, "loss_scaler", scaler)
    engine.load_counters({**engine.counters(), "fp16_scaler": saved})
    assert engine.counters()["fp16_scaler"] == saved
    assert scaler.cur_scale == 4.0
    engine.load_counters({**engine.counters(), "fp16_scaler": {}})  # of a run in bf16
    assert scaler.cur_scale == 4.0


def test_a_thread_that_dies_has_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the save before must not stand for this one, with which the older checkpoint would go."""
    saver = saver_of(tmp_path, make_engine(start_world(), 0), keep=1)
    saver.begin({"step": 1})
    saver.finish()

    def die(*arguments: Any) -> dict[str, Any]:
        raise MemoryError("no memory for a buffer")

    monkeypatch.setattr("dsimg.checkpoint.write_shard", die)
    saver.begin({"step": 2})
    with pytest.raises(RunError, match=r"step 2: rank 0: no memory for a buffer\. That of step 1 stays"):
        saver.finish()
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000001"]
