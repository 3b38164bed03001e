import asyncio
import gc
import itertools
import os
import threading
import time
import weakref

import numpy as np
import pytest

from dsimg.errors import ImageError
from dsimg_export.server.batcher import Batcher
from dsimg_export.server.classify import while_there
from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.pool import Pool
from dsimg_export.server.state import Limits, Server


def images(*values):
    return [np.full(2, value, np.float32) for value in values]


def rows(answers):
    return [row.tolist() for row in answers]


def a_batcher(network, *, threads=None, decode=None, decode_threads=1, pool=None, **options):
    """A batcher with a pool of its own, of as many threads as workers."""
    workers = options.get("workers", 1)
    pool = pool or Pool(threads or workers, decode_threads=decode_threads, cores=threads or workers)
    return Batcher(network, pool, decode=decode or Files(), **options)


class Files:
    """Decodes a file to its first byte, when the gate opens; b"bad" is none."""

    def __init__(self, seconds=0.0):
        self.seconds, self.decoded = seconds, []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, data):
        assert self.gate.wait(10)
        time.sleep(self.seconds)
        self.decoded.append(data)
        if data == b"bad":
            raise ImageError("not an image")
        return np.full(2, data[0], np.float32)


class Network:
    """Doubles its input; notes its batches; takes as long as it is told, and fails on negative images."""

    def __init__(self, seconds=0.0):
        self.seconds, self.batches = seconds, []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, batch):
        self.gate.wait(10)
        time.sleep(self.seconds)
        self.batches.append(len(batch))
        if (batch < 0).any():
            raise ValueError("negative")
        return 2 * batch


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_request_gets_its_own_rows():
    async def body():
        batcher = a_batcher(Network(), max_batch=4)
        answers = await asyncio.gather(*(batcher.submit(images(i, 10 + i)) for i in range(20)))
        for i, (logits, _) in enumerate(answers):
            assert rows(logits) == [[2 * i] * 2, [20 + 2 * i] * 2]

    asyncio.run(body())


def test_a_free_worker_does_not_wait_and_a_busy_one_gathers():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=4)
        tasks = [asyncio.create_task(batcher.submit(images(1)))]
        await until(lambda: batcher.busy and not batcher.waiting)  # the first has gone alone
        tasks += [asyncio.create_task(batcher.submit(images(i))) for i in range(6)]
        await until(lambda: batcher.waiting == 6)
        network.gate.set()
        answers = await asyncio.gather(*tasks)
        assert network.batches == [1, 4, 2]
        assert [timing.batch for _, timing in answers] == [1, 4, 4, 4, 4, 2, 2]

    asyncio.run(body())


def test_a_call_beside_which_nothing_runs_or_waits_has_a_network_of_its_own():
    async def body():
        network, lone = Network(), Network()
        lone.gate.clear()
        batcher = a_batcher(network, lone_network=lone, max_batch=1, workers=2)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy)
        second = await batcher.submit(images(2, 3))  # beside the first
        assert (network.batches, lone.batches) == ([1, 1], [])
        lone.gate.set()
        assert rows((await first)[0]) == [[2, 2]]
        assert rows(second[0]) == [[4, 4], [6, 6]]
        await batcher.submit(images(4))
        assert (network.batches, lone.batches) == ([1, 1], [1, 1])

    asyncio.run(body())


@pytest.mark.parametrize(("known", "least", "most"), [(0.02, 0.019, 0.021), (1.0, 0.5, 0.95), (0.001, 0.00101, 0.01)])
def test_a_lone_call_bounds_what_one_beside_others_takes(known, least, most):
    async def body():
        batcher = a_batcher(Network(), lone_network=Network(0.015), lone_gain=2, max_batch=1, seconds_per_image=known)
        for _ in range(3):
            await batcher.submit(images(1))
        assert least < batcher.seconds_per_image < most

    asyncio.run(body())


