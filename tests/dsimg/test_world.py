"""Joining the ranks, and what they say to one another."""

import os
import subprocess
import sys

import pytest
import torch

from dsimg.errors import DataError, DeviceError, RunError
from dsimg.world import start_world
from tests.conftest import Launch


def test_the_shared_memory_operator_is_never_compiled(launch: Launch) -> None:
    code = (
        "from dsimg.world import start_world; w = start_world(); import deepspeed.comm.comm as c, os;"
        "assert c.cdb.shm_comm_op is None; print(w.size, flush=True); w.barrier(); os._exit(0)"
    )
    results = launch(2, "-c", code)
    assert [result.returncode for result in results] == [0, 0], results[0].stdout
    assert [result.stdout.splitlines()[-1] for result in results] == ["2", "2"]


def test_more_ranks_than_gpus_is_an_error_that_says_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=r"2 ranks .* has 1 GPU\(s\).*deepspeed --num_gpus 1"):
        start_world()


def test_an_error_on_rank_zero_is_every_ranks_and_a_files_error_is_a_run_error() -> None:
    world = start_world()

    def missing() -> None:
        raise DataError("no images")

    def full() -> None:
        raise OSError(28, "No space left on device", "runs/x/run.json")

    with pytest.raises(DataError, match="no images"):
        world.on_rank_zero(missing)
    with pytest.raises(RunError, match=r"runs/x/run\.json: No space left on device"):
        world.on_rank_zero(full)
    assert world.on_rank_zero(lambda: 7) == 7


def test_ranks_hear_rank_zero_and_add_up(launch: Launch) -> None:
    code = (
        "import os, torch; from dsimg.world import start_world; w = start_world();"
        "a = w.on_rank_zero(lambda: 'from ' + str(w.rank)); b = w.gather(w.rank);"
        "c = w.sum(torch.tensor([float(w.rank + 1)])).item(); print(a, b, c, flush=True); w.barrier(); os._exit(0)"
    )
    results = launch(3, "-c", code)
    assert [result.stdout.splitlines()[-1] for result in results] == ["from 0 [0, 1, 2] 6.0"] * 3


def test_importing_the_stages_prints_nothing() -> None:
    """DeepSpeed warns on import that there is no GPU, unless it was told the device."""
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    answer = subprocess.run(
        [sys.executable, "-c", "import dsimg.train, dsimg.evaluate"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (answer.stdout, answer.stderr) == ("", "")
