"""Images of many requests into batches for one network: no polling, a bounded queue, no answer after its deadline.

A batch starts as soon as a worker is free; with a delay, once it is full or its oldest image has waited that long. What
is counted is images, not requests. Runs in one event loop; the network runs in threads.
"""

import asyncio
import contextlib
import functools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsimg_export.server.errors import RefusedError

Network = Callable[[NDArray[Any]], NDArray[np.float32]]
# Of the threads that decode and call the network, by thread as Linux has it: where they take the loop's turns, requests
# wait unread. ONNX Runtime's own threads stay as they are.
NICENESS = 5
# How much the last batch weighs in what an image is thought to take, and how many times as long it may seem.
WEIGHT = 0.1
MOST = 4.0


def step_back() -> None:
    """Let the loop's thread go before the calling one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden here: its pool would be broken for good
            os.nice(NICENESS)


def learn(expected: float, seconds: float) -> float:
    """Return what an image is thought to take after one took so many seconds; a stall does not count for much."""
    return expected + WEIGHT * (min(seconds, MOST * expected) - expected) if expected else seconds


@dataclass(kw_only=True)
class Timing:
    """Seconds that a request's images took; of several batches the longest."""

    queue: float = 0.0
    infer: float = 0.0
    batch: int = 0  # images in the largest batch


@dataclass(kw_only=True)
class Done:
    """What a batcher has done so far."""

    last: float = 0.0  # time.time() of the last batch
    images: int = 0
    batches: int = 0
    requests: int = 0
    failed: int = 0  # requests
    request_seconds: float = 0.0
    queue_seconds: float = 0.0
    infer_seconds: float = 0.0
    by_size: dict[int, tuple[int, float]] = field(default_factory=dict)  # batches and their seconds


@dataclass(eq=False)
class _Request:
    """Images that were submitted together, and what is known of their answers."""

    logits: list[NDArray[np.float32] | None]
    future: "asyncio.Future[None]"
    timing: Timing = field(default_factory=Timing)
    waiting: int = 0  # images without an answer


@dataclass(eq=False)
class _Image:
    pixels: NDArray[Any]
    request: _Request
    place: int
    since: float