def test_a_thread_that_cannot_be_started_costs_its_requests_only(monkeypatch):
    async def body():
        batcher = a_batcher(Network(), max_batch=1, workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(4):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await batcher.submit(images(1), deadline=time.monotonic() + 5)
        assert not batcher.busy
        assert rows((await batcher.submit(images(1)))[0]) == [[2, 2]]

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    asyncio.run(body())


def test_threads_that_may_not_be_nice_run_all_the_same(monkeypatch):
    def forbidden(by):
        raise PermissionError(1, "Operation not permitted")

    async def body():
        assert rows((await a_batcher(Network(), max_batch=1).submit(images(1)))[0]) == [[2, 2]]

    monkeypatch.setattr(os, "nice", forbidden)
    asyncio.run(body())


def test_a_request_larger_than_a_batch_is_split():
    async def body():
        network = Network()
        logits, timing = await a_batcher(network, max_batch=3).submit(images(*range(8)))
        assert network.batches == [3, 3, 2]
        assert [row[0] for row in logits] == [2 * i for i in range(8)]
        assert timing.batch == 3

    asyncio.run(body())


def test_the_delay_is_counted_from_the_oldest_image():
    async def body():
        network = Network()
        batcher = a_batcher(network, max_batch=4, max_delay=0.2)
        start = time.monotonic()
        first = asyncio.create_task(batcher.submit(images(1)))
        await asyncio.sleep(0.12)
        second = asyncio.create_task(batcher.submit(images(2)))
        await asyncio.gather(first, second)
        assert 0.18 < time.monotonic() - start < 0.3  # a clock begun at the second would end at 0.32
        assert network.batches == [2]
        start = time.monotonic()
        await batcher.submit(images(1, 2, 3, 4))
        assert time.monotonic() - start < 0.15  # full: nothing to wait for

    asyncio.run(body())


def test_workers_run_beside_each_other():
    async def body():
        network = Network(seconds=0.1)
        batcher = a_batcher(network, max_batch=1, workers=3)
        start = time.monotonic()
        await asyncio.gather(*(batcher.submit(images(i)) for i in range(3)))
        assert time.monotonic() - start < 0.25

    asyncio.run(body())


def test_a_full_queue_refuses_and_says_when_to_come_again():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=2, max_queue=4, seconds_per_image=0.5)
        tasks = [asyncio.create_task(batcher.submit(images(1)))]
        await until(lambda: batcher.busy and not batcher.waiting)
        tasks += [asyncio.create_task(batcher.submit(images(i, i))) for i in range(2)]
        await until(lambda: batcher.waiting == 4)
        with pytest.raises(RefusedError, match="Exceeds maximum queue size") as refused:
            await batcher.submit(images(9))
        assert refused.value.kind == "queue"
        assert refused.value.retry_after == pytest.approx(0.5 * (4 + 1))
        network.gate.set()
        await asyncio.gather(*tasks)
        assert sum(network.batches) == 5

    asyncio.run(body())


def test_an_empty_queue_takes_a_request_larger_than_it():
    async def body():
        logits, _ = await a_batcher(Network(), max_batch=2, max_queue=4).submit(images(*range(6)))
        assert len(logits) == 6

    asyncio.run(body())


def test_what_cannot_be_answered_in_time_is_refused_at_once():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=1, seconds_per_image=0.2)
        running = [asyncio.create_task(batcher.submit(images(i))) for i in range(5)]
        await until(lambda: batcher.waiting == 4)
        start = time.monotonic()
        with pytest.raises(RefusedError, match=r"up to 2\.40 s are needed") as refused:
            await batcher.submit(images(1), deadline=start + 0.5)
        assert time.monotonic() - start < 0.1
        assert refused.value.status == 503
        assert refused.value.retry_after == pytest.approx(0.2 * (5 + 0.5))
        network.gate.set()
        await asyncio.gather(*running)

    asyncio.run(body())


def test_a_deadline_that_is_over_is_called_so():
    async def body():
        network = Network()
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await a_batcher(network, max_batch=1).submit(images(1), deadline=time.monotonic() - 1)
        assert network.batches == []

    asyncio.run(body())


def test_a_deadline_that_passes_in_the_queue_costs_no_run():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=1)
        running = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await batcher.submit(images(2), deadline=time.monotonic() + 0.05)
        assert batcher.waiting == 0
        network.gate.set()
        await running
        assert network.batches == [1]

    asyncio.run(body())


