"""The threads that decode: what they take is learnt, and no request waits for them past its deadline."""

import asyncio
import math
import threading
import time

import pytest

from dsimg_export.server.errors import RefusedError
from dsimg_export.server.model import Decoder


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
