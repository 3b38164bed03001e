"""Ranks that die, are stopped or hang: named by the others. Real processes on gloo, forked from one that has torch."""

import functools
import json
import multiprocessing
import os
import re
import signal
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dsimg import watch
from dsimg.watch import RankWatch
from tests.conftest import free_port

PERIOD = 0.1
TIMEOUT = 0.8
NOT_YET = 10_000

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.dsimg.test_watch"])


def run_rank(rank: int, size: int, port: int, folder: Path, steps: Any, hang_at: int) -> None:
    """Train in step with the others until told of a loss; write what was told to `folder`/RANK."""
    watch.PERIOD = PERIOD
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # c10d's own stacks
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )

    def told(how: str, text: str | None) -> None:
        (folder / f".{rank}").write_text(f"{how}: {text}")
        (folder / f".{rank}").replace(folder / str(rank))
        os._exit(1)

    ranks = RankWatch(
        rank=rank, size=size, store=watch.open_store(), timeout=TIMEOUT, on_loss=lambda text: told("loss", text)
    )
    try:
        for step in range(NOT_YET):
            ranks.at(step, watch.TRAINING)
            steps[rank] = step
            if rank == size - 1 and step == hang_at:
                time.sleep(60)
            time.sleep(0.005)
            dist.all_reduce(torch.ones(1))
    except RuntimeError:
        told("explained", ranks.explain())


class Ranks:
    """Processes that train together; `steps` is where each is."""

    def __init__(self, size: int, folder: Path, *, hang_at: int = NOT_YET) -> None:
        self.folder = folder
        self.steps = context.Array("l", size, lock=False)
        port = free_port()
        self.processes: list[BaseProcess] = [
            context.Process(target=run_rank, args=(rank, size, port, folder, self.steps, hang_at))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def past(self, step: int) -> None:
        """Wait until all are past a step."""
        wait_for(lambda: min(self.steps) > step)

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def name(self, rank: int) -> str:
        return rf"rank {rank} \(\S+, pid {self.processes[rank].pid}\)"

    def told(self, rank: int) -> str:
        self.processes[rank].join(20)
        assert self.processes[rank].exitcode == 1
        return (self.folder / str(rank)).read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def begin(size: int, **how: int) -> Ranks:
        ranks = Ranks(size, tmp_path, **how)
        started.append(ranks)
        ranks.past(30)  # some beats
        return ranks

    yield begin
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.join()


REMEDY = re.escape("The checkpoints are untouched: the same command goes on from the last one.")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_with_its_last_step(killed: int, start: Callable[..., Ranks]) -> None:
    ranks = start(3)
    ranks.signal(killed, signal.SIGKILL)
    for rank in {0, 1, 2} - {killed}:
        told = re.fullmatch(
            rf"(loss|explained): {ranks.name(killed)} has ended; it was last heard of at step (\d+)\. {REMEDY}",
            ranks.told(rank),
        )
        assert told, ranks.told(rank)
        assert ranks.steps[killed] - int(told[2]) in (0, 1)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_after_the_timeout(stopped: int, start: Callable[..., Ranks]) -> None:
    """Rank 0 stopped takes the answers of the store with it."""
    ranks = start(3)
    ranks.signal(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    for rank in {0, 1, 2} - {stopped}:
        told = re.fullmatch(
            rf"(loss|explained): {ranks.name(stopped)} has not been heard of for \d+ s "
            rf"\(stopped, or its machine is gone\); last at step (\d+)\. {REMEDY}",
            ranks.told(rank),
        )
        assert told, ranks.told(rank)
        assert ranks.steps[stopped] - int(told[2]) in (0, 1)
    assert time.monotonic() - begun > TIMEOUT - 2 * PERIOD


def test_ranks_that_go_on_are_not_lost(start: Callable[..., Ranks]) -> None:
    """One stopped for less than the timeout; then all for more, as when a virtual machine is paused."""
    ranks = start(2)
    for stopped, seconds in (([0], TIMEOUT / 2), ([1], TIMEOUT / 2), ([0, 1], 1.5 * TIMEOUT)):
        for rank in stopped:
            ranks.signal(rank, signal.SIGSTOP)
        time.sleep(seconds)
        for rank in stopped:
            ranks.signal(rank, signal.SIGCONT)
        ranks.past(max(ranks.steps) + 20)
    time.sleep(5 * PERIOD)
    assert list(ranks.folder.iterdir()) == []


def test_when_all_stand_at_one_place_the_code_tells_who_hangs(start: Callable[..., Ranks]) -> None:
    ranks = start(3, hang_at=31)
    for rank in range(3):
        assert re.fullmatch(
            r"(loss|explained): all ranks stand still at step 31 \(training\), for 1 s now: rank 0, 1 in \w+ "
            rf"\(\w+\.py\); rank 2 in run_rank \(test_watch\.py\)\. {REMEDY}",
            ranks.told(rank),
        ), ranks.told(rank)


class Crew:
    """Watches of several ranks in this process, and what each was told."""

    def __init__(self, size: int, *, timeout: float = 0.5) -> None:
        self.store = HashStore()
        self.told: dict[int, str] = {}
        self.ranks = [
            RankWatch(
                rank=rank,
                size=size,
                store=self.store,
                timeout=timeout,
                on_loss=functools.partial(self.told.__setitem__, rank),
            )
            for rank in range(size)
        ]

    def beat(self, rank: int, **changes: object) -> None:
        """Put a beat of this process into the store as another rank's."""
        self.store.set(str(rank), json.dumps({**json.loads(self.store.get("0")), **changes}))


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Crew]]:
    crews: list[Crew] = []

    def begin(size: int, *, period: float = 0.05, **how: float) -> Crew:
        monkeypatch.setattr(watch, "PERIOD", period)
        crews.append(Crew(size, **how))
        return crews[-1]

    yield begin
    for crew in crews:
        for rank in reversed(crew.ranks):
            rank.close()