def test_a_caller_that_is_gone_costs_no_run():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=2)
        running = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        gone = asyncio.create_task(batcher.submit(images(2, 3)))
        stays = asyncio.create_task(batcher.submit(images(4)))
        await until(lambda: batcher.waiting == 3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        network.gate.set()
        assert rows((await stays)[0]) == [[8, 8]]
        await running
        assert network.batches == [1, 1]

    asyncio.run(body())


def test_an_image_that_fails_fails_alone():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=4)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        tasks = [asyncio.create_task(batcher.submit(images(value))) for value in (2, -3, 4)]
        await until(lambda: batcher.waiting == 3)
        network.gate.set()
        good, bad, also_good = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, ValueError)
        assert rows(good[0]) == [[4, 4]]
        assert rows(also_good[0]) == [[8, 8]]
        await first

    asyncio.run(body())


def test_closing_answers_what_waits_and_takes_nothing_more():
    async def body():
        network = Network(seconds=0.05)
        batcher = a_batcher(network, max_batch=2, max_delay=30)
        waiting = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.waiting == 1)
        await batcher.close()
        assert rows((await waiting)[0]) == [[2, 2]]
        with pytest.raises(RefusedError):
            await batcher.submit(images(1))

    asyncio.run(body())


def test_an_idle_batcher_does_nothing():
    async def body():
        batcher = a_batcher(Network(), max_batch=2, max_delay=0.01)
        await batcher.submit(images(1))
        await asyncio.sleep(0.05)
        start = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - start < 0.02

    asyncio.run(body())


def test_what_an_image_takes_is_learnt():
    async def body():
        batcher = a_batcher(Network(seconds=0.02), max_batch=4)
        await batcher.submit(images(1, 2))
        assert 0.009 < batcher.seconds_per_image < 0.03
        assert batcher.done.images == 2
        assert batcher.done.by_size.keys() == {2}

    asyncio.run(body())


def test_a_stall_does_not_close_the_server_for_good():
    async def body():
        network = Network(seconds=0.3)
        batcher = a_batcher(network, max_batch=1, seconds_per_image=0.01)
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await batcher.submit(images(1), deadline=time.monotonic() + 0.1)
        await until(lambda: not batcher.busy)
        assert batcher.seconds_per_image == pytest.approx(0.01 + 0.1 * 0.03)  # as if it took 0.04
        network.seconds = 0.0
        batcher.seconds_per_image = 5.0  # after many of them
        for _ in range(40):
            await batcher.submit(images(1), deadline=time.monotonic() + 0.5)
        assert batcher.seconds_per_image < 0.1

    asyncio.run(body())


def test_files_are_decoded_until_a_batch_is_full_and_then_run():
    async def body():
        network, files = Network(), Files()
        batcher = a_batcher(network, decode=files, max_batch=3, seconds_per_image=1.0)
        answers, timing = await batcher.submit([bytes([i]) for i in range(5)])
        assert rows(answers) == [[2 * i] * 2 for i in range(5)]
        assert network.batches == [3, 2]
        assert files.decoded == [bytes([i]) for i in range(5)]
        assert timing.batch == 3
        assert 0 < timing.seconds["decode"] < 0.1

    asyncio.run(body())


def test_where_an_image_is_at_what_time():
    async def body():
        batcher = a_batcher(Network(seconds=0.02), decode=Files(seconds=0.01), max_batch=4, seconds_per_image=1.0)
        start = time.monotonic()
        _, timing = await batcher.submit([b"a", b"b"])
        end = time.monotonic()
        assert [one.stage for one in timing.intervals] == ["queue", "decode", "queue", "infer"]
        instants = [instant for one in timing.intervals for instant in (one.began, one.ended)]
        assert [start, *instants, end] == sorted([start, *instants, end])
        assert all(a.ended == b.began for a, b in itertools.pairwise(timing.intervals))
        assert timing.seconds["infer"] >= 0.02
        assert timing.seconds["decode"] >= 0.01
        assert timing.seconds["queue"] >= 0.01  # each while the other one is decoded
        _, timing = await batcher.submit(images(1))
        assert [one.stage for one in timing.intervals] == ["queue", "infer"]
        _, timing = await batcher.submit([b"bad"])
        assert [one.stage for one in timing.intervals] == ["queue", "decode"]

    asyncio.run(body())


def test_an_image_waits_for_others_to_be_decoded_no_longer_than_it_takes_to_run():
    async def body():
        network = Network()
        batcher = a_batcher(network, decode=Files(seconds=0.02), max_batch=8, seconds_per_image=0.005)
        await batcher.submit([b"a"] * 6)
        assert network.batches == [2, 2, 2]  # 20 ms are more than 5, and than 10

    asyncio.run(body())


