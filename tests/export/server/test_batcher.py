import asyncio
import os
import threading
import time

import numpy as np
import pytest

from dsimg_export.server.batcher import Batcher
from dsimg_export.server.errors import RefusedError


def images(*values):
    return [np.full(2, value, np.float32) for value in values]


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
        batcher = Batcher(Network(), max_batch=4)
        answers = await asyncio.gather(*(batcher.submit(images(i, 10 + i)) for i in range(20)))
        for i, (logits, _) in enumerate(answers):
            assert logits.tolist() == [[2 * i] * 2, [20 + 2 * i] * 2]

    asyncio.run(body())


def test_a_free_worker_does_not_wait_and_a_busy_one_gathers():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = Batcher(network, max_batch=4)
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
        batcher = Batcher(network, lone_network=lone, max_batch=1, workers=2)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy)
        second = await batcher.submit(images(2, 3))  # beside the first
        assert (network.batches, lone.batches) == ([1, 1], [])
        lone.gate.set()
        assert (await first)[0].tolist() == [[2, 2]]
        assert second[0].tolist() == [[4, 4], [6, 6]]
        await batcher.submit(images(4))
        assert (network.batches, lone.batches) == ([1, 1], [1, 1])

    asyncio.run(body())


@pytest.mark.parametrize(("known", "least", "most"), [(0.02, 0.019, 0.021), (1.0, 0.5, 0.95), (0.001, 0.00101, 0.01)])
def test_a_lone_call_bounds_what_one_beside_others_takes(known, least, most):
    async def body():
        batcher = Batcher(Network(), lone_network=Network(0.015), lone_gain=2, max_batch=1, seconds_per_image=known)
        for _ in range(3):
            await batcher.submit(images(1))
        assert least < batcher.seconds_per_image < most

    asyncio.run(body())


def test_a_thread_that_cannot_be_started_costs_its_requests_only(monkeypatch):
    async def body():
        batcher = Batcher(Network(), max_batch=1, workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(4):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await batcher.submit(images(1), deadline=time.monotonic() + 5)
        assert not batcher.busy
        assert (await batcher.submit(images(1)))[0].tolist() == [[2, 2]]

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    asyncio.run(body())


def test_threads_that_may_not_be_nice_run_all_the_same(monkeypatch):
    def forbidden(by):
        raise PermissionError(1, "Operation not permitted")

    async def body():
        assert (await Batcher(Network(), max_batch=1).submit(images(1)))[0].tolist() == [[2, 2]]

    monkeypatch.setattr(os, "nice", forbidden)
    asyncio.run(body())


def test_a_request_larger_than_a_batch_is_split():
    async def body():
        network = Network()
        logits, timing = await Batcher(network, max_batch=3).submit(images(*range(8)))
        assert network.batches == [3, 3, 2]
        assert logits[:, 0].tolist() == [2 * i for i in range(8)]
        assert timing.batch == 3

    asyncio.run(body())


def test_the_delay_is_counted_from_the_oldest_image():
    async def body():
        network = Network()
        batcher = Batcher(network, max_batch=4, max_delay=0.2)
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
        batcher = Batcher(network, max_batch=1, workers=3)
        start = time.monotonic()
        await asyncio.gather(*(batcher.submit(images(i)) for i in range(3)))
        assert time.monotonic() - start < 0.25

    asyncio.run(body())


def test_a_full_queue_refuses_and_says_when_to_come_again():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = Batcher(network, max_batch=2, max_queue=4, seconds_per_image=0.5)
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
        logits, _ = await Batcher(Network(), max_batch=2, max_queue=4).submit(images(*range(6)))
        assert len(logits) == 6

    asyncio.run(body())


def test_what_cannot_be_answered_in_time_is_refused_at_once():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = Batcher(network, max_batch=1, seconds_per_image=0.2)
        running = [asyncio.create_task(batcher.submit(images(i))) for i in range(5)]
        await until(lambda: batcher.waiting == 4)
        start = time.monotonic()
        with pytest.raises(RefusedError, match=r"about 1\.\d\d s are needed") as refused:
            await batcher.submit(images(1), deadline=start + 0.5)
        assert time.monotonic() - start < 0.1
        assert refused.value.status == 503
        assert 1 <= refused.value.retry_after < 1.3
        network.gate.set()
        await asyncio.gather(*running)

    asyncio.run(body())


def test_a_deadline_that_is_over_is_called_so():
    async def body():
        network = Network()
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await Batcher(network, max_batch=1).submit(images(1), deadline=time.monotonic() - 1)
        assert network.batches == []

    asyncio.run(body())


def test_a_deadline_that_passes_in_the_queue_costs_no_run():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = Batcher(network, max_batch=1)
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
        batcher = Batcher(network, max_batch=2)
        running = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        gone = asyncio.create_task(batcher.submit(images(2, 3)))
        stays = asyncio.create_task(batcher.submit(images(4)))
        await until(lambda: batcher.waiting == 3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        network.gate.set()
        assert (await stays)[0].tolist() == [[8, 8]]
        await running
        assert network.batches == [1, 1]

    asyncio.run(body())


def test_an_image_that_fails_fails_alone():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = Batcher(network, max_batch=4)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        tasks = [asyncio.create_task(batcher.submit(images(value))) for value in (2, -3, 4)]
        await until(lambda: batcher.waiting == 3)
        network.gate.set()
        good, bad, also_good = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, ValueError)
        assert good[0].tolist() == [[4, 4]]
        assert also_good[0].tolist() == [[8, 8]]
        await first

    asyncio.run(body())


def test_closing_answers_what_waits_and_takes_nothing_more():
    async def body():
        network = Network(seconds=0.05)
        batcher = Batcher(network, max_batch=2, max_delay=30)
        waiting = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.waiting == 1)
        await batcher.close()
        assert (await waiting)[0].tolist() == [[2, 2]]
        with pytest.raises(RefusedError):
            await batcher.submit(images(1))

    asyncio.run(body())


def test_an_idle_batcher_does_nothing():
    async def body():
        batcher = Batcher(Network(), max_batch=2, max_delay=0.01)
        await batcher.submit(images(1))
        await asyncio.sleep(0.05)
        start = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - start < 0.02

    asyncio.run(body())


def test_what_an_image_takes_is_learnt():
    async def body():
        batcher = Batcher(Network(seconds=0.02), max_batch=4)
        await batcher.submit(images(1, 2))
        assert 0.009 < batcher.seconds_per_image < 0.03
        assert batcher.done.images == 2
        assert batcher.done.by_size.keys() == {2}

    asyncio.run(body())


def test_a_stall_does_not_close_the_server_for_good():
    async def body():
        network = Network(seconds=0.3)
        batcher = Batcher(network, max_batch=1, seconds_per_image=0.01)
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
