"""Checkpoints on one rank; test_engine.py takes them across worlds and ZeRO stages."""

from pathlib import Path

import pytest
import torch

from dsimg.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from dsimg.errors import RunError
from tests.dsimg.test_engine import make_engine, one_step


def test_a_checkpoint_appears_whole_and_the_older_one_goes(tmp_path: Path) -> None:
    engine = make_engine(1, optimizer="adamw")
    one_step(engine)
    (tmp_path / ".step_00000009.tmp").mkdir()  # what a kill left
    save_checkpoint(tmp_path, engine, {"step": 1, "engine": engine.counters()})
    expected = engine.full_state()
    one_step(engine, seed=1)
    save_checkpoint(tmp_path, engine, {"step": 2, "engine": engine.counters()})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    (path,) = checkpoints(tmp_path)
    assert {file.name for file in path.iterdir()} == {"state.json", "shard_0.safetensors"}
    assert read_state(path)["step"] == 2
    other = make_engine(3, optimizer="adamw")
    load_checkpoint(path, other)
    state = other.full_state()
    assert all(torch.equal(state[name], tensor) for name, tensor in engine.full_state().items())
    assert not all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    engine = make_engine(0)
    one_step(engine)
    path = save_checkpoint(tmp_path, engine, {"step": 1, "engine": engine.counters()})
    with pytest.raises(RunError, match=r"has 0 of \d+ values of ema"):
        load_checkpoint(path, make_engine(0, ema=0.9))


def test_a_torn_state_is_named(tmp_path: Path) -> None:
    engine = make_engine(0)
    one_step(engine)
    path = save_checkpoint(tmp_path, engine, {"step": 1, "engine": engine.counters()})
    (path / "state.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        read_state(path)
