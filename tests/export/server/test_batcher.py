import asyncio
import contextlib
import gc
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dsimg.errors import ImageError
from dsimg_export.server.batcher import Batcher
from dsimg_export.server.errors import RefusedError
from dsimg_export.server.pool import Pool
from dsimg_export.server.stages import Stages
from tests.export.server.live import until


def images(*values):
    return [np.full(2, value, np.float32) for value in values]


def rows(answers):
    return [row.tolist() for row in answers]


def a_batcher(network, *, threads=None, decode=None, decode_threads=1, pool=None, **options):
    """A batcher with a pool of its own, of as many threads as workers."""
    workers = options.get("workers", 1)
    pool = pool or Pool(threads or workers, decode_threads=decode_threads, cores=threads or workers)
    return Batcher(network, pool, decode=decode or Files(), **options)


class Gated:
    """Goes on when its gate opens, and then takes as long as it is told."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()

    def wait(self):
        assert self.gate.wait(10)
        time.sleep(self.seconds)


class Files(Gated):
    """Decodes a file to its first byte; b"bad" is none."""

    def __init__(self, seconds=0.0):
        super().__init__(seconds)
        self.decoded = []

    def __call__(self, data):
        self.wait()
        self.decoded.append(data)
        if data == b"bad":
            raise ImageError("not an image")
        return np.full(2, data[0], np.float32)


class Network(Gated):
    """Doubles its input; notes its batches; fails on negative images."""

    def __init__(self, seconds=0.0):
        super().__init__(seconds)
        self.batches = []

    def __call__(self, batch):
        self.wait()
        self.batches.append(len(batch))
        if (batch < 0).any():
            raise ValueError("negative")
        return 2 * batch


def test_each_request_gets_its_own_rows():
    async def body():
        batcher = a_batcher(Network(), max_batch=4)
        answers = await asyncio.gather(*(batcher.submit(images(i, 10 + i)) for i in range(20)))
        for i, logits in enumerate(answers):
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
        assert len(answers) == 7

    asyncio.run(body())


def test_a_call_beside_which_nothing_runs_or_waits_has_a_network_of_its_own():
    async def body():
        network, lone = Network(), Network()
        lone.gate.clear()
        batcher = a_batcher(network, lone_network=lone, max_batch=1, workers=2)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher._running == 1)
        second = await batcher.submit(images(2, 3))  # beside the first
        assert (network.batches, lone.batches) == ([1, 1], [])
        lone.gate.set()
        assert rows(await first) == [[2, 2]]
        assert rows(second) == [[4, 4], [6, 6]]
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


def test_a_request_larger_than_a_batch_is_split():
    async def body():
        network = Network()
        stages = Stages()
        logits = await a_batcher(network, max_batch=3).submit(images(*range(8)), stages=stages)
        assert network.batches == [3, 3, 2]
        assert [row[0] for row in logits] == [2 * i for i in range(8)]
        assert stages.batch == 3

    asyncio.run(body())


def test_the_delay_is_counted_from_the_oldest_image():
    async def body():
        network = Network()
        batcher = a_batcher(network, max_batch=4, max_delay=0.5)
        start = time.monotonic()
        first = asyncio.create_task(batcher.submit(images(1)))
        await asyncio.sleep(0.3)
        second = asyncio.create_task(batcher.submit(images(2)))
        await asyncio.gather(first, second)
        assert 0.48 < time.monotonic() - start < 0.75  # a clock begun at the second would end at 0.8
        assert network.batches == [2]
        start = time.monotonic()
        await batcher.submit(images(1, 2, 3, 4))
        assert time.monotonic() - start < 0.4  # full: nothing to wait for

    asyncio.run(body())


def test_workers_run_beside_each_other():
    barrier = threading.Barrier(3, timeout=10)

    def network(batch):
        barrier.wait()
        return batch

    async def body():
        await a_batcher(network, max_batch=1, workers=3).submit(images(1, 2, 3))

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
        assert refused.value.retry_after == pytest.approx(0.5 * (4 + 0.5))
        network.gate.set()
        await asyncio.gather(*tasks)
        assert sum(network.batches) == 5

    asyncio.run(body())


def test_an_empty_queue_takes_a_request_larger_than_it():
    async def body():
        logits = await a_batcher(Network(), max_batch=2, max_queue=4).submit(images(*range(6)))
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
        assert rows(await stays) == [[8, 8]]
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
        assert rows(good) == [[4, 4]]
        assert rows(also_good) == [[8, 8]]
        await first

    asyncio.run(body())


def test_closing_answers_what_waits_and_takes_nothing_more():
    async def body():
        network = Network(seconds=0.05)
        batcher = a_batcher(network, max_batch=2, max_delay=30)
        waiting = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.waiting == 1)
        await batcher.close()
        assert rows(await waiting) == [[2, 2]]
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
        stages = Stages()
        answers = await batcher.submit([bytes([i]) for i in range(5)], stages=stages)
        assert rows(answers) == [[2 * i] * 2 for i in range(5)]
        assert network.batches == [3, 2]
        assert files.decoded == [bytes([i]) for i in range(5)]
        assert stages.batch == 3
        assert stages.seconds["decode"] > 0

    asyncio.run(body())


def test_where_an_image_is_at_what_time():
    async def body():
        batcher = a_batcher(Network(seconds=0.02), decode=Files(seconds=0.01), max_batch=4, seconds_per_image=1.0)
        stages = Stages()
        start = time.monotonic()
        await batcher.submit([b"a", b"b"], stages=stages)
        end = time.monotonic()
        assert [one.stage for one in stages.intervals] == ["queue", "decode", "queue", "infer"]
        instants = [instant for one in stages.intervals for instant in (one.began, one.ended)]
        assert [start, *instants, end] == sorted([start, *instants, end])
        assert all(a.ended == b.began for a, b in itertools.pairwise(stages.intervals))
        assert stages.seconds["infer"] >= 0.02
        assert stages.seconds["decode"] >= 0.01
        assert stages.seconds["queue"] >= 0.01  # each while the other one is decoded
        for given, expected in ((images(1), ["queue", "infer"]), ([b"bad"], ["queue", "decode"])):
            stages = Stages()
            await batcher.submit(given, stages=stages)
            assert [one.stage for one in stages.intervals] == expected

    asyncio.run(body())


@pytest.mark.parametrize(
    ("late", "expected"),
    [("queue", ["queue"]), ("decode", ["queue", "decode"]), ("network", ["queue", "decode", "queue"])],
)
def test_where_an_image_was_when_it_was_too_late(late, expected):
    async def body():
        network, files = Network(), Files()
        batcher = a_batcher(network, decode=files, max_batch=1)
        held = None
        if late == "queue":
            files.gate.clear()
            held = asyncio.create_task(batcher.submit([b"a"]))
            await until(lambda: batcher.busy and not batcher.waiting)
        (network if late == "network" else files).gate.clear()
        stages = Stages()
        with pytest.raises(RefusedError):
            await batcher.submit([b"b"], deadline=time.monotonic() + 0.05, stages=stages)
        assert [one.stage for one in stages.intervals] == expected
        assert sum(stages.seconds.values()) == pytest.approx(0.05, abs=0.04)
        network.gate.set()
        files.gate.set()
        if held is not None:
            await held

    asyncio.run(body())


def test_what_is_in_hand_is_shared_out_to_the_calls_that_are_free():
    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, workers=3, max_batch=8)
        task = asyncio.create_task(batcher.submit(images(*range(7))))
        await until(lambda: batcher._running == 3)
        network.gate.set()
        await task
        assert sorted(network.batches) == [2, 2, 3]
        network.gate.clear()
        first = [asyncio.create_task(batcher.submit(images(0))) for _ in range(2)]
        await until(lambda: batcher._running == 2)
        rest = [asyncio.create_task(batcher.submit(images(*range(5))))]
        await until(lambda: batcher._running == 3)  # all that waits is the free one's
        assert not batcher.waiting
        network.gate.set()
        await asyncio.gather(*first, *rest)

    asyncio.run(body())


def test_files_are_shared_out_too():
    barrier = threading.Barrier(2, timeout=10)

    def network(batch):
        barrier.wait()
        sizes.append(len(batch))
        return batch

    async def body():
        batcher = a_batcher(network, workers=2, decode_threads=2, max_batch=8, seconds_per_image=60)
        await batcher.submit([b"a"] * 8)
        assert sizes == [4, 4]

    sizes = []
    asyncio.run(body())


def test_an_image_waits_for_others_to_be_decoded_no_longer_than_those_that_are_ready_take_to_run():
    def image(ready=None):
        return SimpleNamespace(request=SimpleNamespace(due=True), since=9.0, begun=9.0, ready=ready)

    batcher = a_batcher(Network(), max_batch=8, seconds_per_image=0.005)
    batcher._files.append(image())
    batcher._ready.extend([image(10.0), image(10.001)])
    assert batcher.next_job(10.009).func == batcher._decode_file  # two take 10 ms
    batcher._pool.end_decode(None)
    batcher._files.append(image())
    assert batcher.next_job(10.011).func == batcher._run_batch
    assert not batcher._ready


def test_a_file_that_is_no_image_fails_alone():
    async def body():
        batcher = a_batcher(Network(), max_batch=4, seconds_per_image=1.0)
        first, bad, last = await batcher.submit([b"\1", b"bad", b"\2"])
        assert rows([first, last]) == [[2, 2], [4, 4]]
        assert isinstance(bad, ImageError)
        stages = Stages()
        (bad,) = await batcher.submit([b"bad"], stages=stages)
        assert isinstance(bad, ImageError)
        assert stages.batch == 0
        assert stages.seconds["decode"] > 0
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
        assert rows(good) == [[2, 2]]
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
        assert [rows(one) for one in answers] == [[[2, 2]], [[4, 4]], [[6, 6]]]
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
        assert rows(await batcher.submit([b"\3"])) == [[6, 6]]

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
        network = Network()
        network.gate.clear()
        pool = Pool(2, decode_threads=1, cores=2)
        batcher = a_batcher(network, pool=pool, workers=2, max_batch=8, seconds_per_image=0.2)
        pool.decode_seconds = 0.1
        running = [asyncio.create_task(batcher.submit(images(1)))]
        await until(lambda: batcher._running == 1)
        # Half an image and a whole one in two threads; one that calls is free, and one decodes.
        assert batcher.wait_for(1, decodes=True) == pytest.approx((0.1 + 0.2 + 0.1) / 2)
        running.append(asyncio.create_task(batcher.submit([b"a"], deadline=time.monotonic() + 60)))
        await until(lambda: batcher._running == 2)
        assert batcher.wait_for(1) == pytest.approx(0.2 * (1 + 2 / 2) / 2)
        with pytest.raises(RefusedError, match=r"cannot be answered in time: up to 0\.60 s are needed") as caught:
            await batcher.submit(images(1), deadline=time.monotonic() + 0.5)
        assert caught.value.retry_after == pytest.approx(0.2)
        network.gate.set()
        await asyncio.gather(*running)

    asyncio.run(body())


def test_admission_and_lone_calls_see_the_other_models_of_the_pool():
    async def body():
        a, b, lone = Network(), Network(), Network()
        a.gate.clear()
        pool = Pool(2, decode_threads=2, cores=2)
        first = a_batcher(a, pool=pool, workers=2, max_batch=1, seconds_per_image=0.1)
        second = a_batcher(b, lone_network=lone, pool=pool, workers=2, max_batch=1, seconds_per_image=0.1)
        running = [asyncio.create_task(first.submit(images(1)))]
        await until(lambda: first._running == 1)
        await second.submit(images(1))
        assert (b.batches, lone.batches) == ([1], [])
        second.seconds_per_image = 0.1
        running += [asyncio.create_task(first.submit(images(1))) for _ in range(11)]
        await until(lambda: first.waiting == 10)
        # Of the other model's eleven images no more come before than this one has.
        assert second.wait_for(1) == pytest.approx(0.1 * (1 + 1) / 2)
        assert second.wait_for(20) == pytest.approx(0.1 * (20 + 10 + 2 / 2) / 2)
        with pytest.raises(RefusedError, match="cannot be answered in time"):
            await second.submit(images(*range(20)), deadline=time.monotonic() + 2)
        a.gate.set()
        await asyncio.gather(*running)
        await until(lambda: not first.busy)
        await second.submit(images(1))
        assert lone.batches == [1]
        assert pool.sources == []

    asyncio.run(body())


@pytest.mark.parametrize(
    ("threads", "decode_threads", "workers", "cores_a_call", "per_second"),
    [
        (4, 4, 4, 1, 4 / 0.03),
        (4, 4, 1, 4, 1 / (0.02 + 0.01 / 4)),
        (1, 1, 1, 1, 1 / 0.03),
        (5, 4, 1, 0, 1 / 0.02),
        (40, 2, 40, 0, 2 / 0.01),
    ],
    ids=["cores shared", "a call on all cores", "one thread of four cores", "a GPU", "few that decode for a GPU"],
)
def test_what_is_scarcest_sets_the_pace(threads, decode_threads, workers, cores_a_call, per_second):
    pool = Pool(threads, decode_threads=decode_threads, cores=4)
    batcher = a_batcher(
        Network(), pool=pool, max_batch=1, workers=workers, cores_a_call=cores_a_call, seconds_per_image=0.02
    )
    pool.decode_seconds = 0.01
    assert 1 / batcher.wait_for(1, decodes=True) == pytest.approx(per_second)


def test_only_good_images_and_batches_teach_what_they_take():
    async def body():
        batcher = a_batcher(Network(), max_batch=4, seconds_per_image=1.0)
        batcher._pool.decode_seconds = 1.0
        for _ in range(5):
            assert isinstance((await batcher.submit([b"bad"]))[0], ImageError)
            with pytest.raises(ValueError, match="negative"):
                await batcher.submit(images(-1))
        assert (batcher._pool.decode_seconds, batcher.seconds_per_image) == (1.0, 1.0)
        await batcher.submit([b"a"])
        assert batcher._pool.decode_seconds < 1
        assert batcher.seconds_per_image < 1

    asyncio.run(body())


def test_images_that_cannot_be_gathered_cost_themselves_only():
    def gather(pixels):
        if any(one[0] == 3 for one in pixels):
            raise MemoryError
        return np.stack(pixels)

    async def body():
        network = Network()
        network.gate.clear()
        batcher = a_batcher(network, gather=gather, max_batch=4)
        first = asyncio.create_task(batcher.submit(images(1)))
        await until(lambda: batcher.busy and not batcher.waiting)
        tasks = [asyncio.create_task(batcher.submit(images(value))) for value in (2, 3, 4)]
        await until(lambda: batcher.waiting == 3)
        network.gate.set()
        good, bad, also_good = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, MemoryError)
        assert (rows(good), rows(also_good)) == ([[4, 4]], [[8, 8]])
        await first
        assert not batcher.busy

    asyncio.run(body())


def test_a_delay_is_each_request_s_own_whatever_comes_before_it():
    async def body():
        files = Files(seconds=0.06)
        batcher = a_batcher(Network(), decode=files, threads=2, workers=2, max_batch=8, max_delay=0.2)
        start = time.monotonic()
        old = asyncio.create_task(batcher.submit([b"a"], deadline=start + 10))
        await asyncio.sleep(0.03)
        young = asyncio.create_task(batcher.submit(images(1), deadline=start + 10))  # ready before the file
        await asyncio.sleep(0.185)
        young.cancel()
        await old
        assert time.monotonic() - start < 5

    asyncio.run(body())


def test_tensors_that_come_later_do_not_pass_files_by():
    async def body():
        network = Network(seconds=0.002)
        batcher = a_batcher(network, max_batch=2)
        stop = False

        async def ask(given):
            while not stop:
                await batcher.submit(given)

        tasks = [asyncio.create_task(ask(images(1, 2, 3))) for _ in range(8)]
        await until(lambda: batcher.waiting > 10)
        for _ in range(3):
            await batcher.submit([b"a"], deadline=time.monotonic() + 5)
        stop = True
        await asyncio.gather(*tasks)

    asyncio.run(body())


def test_a_network_that_gives_too_few_answers_fails_its_images():
    async def body():
        batcher = a_batcher(lambda batch: [], max_batch=4)
        with pytest.raises(IndexError):
            await batcher.submit(images(1, 2))
        assert not batcher.busy

    asyncio.run(body())


@pytest.mark.parametrize("delay", [0.0004, 0.0024, 0.005])
def test_a_delay_ends_by_uvloop_s_clock_too(delay):
    """Its timers count whole milliseconds, and may be early by one."""
    uvloop = pytest.importorskip("uvloop")

    async def body():
        batcher = a_batcher(Network(), max_batch=8, max_delay=delay)
        for image in [images(1), [b"a"]] * 20:
            await batcher.submit(image, deadline=time.monotonic() + 5)

    uvloop.run(body())


class File(bytes):
    """A file that tells when it is let go; bytes have no weak references."""

    def __del__(self):
        File.gone += 1


@pytest.mark.parametrize("fails", ["late in decoding", "late in the network", "not an image", "a bug", "the network"])
def test_a_request_that_fails_lets_its_body_go_at_once(fails):
    """An error holds, by its traceback, the frames that it passed: one that refers to it needs the collector."""

    def decode(data):
        if fails == "late in decoding":
            time.sleep(0.1)
        if fails == "not an image":
            raise ImageError("not an image")
        if fails == "a bug":
            raise ZeroDivisionError
        return np.frombuffer(data, np.uint8)

    def network(batch):
        if fails == "late in the network":
            time.sleep(0.1)
        if fails == "the network":
            raise ValueError
        return batch

    async def request(batcher):
        deadline = time.monotonic() + (0.03 if fails.startswith("late") else 60)
        with contextlib.suppress(RefusedError, ZeroDivisionError, ValueError):
            (answer,) = await batcher.submit([File(b"abc")], deadline=deadline)
            assert isinstance(answer, ImageError)

    async def body():
        batcher = a_batcher(network, decode=decode, max_batch=1)
        await request(batcher)
        await until(lambda: not batcher.busy)
        await asyncio.sleep(0.05)  # until the thread waits

    gc.collect()
    File.gone = 0
    gc.disable()
    try:
        asyncio.run(body())
        assert File.gone == 1
    finally:
        gc.enable()
