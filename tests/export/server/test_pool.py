"""The threads of a server: which job is next, on which core, and that nothing runs where nothing is to be done."""

import asyncio
import os
import threading
import time

import numpy as np
import pytest

from dsimg_export.server import pool as pools
from dsimg_export.server.batcher import Batcher
from dsimg_export.server.errors import RefusedError
from dsimg_export.server.model import Plan, open_pool
from dsimg_export.server.pool import Pool
from tests.export.server.live import until


def batcher(pool, network=lambda images: images, decode=lambda data: np.zeros(1), **options):
    return Batcher(network, pool, decode=decode, **{"max_batch": 1, **options})


def test_models_that_are_asked_at_the_same_time_get_as_much_of_the_threads_time():
    order, gate = [], threading.Event()

    def network(name, seconds):
        def run(images):
            gate.wait(10)
            time.sleep(seconds)
            order.append(name)
            return images

        return run

    async def body():
        pool = Pool(1, decode_threads=1, cores=1)
        slow, fast = batcher(pool, network("slow", 0.03)), batcher(pool, network("fast", 0.003))
        tasks = [asyncio.create_task(slow.submit([np.zeros(1)])) for _ in range(20)]
        await until(lambda: slow._running == 1)
        tasks += [asyncio.create_task(fast.submit([np.zeros(1)])) for _ in range(5)]
        await until(lambda: fast.waiting == 5)
        gate.set()
        await asyncio.gather(*tasks)
        assert order[0] == "slow"
        assert order[1:7].count("fast") == 5  # one of the others at most has come between
        assert pool.sources == []
        # What it spent then gives nobody the first place now, nor the last.
        gate.clear()
        order.clear()
        tasks = [asyncio.create_task(one.submit([np.zeros(1)])) for one in (slow, fast, slow, fast)]
        await until(lambda: slow.waiting + fast.waiting == 3)
        gate.set()
        await asyncio.gather(*tasks)
        assert set(order[:3]) == {"slow", "fast"}

    asyncio.run(body())


def test_a_model_that_is_closed_takes_nothing_more_and_the_others_do():
    async def body():
        pool = Pool(1, decode_threads=1, cores=1)
        a, b = batcher(pool), batcher(pool)
        await a.close()
        with pytest.raises(RefusedError):
            await a.submit([np.zeros(1)])
        await b.submit([np.zeros(1)])

    asyncio.run(body())


def test_no_more_threads_decode_than_may():
    now, most, lock = 0, 0, threading.Lock()

    def decode(data):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return np.zeros(1)

    async def body():
        pool = Pool(4, decode_threads=2, cores=4)
        await batcher(pool, decode=decode, workers=4).submit([b"a"] * 12)
        assert most == 2

    asyncio.run(body())


def test_all_threads_work_where_there_is_work():
    barrier = threading.Barrier(3, timeout=5)

    def decode(data):
        barrier.wait()
        return np.zeros(1)

    def network(images):
        barrier.wait()
        return images

    async def body():
        pool = Pool(3, decode_threads=3, cores=3)
        await batcher(pool, decode=decode).submit([b"a"] * 3)  # three decode at a time
        await batcher(pool, network, workers=3).submit([np.zeros(1)] * 3)  # three run at a time

    asyncio.run(body())


def test_a_thread_keeps_to_a_core_while_all_are_busy():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one core: there is nothing to keep to.")
    seen, both = [], threading.Barrier(2, timeout=10)

    def network(images):
        if images[0, 0]:
            both.wait()
        seen.append(os.sched_getaffinity(0))
        return images

    async def body():
        pool = Pool(2, decode_threads=2, cores=2, cpus=cpus)
        one = batcher(pool, network, workers=2)
        await one.submit([np.ones(1)] * 8)
        assert sorted(map(sorted, seen[2:])) == [[cpus[0]]] * 3 + [[cpus[1]]] * 3
        seen.clear()
        for _ in range(4):
            await until(lambda: pool._idle == 2)
            await one.submit([np.zeros(1)])
        assert seen == [set(cpus)] * 4

    asyncio.run(body())
    assert os.sched_getaffinity(0) >= set(cpus)  # the loop's thread goes where it likes


