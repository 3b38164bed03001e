"""What is admitted: a free worker is waited for by nobody, and the queue stays short of the deadline."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dsimg_export.serve import ServeConfig, open_server
from dsimg_export.server.batcher import Batcher
from dsimg_export.server.classify import admit
from dsimg_export.server.errors import RefusedError
from dsimg_export.server.model import Decoder, Plan, load


def test_a_full_server_refuses_what_would_come_late_and_a_free_worker_takes_it():
    gate = threading.Event()

    def network(images):
        gate.wait(10)
        return images

    async def body():
        batcher = Batcher(network, max_batch=8, workers=2, seconds_per_image=0.2)
        server = SimpleNamespace(loaded=True, decoder=Decoder(1, max_pixels=1))
        model = SimpleNamespace(batcher=batcher, plan=SimpleNamespace(max_queue=9))
        running = [asyncio.create_task(batcher.submit([np.zeros(1)]))]
        await asyncio.sleep(0.01)
        admit(server, model, 1, time.monotonic() + 0.5)  # 0.2 s, in the second worker
        running.append(asyncio.create_task(batcher.submit([np.zeros(1)])))
        await asyncio.sleep(0.01)
        with pytest.raises(RefusedError, match=r"cannot be answered in time: up to 2\.00 s are needed") as caught:
            admit(server, model, 1, time.monotonic() + 1.9)
        assert caught.value.retry_after == pytest.approx(0.9)
        admit(server, model, 1, time.monotonic() + 2.1)
        server.decoder.waiting = 9
        with pytest.raises(RefusedError, match="Exceeds maximum queue size"):
            admit(server, model, 1, time.monotonic() + 60)
        admit(server, model, 1, time.monotonic() + 2.1, decodes=False)  # a tensor waits for no decoder
        gate.set()
        await asyncio.gather(*running)

    asyncio.run(body())


def test_a_lone_call_has_a_session_of_its_own(run):
    plan = Plan(workers=1, threads=1, max_batch=2, max_delay=0.0, max_queue=9)
    for threads, opened in ((2, True), (None, False)):
        model = load(run.path, "x", replace(plan, lone_threads=threads), observe=lambda images, seconds: None)
        assert (model.batcher.lone_network is not None) == opened


@pytest.mark.parametrize(("threads", "lone", "expected"), [(1, 1, None), (2, 2, None), (1, 3, 3), (2, 1, 1)])
def test_a_lone_call_with_as_many_threads_needs_no_session_of_its_own(run, threads, lone, expected):
    server = open_server(ServeConfig(source=(run.path,), workers=1, threads=threads, lone_threads=lone))
    (model,) = server.models.values()
    assert model.plan.lone_threads == expected
    assert (model.batcher.lone_network is None) == (expected is None)
