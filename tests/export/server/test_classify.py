"""What surrounds a request: its body and what it holds, and whether its client is still there."""

import asyncio
import gc
import time
import weakref

import pytest

from dsimg_export.server.classify import while_there
from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.pool import Pool
from dsimg_export.server.state import Limits, Server


class Held:
    """Something that a request holds until it is refused."""


def test_a_request_that_is_parsed_too_late_lets_its_body_go_at_once():
    """An error that a task keeps holds, by its traceback, the frames that refer to that task."""

    async def body():
        pool = Pool(1, decode_threads=1, cores=1)
        server = Server({}, pool, Limits(body_bytes=1, bodies_bytes=1, body_seconds=1, images=1, deadline=1))
        held = []

        async def work():
            mine = Held()
            held.append(weakref.ref(mine))
            await server.beside(lambda: time.sleep(0.15) or mine, deadline=time.monotonic() + 0.05)

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
            await asyncio.sleep(0.4)  # until the thread is done with it
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
