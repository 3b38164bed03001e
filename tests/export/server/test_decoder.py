"""The threads that decode: what they take is learnt, and no request waits for them past its deadline."""

import asyncio
import gc
import math
import threading
import time
import weakref

import numpy as np
import pytest

from dsimg_export.server.batcher import Batcher
from dsimg_export.server.classify import unless_gone
from dsimg_export.server.errors import RefusedError
from dsimg_export.server.model import Decoder
from dsimg_export.server.state import Limits, Server


class Images:
    """A model whose images are decoded when the gate opens."""

    def __init__(self):
        self.gate = threading.Event()

    def input_of(self, data, *, max_pixels):
        assert self.gate.wait(10)
        return data


def test_an_image_that_takes_too_long_is_given_up_but_counted_until_its_thread_ends():
    async def body():
        model, decoder = Images(), Decoder(1, max_pixels=1)
        start = time.monotonic()
        with pytest.raises(RefusedError, match="its deadline has passed"):
            await decoder.decode([b"a", b"b"], model, deadline=start + 0.1)
        assert time.monotonic() - start < 1
        await asyncio.sleep(0.05)
        assert decoder.waiting == 1  # the second never began
        model.gate.set()
        async with asyncio.timeout(5):
            while decoder.waiting:
                await asyncio.sleep(0.01)
        assert await decoder.decode([b"c", b"d"], model, deadline=math.inf) == [b"c", b"d"]
        assert 0 < decoder.seconds_per_image < 1

    asyncio.run(body())


def test_a_caller_that_is_gone_leaves_nothing_behind_but_what_has_begun():
    async def body():
        model, decoder = Images(), Decoder(1, max_pixels=1)
        task = asyncio.create_task(decoder.decode([b"a", b"b", b"c"], model, deadline=math.inf))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert decoder.waiting == 1
        model.gate.set()

    asyncio.run(body())


class Held:
    """Something that a request holds until it is refused."""


@pytest.mark.parametrize("late", ["decoding", "network", "parsing"])
def test_a_refused_request_s_body_is_let_go_at_once(late):
    """An error that a task keeps holds, by its traceback, the frames that refer to that task."""

    def slow(*args, **kwargs):
        time.sleep(0.15)
        return np.zeros((1, 2), np.float32)

    async def body():
        decoder = Decoder(1, max_pixels=1)
        batcher = Batcher(slow, max_batch=1)
        parser = Server({}, decoder, Limits(body_bytes=1, bodies_bytes=1, body_seconds=1, images=1, deadline=1))
        held = []

        async def work():
            mine = Held()
            held.append(weakref.ref(mine))
            deadline = time.monotonic() + 0.05
            if late == "decoding":
                await decoder.decode([b"a", b"b"], Slow(), deadline=deadline)
            elif late == "network":
                await batcher.submit([np.zeros(3)], deadline=deadline)
            else:
                await parser.beside(lambda: slow(mine), deadline=deadline)

        async def request():
            mine = Held()
            held.append(weakref.ref(mine))
            with pytest.raises(RefusedError):
                await unless_gone(Client(), work())

        gc.collect()
        gc.disable()
        try:
            await request()
            await asyncio.sleep(0.4)  # until the threads are done with it
            assert [one() for one in held] == [None, None]
        finally:
            gc.enable()

    class Slow:
        def input_of(self, data, *, max_pixels):
            return slow()

    class Client:
        async def receive(self):
            await asyncio.sleep(10)

    asyncio.run(body())


def test_a_thread_that_cannot_be_started_leaves_nothing_waiting(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    async def body():
        model, decoder = Images(), Decoder(1, max_pixels=1)
        model.gate.set()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await decoder.decode([b"a", b"b"], model, deadline=math.inf)
        assert decoder.waiting == 0
        assert await decoder.decode([b"c"], model, deadline=math.inf) == [b"c"]

    asyncio.run(body())