def test_a_file_that_is_no_image_fails_alone():
    async def body():
        batcher = a_batcher(Network(), max_batch=4, seconds_per_image=1.0)
        (first, bad, last), _ = await batcher.submit([b"\1", b"bad", b"\2"])
        assert rows([first, last]) == [[2, 2], [4, 4]]
        assert isinstance(bad, ImageError)
        (bad,), timing = await batcher.submit([b"bad"])
        assert isinstance(bad, ImageError)
        assert timing.batch == 0
        assert timing.seconds["decode"] > 0
        assert not batcher.busy

    asyncio.run(body())


def test_a_bug_in_decoding_costs_its_request_only():
    def decode(data):
        if data == b"bug":
            raise ZeroDivisionError
        return np.ones(2, np.float32)

    async def body():
        batcher = a_batcher(Network(), decode=decode, max_batch=4)
        bug, good = await asyncio.gather(
            batcher.submit([b"x", b"bug", b"x"]), batcher.submit([b"x"]), return_exceptions=True
        )
        assert isinstance(bug, ZeroDivisionError)
        assert rows(good[0]) == [[2, 2]]
        assert not batcher.busy

    asyncio.run(body())


def test_files_and_tensors_share_a_batch():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, max_batch=4, seconds_per_image=1.0)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        both = [asyncio.create_task(batcher.submit([b"\2"])), asyncio.create_task(batcher.submit(images(3)))]
        await until(lambda: batcher.waiting == 2)
        network.gate.set()
        answers = await asyncio.gather(first, *both)
        assert [rows(one) for one, _ in answers] == [[[2, 2]], [[4, 4]], [[6, 6]]]
        assert network.batches == [1, 2]

    asyncio.run(body())


def test_files_wait_as_they_are_beyond_what_the_next_batches_take():
    async def body():
        network, files = Network(), Files()
        network.gate.clear()
        batcher = a_batcher(network, decode=files, threads=3, decode_threads=2, max_batch=2, seconds_per_image=1.0)
        task = asyncio.create_task(batcher.submit([b"a"] * 20))
        await until(lambda: len(files.decoded) >= 6)  # two run, four are ready, and one more may have been begun
        await asyncio.sleep(0.05)
        assert len(files.decoded) <= 7
        network.gate.set()
        await task
        assert sum(network.batches) == 20

    asyncio.run(body())


def test_a_file_whose_deadline_is_over_is_not_decoded():
    async def body():
        files = Files()
        files.gate.clear()
        batcher = a_batcher(Network(), decode=files, max_batch=1)
        first = asyncio.create_task(batcher.submit([b"a"]))
        await until(lambda: batcher.busy and not batcher.waiting)
        start = time.monotonic()
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await batcher.submit([b"b", b"c"], deadline=start + 0.05)
        assert time.monotonic() - start < 1
        assert not batcher.waiting
        files.gate.set()
        await first
        assert files.decoded == [b"a"]

    asyncio.run(body())


def test_an_image_that_takes_too_long_to_decode_is_given_up_and_counts_until_its_thread_ends():
    async def body():
        network, files = Network(), Files()
        files.gate.clear()
        batcher = a_batcher(network, decode=files, max_batch=1)
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await batcher.submit([b"a", b"b"], deadline=time.monotonic() + 0.05)
        assert batcher.busy
        assert not batcher.waiting
        files.gate.set()
        await until(lambda: not batcher.busy)
        assert network.batches == []
        assert rows((await batcher.submit([b"\3"]))[0]) == [[6, 6]]

    asyncio.run(body())


