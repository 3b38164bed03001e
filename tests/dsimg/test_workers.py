"""dsimg.workers: how many there are, and how they end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsimg import workers
from dsimg.data import TrainImages, TrainLoader
from dsimg.errors import DeviceError
from dsimg.folder import Split
from dsimg.steps import StepPlan
from dsimg.workers import decoding_workers
from tests.dsimg.pictures import PADDED, settings, write_split


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("small"), 45)


def test_each_rank_decodes_with_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "all_cores", lambda: 20)
    assert [decoding_workers(ranks) for ranks in (1, 3, 8, 32)] == [8, 6, 2, 1]


def test_too_little_shared_memory_is_an_error_not_a_bus_error(monkeypatch: pytest.MonkeyPatch, small: Split) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DeviceError) as error:
        TrainLoader(
            TrainImages(small, settings(), PADDED, seed=0),
            StepPlan(samples=45, micro=8, accumulation=1, world=1),
            workers=2,
        )
    assert str(error.value) == (
        "2 workers need 0.1 MB of shared memory, /dev/shm has 0.0 MB. Start the container with a larger --shm-size, or "
        "use fewer workers."
    )


def worker_ids() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_workers_leave_stopping_to_the_main_process(small: Split) -> None:
    before = set(worker_ids())
    loader = TrainLoader(
        TrainImages(small, settings(), PADDED, seed=0),
        StepPlan(samples=45, micro=2, accumulation=1, world=1),
        workers=2,
    )
    batches = loader.epoch(0)
    next(batches), next(batches)  # one from each: both have started
    workers = set(worker_ids()) - before
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    assert sum(len(batch.ids) for batch in batches) == 45 + 1 - 4  # one of weight 0 beside the last
    loader.close()
    assert not set(worker_ids()) - before


def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_hang(small: Split) -> None:
    program = f"""
from pathlib import Path
import numpy as np
from dsimg.data import TrainImages, TrainLoader
from dsimg.augment import Augmentation
from dsimg.folder import Split
from dsimg.preprocess import Preprocess
from dsimg.steps import StepPlan
split = Split(Path({str(small.folder)!r}), {small.files!r}, np.array({small.labels.tolist()!r}))
preprocess = Preprocess(input_size=(3, 32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
images = TrainImages(split, preprocess, Augmentation(name="light", size=(32, 32)), seed=0)
batches = TrainLoader(images, StepPlan(samples=45, micro=4, accumulation=1, world=1), workers=2).epoch(0)
next(batches)
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 7


def test_a_killed_worker_gives_the_likely_reason(monkeypatch: pytest.MonkeyPatch, small: Split) -> None:
    def killed(_: Any) -> Any:
        # What torch raises; really to kill one would raise it at any line of this test.
        raise RuntimeError("DataLoader worker (pid 123) is killed by signal: Killed. ")

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", killed)
    loader = TrainLoader(
        TrainImages(small, settings(), PADDED, seed=0),
        StepPlan(samples=45, micro=2, accumulation=1, world=1),
        workers=1,
    )
    with pytest.raises(DeviceError) as error:
        list(loader.epoch(0))
    assert str(error.value) == (
        "A process that decodes images was killed (DataLoader worker (pid 123) is killed by signal: Killed). Memory "
        "ran out, most likely: use fewer workers, or a smaller micro-batch."
    )