class Batcher:
    """Gathers images for a network.

    network: (N, ...) -> logits (N, C), called in `workers` threads at a time. lone_network: called in its place where
    nothing else runs or waits, at most `lone_gain` times as fast. max_batch: images a call. max_delay: seconds that the
    oldest image waits at most for others. max_queue: images that wait at most.
    """

    def __init__(
        self,
        network: Network,
        *,
        lone_network: Network | None = None,
        lone_gain: float = 1.0,
        max_batch: int,
        max_delay: float = 0.0,
        max_queue: int = 256,
        workers: int = 1,
        seconds_per_image: float = 0.0,
        observe: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        self.max_batch, self.max_delay, self.max_queue = max_batch, max_delay, max_queue
        self.workers = workers
        self.network, self.lone_network = network, lone_network
        self._observe, self._lone_gain = observe, lone_gain
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="infer", initializer=step_back)
        self._queue: deque[_Image] = deque()
        self._running = 0  # batches
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._idle: asyncio.Event | None = None
        self.done = Done()
        # Seconds of a worker: what an image adds to the wait of those behind it is this over `workers`.
        self.seconds_per_image = seconds_per_image

    @property
    def waiting(self) -> int:
        """Images in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._queue or self._running)

    def wait_for(self, images: int) -> float:
        """Return the seconds after which so many further images would be answered, as far as is known."""
        ahead = len(self._queue) + images
        begun = self.max_batch / 2 if self._running >= self.workers else 0  # a free worker waits for nobody
        return self.seconds_per_image * (ahead / self.workers + begun)

    async def submit(
        self, images: Sequence[NDArray[Any]], *, deadline: float = math.inf
    ) -> tuple[NDArray[np.float32], Timing]:
        """Return the logits (N, C) of N images, each as the network takes one, before `deadline`, of `time.monotonic`.

        Raises RefusedError where the queue is full, the deadline cannot be met or has passed before they ran; and what
        the network raises. Where nothing waits or runs they are tried: what a network takes is learnt in no other way.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._closed:
            raise RefusedError("this model is being unloaded", retry_after=1.0, kind="queue")
        if len(self._queue) + len(images) > self.max_queue and self._queue:
            raise RefusedError("Exceeds maximum queue size", retry_after=self.wait_for(0), kind="queue")
        if now > deadline:
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        expected = self.wait_for(len(images))
        if self.busy and now + expected > deadline:
            raise RefusedError(
                f"cannot be answered in time: about {expected:.2f} s are needed", retry_after=expected, kind="deadline"
            )
        request = _Request([None] * len(images), loop.create_future(), waiting=len(images))
        self._queue.extend(_Image(pixels, request, place, now) for place, pixels in enumerate(images))
        self._dispatch()
        late = False
        try:
            async with asyncio.timeout(None if deadline == math.inf else deadline - now):
                await request.future
        except TimeoutError:
            late = True
        finally:
            if request.waiting:
                self.done.failed += 1
                # Late, failed, or its caller is gone: what has not run yet need not.
                self._queue = deque(image for image in self._queue if image.request is not request)
                self._dispatch()
        if late:  # not raised above: its context would hold the task, and that the error, the body and the pixels
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        timing, done = request.timing, self.done
        done.requests += 1
        done.request_seconds += time.monotonic() - now
        done.queue_seconds += timing.queue
        done.infer_seconds += timing.infer
        return np.stack([row for row in request.logits if row is not None]), timing

    async def close(self) -> None:
        """Answer what waits, and take nothing more."""
        self._closed = True
        if self.busy:
            self._idle = asyncio.Event()
            self._dispatch()
            await self._idle.wait()
        self._pool.shutdown(wait=True)

    def _dispatch(self) -> None:
        """Start what can start now, and set the clock for what cannot."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop, now = asyncio.get_running_loop(), time.monotonic()
        while self._queue and self._running < self.workers:
            due = self._queue[0].since + self.max_delay
            if len(self._queue) < self.max_batch and now < due and not self._closed:
                self._timer = loop.call_later(due - now, self._dispatch)
                return
            batch = [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]
            network = self.network if self.busy or self.lone_network is None else self.lone_network
            try:
                task = loop.run_in_executor(self._pool, _run, network, [image.pixels for image in batch])
            except RuntimeError as error:  # no thread can be started now
                for image in batch:
                    if not image.request.future.done():
                        image.request.future.set_exception(error)
                continue
            self._running += 1
            task.add_done_callback(functools.partial(self._finish, batch, now, network))
        if self._idle is not None and not self.busy:
            self._idle.set()

    def _finish(self, batch: list[_Image], started: float, network: Network, done: "asyncio.Future[Any]") -> None:
        self._running -= 1
        rows, seconds = done.result()
        known, taken = self.seconds_per_image, seconds / len(batch)
        if network is self.network:
            self.seconds_per_image = learn(known, taken)
        else:  # with more threads: one that shares the cores takes as long at least, and `lone_gain` times that at most
            self.seconds_per_image = learn(known, min(max(known, taken), taken * self._lone_gain))
        self._observe(len(batch), seconds)
        did = self.done
        did.last, did.images, did.batches = time.time(), did.images + len(batch), did.batches + 1
        count, total = did.by_size.get(len(batch), (0, 0.0))
        did.by_size[len(batch)] = (count + 1, total + seconds)
        for image, row in zip(batch, rows, strict=True):
            request = image.request
            if request.future.done():
                continue
            if isinstance(row, BaseException):
                request.future.set_exception(row)
                continue
            timing = request.timing
            timing.queue = max(timing.queue, started - image.since)
            timing.infer, timing.batch = max(timing.infer, seconds), max(timing.batch, len(batch))
            request.logits[image.place] = row
            request.waiting -= 1
            if not request.waiting:
                request.future.set_result(None)
        self._dispatch()


def _run(network: Network, images: list[NDArray[Any]]) -> tuple[list[NDArray[np.float32] | BaseException], float]:
    """Return the logits of each image, or why there are none; and the seconds. In a worker's thread."""
    start = time.monotonic()
    rows: list[NDArray[np.float32] | BaseException]
    try:
        rows = list(network(np.stack(images)))
    except Exception as error:
        rows = [error] if len(images) == 1 else [_alone(network, image) for image in images]
    return rows, time.monotonic() - start


def _alone(network: Network, image: NDArray[Any]) -> NDArray[np.float32] | BaseException:
    """Run one image of a batch that failed: its neighbours are to be answered."""
    try:
        row: NDArray[np.float32] = network(image[None])[0]
        return row
    except Exception as error:
        return error