def test_a_caller_that_is_gone_leaves_nothing_behind_but_what_has_begun():
    async def body():
        network, files = Network(), Files()
        files.gate.clear()
        batcher = a_batcher(network, decode=files, max_batch=1)
        task = asyncio.create_task(batcher.submit([b"a", b"b", b"c"]))
        await until(lambda: batcher.waiting == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not batcher.waiting
        files.gate.set()
        await until(lambda: not batcher.busy)
        assert (files.decoded, network.batches) == ([b"a"], [])

    asyncio.run(body())


def test_a_full_server_refuses_what_would_come_late_and_a_free_thread_takes_it():
    async def body():
        network, files = Network(), Files()
        network.gate.clear()
        batcher = a_batcher(network, decode=files, workers=2, max_batch=8, seconds_per_image=0.2)
        batcher._pool.decode_seconds = 0.1
        running = [asyncio.create_task(batcher.submit(images(1)))]
        await until(lambda: batcher._running == 1)
        # Decoded and run beside it: 0.1 s of one that decodes, 0.2 s over two that run, 0.3 s over two cores.
        assert batcher.wait_for(1, decodes=True) == pytest.approx(0.15)
        running.append(asyncio.create_task(batcher.submit([b"a"], deadline=time.monotonic() + 0.6)))
        await until(lambda: batcher._running == 2)
        # Behind two batches that are half done: of up to eight, as far as is known.
        assert batcher.wait_for(1) == pytest.approx(0.2 * (1 + 8) / 2)
        with pytest.raises(RefusedError, match=r"cannot be answered in time: up to 2\.00 s are needed") as caught:
            await batcher.submit(images(1), deadline=time.monotonic() + 1.9)
        assert caught.value.retry_after == pytest.approx(0.9)
        network.gate.set()
        await asyncio.gather(*running)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("threads", "workers", "cores_a_call", "per_second"),
    [(4, 4, 1, 4 / 0.03), (4, 1, 4, 1 / (0.02 + 0.01 / 4)), (3, 1, 0, 1 / 0.02), (40, 40, 0, 2 / 0.01)],
)
def test_what_is_slower_sets_the_pace(threads, workers, cores_a_call, per_second):
    """Cores shared; one call on all of them; a GPU; a GPU whose images two threads decode."""
    pool = Pool(threads, decode_threads=2 if threads == 40 else 4, cores=4)
    batcher = Batcher(
        Network(),
        pool,
        decode=Files(),
        max_batch=1,
        workers=workers,
        cores_a_call=cores_a_call,
        seconds_per_image=0.02,
    )
    pool.decode_seconds = 0.01
    assert 1 / batcher.pace(1, 1) == pytest.approx(per_second)


class Held:
    """Something that a request holds until it is refused."""


@pytest.mark.parametrize("late", ["decoding", "network", "parsing"])
def test_a_refused_request_s_body_is_let_go_at_once(late):
    """An error that a task keeps holds, by its traceback, the frames that refer to that task."""

    def slow(*args, **kwargs):
        time.sleep(0.15)
        return np.zeros((1, 2), np.float32)

    async def body():
        batcher = a_batcher(slow, decode=slow, max_batch=1)
        pool = batcher._pool
        parser = Server({}, pool, Limits(body_bytes=1, bodies_bytes=1, body_seconds=1, images=1, deadline=1))
        held = []

        async def work():
            mine = Held()
            held.append(weakref.ref(mine))
            deadline = time.monotonic() + 0.05
            if late == "decoding":
                await batcher.submit([b"a", b"b"], deadline=deadline)
            elif late == "network":
                await batcher.submit([np.zeros(3)], deadline=deadline)
            else:
                await parser.beside(lambda: slow(mine), deadline=deadline)

        async def request():
            mine = Held()
            held.append(weakref.ref(mine))
            with pytest.raises(RefusedError):
                async with while_there(Client(10)):
                    await work()

        gc.collect()
        gc.disable()
        try:
            await request()
            await asyncio.sleep(0.4)  # until the threads are done with it
            assert [one() for one in held] == [None, None]
        finally:
            gc.enable()

    asyncio.run(body())


class Client:
    """A request whose client goes after so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def receive(self):
        await asyncio.sleep(self.seconds)
        return {"type": "http.disconnect"}


def test_what_a_client_that_goes_has_asked_for_is_ended():
    async def body():
        with pytest.raises(HttpError, match="the client is gone"):
            async with while_there(Client(0.02)):
                await asyncio.sleep(10)
        await asyncio.sleep(0)  # nobody is cancelled a second time

    asyncio.run(body())


def test_whoever_ends_a_request_is_not_taken_for_its_client():
    async def body():
        async def request():
            async with while_there(Client(10)):
                await asyncio.sleep(10)

        task = asyncio.create_task(request())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


def test_a_client_that_goes_once_it_is_answered_ends_nothing():
    async def body():
        client = Client(0)
        async with while_there(client):
            await asyncio.sleep(0)  # it has gone by the next step
        await asyncio.sleep(0.02)

    asyncio.run(body())