@pytest.mark.parametrize(
    ("provider", "workers", "decode_threads", "pin", "threads", "pinned"),
    [
        ("cpu", 4, 4, True, 4, True),
        ("cpu", 1, 4, True, 4, True),
        ("cpu", 4, 4, False, 4, False),
        ("cpu", 2, 2, True, 2, False),  # as under a control group's limit: the other cores may be the idle ones
        ("cpu", 4, 8, True, 8, False),
        ("cuda", 1, 4, True, 5, False),
    ],
)
def test_threads_are_pinned_where_there_are_as_many_as_cores(
    monkeypatch, provider, workers, decode_threads, pin, threads, pinned
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    plan = Plan(workers=workers, threads=1, max_batch=1, max_delay=0.0, max_queue=1, provider=provider)
    pool = open_pool(plan, decode_threads, pin=pin)
    assert pool.threads == threads
    assert pool._cpus == ((0, 1, 2, 3) if pinned else ())
    assert pool.pinned == pinned


def test_a_core_that_is_taken_away_costs_nothing(monkeypatch):
    asked = []

    def gone(pid, cpus):
        asked.append(cpus)
        raise OSError(22, "Invalid argument")

    async def body():
        pool = Pool(1, decode_threads=1, cores=1, cpus=[7])
        assert await batcher(pool).submit([np.zeros(1)])

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    asyncio.run(body())
    assert asked == [[7]]


def test_a_thread_that_may_not_be_nice_runs_all_the_same(monkeypatch):
    asked = []

    def forbidden(which, who, niceness):
        asked.append(niceness)
        raise PermissionError(1, "Operation not permitted")

    async def body():
        assert await batcher(Pool(1, decode_threads=1, cores=1)).submit([np.zeros(1)])

    monkeypatch.setattr(os, "setpriority", forbidden)
    asyncio.run(body())
    assert asked == [os.getpriority(os.PRIO_PROCESS, 0) + pools.NICENESS]


def test_all_threads_are_as_nice():
    seen, barrier = [], threading.Barrier(6, timeout=10)

    def network(images):
        barrier.wait()
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        return images

    async def body():
        one = batcher(Pool(6, decode_threads=6, cores=6), network, workers=6)
        await one.submit([np.zeros(1)] * 6)  # some are started by others
        assert len(set(seen)) == 1
        assert seen[0] >= os.getpriority(os.PRIO_PROCESS, 0)

    asyncio.run(body())


def no_thread(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("image", [np.zeros(1), b"file"], ids=["tensor", "file"])
def test_a_thread_that_cannot_be_started_costs_its_requests_only(monkeypatch, image):
    async def body():
        one = batcher(Pool(2, decode_threads=2, cores=2), workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(4):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await one.submit([image], deadline=time.monotonic() + 5)
        assert not one.busy
        assert await one.submit([image])

    asyncio.run(body())


def test_threads_that_cannot_be_started_leave_the_work_to_the_others(monkeypatch):
    gate = threading.Event()

    def network(images):
        gate.wait(10)
        return images

    async def body():
        pool = Pool(3, decode_threads=3, cores=3)
        one = batcher(pool, network, workers=3)
        tasks = [asyncio.create_task(one.submit([np.zeros(1)]))]
        await until(lambda: one._running == 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            tasks += [asyncio.create_task(one.submit([np.zeros(1)])) for _ in range(3)]
            await until(lambda: one.waiting == 3)
            gate.set()
            assert len(await asyncio.gather(*tasks)) == 4
        assert len(pool._workers) == 1
        barrier = threading.Barrier(3, timeout=10)
        one.network = lambda images: (barrier.wait() and images) or images
        await one.submit([np.zeros(1)] * 3)  # all three are there now

    asyncio.run(body())


def test_a_thread_that_dies_is_replaced(monkeypatch):
    said = []

    class PanicError(BaseException):
        """As of pyo3: no Exception."""

    def dies(images):
        raise PanicError

    async def body():
        pool = Pool(1, decode_threads=1, cores=1)
        one = batcher(pool, dies)
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await one.submit([np.zeros(1)], deadline=time.monotonic() + 0.1)
        one.network = lambda images: images
        assert await one.submit([np.zeros(1)])

    monkeypatch.setattr(threading, "excepthook", said.append)
    asyncio.run(body())
    assert len(said) == 1


def test_a_closed_pool_has_no_threads():
    async def body():
        pool = Pool(2, decode_threads=2, cores=2)
        one = batcher(pool, workers=2)
        await asyncio.gather(*(one.submit([np.zeros(1)]) for _ in range(8)))
        await one.close()
        threads = list(pool._workers.values())
        pool.close()
        assert threads
        assert not any(thread.is_alive() for thread in threads)

    asyncio.run(body())


def test_a_model_that_answers_nothing_is_not_looked_at():
    async def body():
        pool = Pool(1, decode_threads=1, cores=1)
        batcher(pool)  # as one that a reload has refused
        one = batcher(pool)
        await one.submit([np.zeros(1)])
        assert pool.sources == []

    asyncio.run(body())