def test_a_hang_is_blamed_on_the_rank_furthest_behind(crew: Callable[..., Crew]) -> None:
    ranks = crew(3)
    for micro in range(4):
        for rank, one in enumerate(ranks.ranks):
            if rank != 1 or micro < 2:
                one.at(7, watch.TRAINING)
    wait_for(lambda: len(ranks.told) == 3)
    assert len(set(ranks.told.values())) == 1
    assert re.fullmatch(
        rf"rank 1 \(\S+, pid {os.getpid()}\) has not moved for \d s in step 7 \(training\); "
        rf"the other ranks wait for it\. {REMEDY}",
        ranks.told[0],
    )


def test_a_long_save_is_no_hang_and_the_evaluation_after_it_can_be(crew: Callable[..., Crew]) -> None:
    ranks = crew(2, timeout=0.6)
    ranks.ranks[0].at(7, "saving")
    ranks.ranks[1].at(7, watch.TRAINING)  # waits for rank 0
    time.sleep(1)
    ranks.ranks[0].at(7, watch.EVALUATING)
    time.sleep(0.2)  # rank 1 is behind now, and has stood still for longer than the timeout
    assert ranks.told == {}
    ranks.ranks[1].at(7, watch.EVALUATING)
    ranks.ranks[1].at(7, watch.EVALUATING)
    wait_for(lambda: len(ranks.told) == 2)
    assert re.match(r"rank 0 .* has not moved for 1 s in step 7 \(evaluating\)", ranks.told[1])


def test_a_rank_that_stood_still_and_was_then_stopped_does_not_hang(crew: Callable[..., Crew]) -> None:
    ranks = crew(2, timeout=0.6)
    for one in ranks.ranks:
        one.at(3, watch.TRAINING)
    time.sleep(0.4)
    ranks.ranks.pop().close()
    ranks.beat(1, left=False)
    wait_for(lambda: 0 in ranks.told)
    assert re.match(r"rank 1 .* has not been heard of for 1 s", ranks.told[0])


def test_a_rank_that_closed_is_not_missed(crew: Callable[..., Crew]) -> None:
    ranks = crew(3, timeout=0.2)
    ranks.ranks[1].close()
    time.sleep(0.6)
    assert ranks.told == {}


def test_a_rank_that_closed_while_others_wait_for_it_is_named(crew: Callable[..., Crew]) -> None:
    ranks = crew(2, timeout=0.2)
    for one in ranks.ranks:
        one.at(3, watch.TRAINING)
    ranks.ranks[1].close()
    wait_for(lambda: 0 in ranks.told)
    assert re.match(r"rank 1 .* has left, and the other ranks wait for it at step 3 \(training\)\.", ranks.told[0])


def test_a_closed_rank_zero_waits_until_that_is_read(crew: Callable[..., Crew]) -> None:
    """Its exit takes the store away."""
    ranks = crew(2)
    begun = time.monotonic()
    ranks.ranks[0].close()
    assert time.monotonic() - begun >= watch.PUBLISH * watch.PERIOD
    ranks.ranks[1].close()
    assert ranks.told == {}


def test_nobody_died(crew: Callable[..., Crew]) -> None:
    ranks = crew(2, period=0.2)  # a busy machine must not make anyone silent here
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(RankWatch.explain, ranks.ranks)) == [None, None]


def test_a_silent_rank_of_another_machine_explains_a_failed_collective(crew: Callable[..., Crew]) -> None:
    """Long before the timeout; and what explains is not told a second time."""
    ranks = crew(2, timeout=60)
    ranks.ranks.pop().close()
    ranks.beat(1, step=5, machine="another", host="far", pid=1, left=False)
    begun = time.monotonic()
    text = ranks.ranks[0].explain()
    assert text is not None
    assert re.match(r"rank 1 \(far, pid 1\) has not been heard of for \d+ s .* last at step 5\.", text)
    assert time.monotonic() - begun < 30
    time.sleep(5 * watch.PERIOD)
    assert ranks.told == {}


def test_a_process_that_got_a_dead_ones_number_is_another(crew: Callable[..., Crew]) -> None:
    ranks = crew(2, timeout=60)
    ranks.ranks.pop().close()
    ranks.beat(1, step=5, started="1", left=False)
    wait_for(lambda: 0 in ranks.told)
    assert re.match(rf"rank 1 \(\S+, pid {os.getpid()}\) has ended; it was last heard of at step 5\.", ranks.told[0])


def test_noting_progress_costs_next_to_nothing(crew: Callable[..., Crew]) -> None:
    one = crew(1, timeout=60).ranks[0]
    seconds = min(timeit.repeat(lambda: one.at(1, watch.TRAINING), number=10_000, repeat=5))
    assert seconds / 10_000 < 5e-5
