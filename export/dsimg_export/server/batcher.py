"""Images of many requests into batches for one network: no polling, a bounded queue, no answer after its deadline.

A thread that is free decodes until a batch is full or nothing is left to decode, then runs it; with a delay, once it is
full or its oldest image has waited that long. What is counted is images, not requests. Requests come and are answered
in one event loop; images are decoded and run in the threads of a `Pool`.
"""

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsimg.errors import ImageError
from dsimg_export.server.errors import RefusedError
from dsimg_export.server.pool import Job, Pool, learn
from dsimg_export.server.telemetry import Interval

Answer = TypeVar("Answer")
Network = Callable[[NDArray[Any]], Sequence[Answer]]
Decode = Callable[[bytes], NDArray[Any]]
Gather = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]
# How many times as long as expected the wait may be, and the answer still in time. Without it the queue grows until
# half of what is admitted comes late: decoded, and perhaps run, for nothing.
MARGIN = 2.0


@dataclass(kw_only=True)
class Timing:
    """What became of a request's images, and when."""

    seconds: dict[str, float] = field(default_factory=dict)  # by stage; of several images the longest
    intervals: list[Interval] = field(default_factory=list)  # of the image that was answered last
    batch: int = 0  # images in the largest batch

    def add(self, intervals: list[Interval]) -> None:
        """Note an image that is answered. It queues twice: until it is decoded, and until it runs."""
        taken: dict[str, float] = {}
        for stage, began, ended in intervals:
            taken[stage] = taken.get(stage, 0.0) + ended - began
        for stage, seconds in taken.items():
            self.seconds[stage] = max(self.seconds.get(stage, 0.0), seconds)
        self.intervals = intervals


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
class _Request(Generic[Answer]):
    """Images that were submitted together, and what is known of their answers."""

    answers: list[Answer | ImageError | None]
    future: "asyncio.Future[None]"
    deadline: float
    timing: Timing = field(default_factory=Timing)
    waiting: int = 0  # images without an answer
    late: bool = False


@dataclass(eq=False)
class _Image(Generic[Answer]):
    request: _Request[Answer]
    place: int
    since: float  # when it came
    file: bytes | None  # until it is decoded
    pixels: NDArray[Any] | None
    begun: float = 0.0  # when its decoding began
    ready: float = 0.0  # when it could run

    @property
    def intervals(self) -> list[Interval]:
        """What has been done with it, and when."""
        if not self.begun:
            return []
        return [Interval("queue", self.since, self.begun), Interval("decode", self.begun, self.ready)]


class Batcher(Generic[Answer]):
    """Gathers images for a network.

    network: (N, ...) -> N answers, called in `workers` threads at a time. decode: an image's file -> its pixels, raises
    ImageError. gather: pixels of files, and images as the network takes them -> (N, ...). lone_network: called in the
    network's place where nothing else runs or waits, at most `lone_gain` times as fast. cores_a_call: of those that the
    pool's threads share. max_batch: images a call. max_delay: seconds that the oldest image waits at most for others.
    max_queue: images that wait at most.
    """

    def __init__(
        self,
        network: Network[Answer],
        pool: Pool,
        *,
        decode: Decode,
        gather: Gather = np.stack,
        lone_network: Network[Answer] | None = None,
        lone_gain: float = 1.0,
        cores_a_call: int = 1,
        max_batch: int,
        max_delay: float = 0.0,
        max_queue: int = 256,
        workers: int = 1,
        seconds_per_image: float = 0.0,
        observe: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        self.max_batch, self.max_delay, self.max_queue = max_batch, max_delay, max_queue
        self.workers, self.cores_a_call = workers, cores_a_call
        self.network, self.lone_network, self.decode = network, lone_network, decode
        self._gather = gather
        self._observe, self._lone_gain = observe, lone_gain
        self._pool = pool
        # These four under the pool's lock.
        self._files: deque[_Image[Answer]] = deque()
        self._ready: deque[_Image[Answer]] = deque()
        self._decoding = 0
        self._running = 0  # batches
        self._closed = False
        self._unanswered = 0  # requests
        self._idle: asyncio.Event | None = None
        self.done = Done()
        # Seconds of a worker: what an image adds to the wait of those behind it is this over `workers`.
        self.seconds_per_image = seconds_per_image
        pool.add(self)

    @property
    def waiting(self) -> int:
        """Images in the queue."""
        return len(self._files) + len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._files or self._ready or self._decoding or self._running)

    @property
    def oldest(self) -> float:
        """When the oldest image came that waits."""
        return min((queue[0].since for queue in (self._files, self._ready) if queue), default=math.inf)

    def pace(self, files: float, images: float) -> float:
        """Return the seconds that decoding so many files and running so many images takes, all workers and cores busy.

        Where both share the cores their times add up; a GPU sets the pace alone, or those who decode for it do.
        """
        decode, infer = self._pool.decode_seconds * files, self.seconds_per_image * images
        return max(
            decode / self._pool.decode_threads,
            infer / self.workers,
            (decode + self.cores_a_call * infer) / self._pool.cores,
        )

    def wait_for(self, images: int, *, decodes: bool = False) -> float:
        """Return the seconds after which so many further images would be answered, as far as is known."""
        files = len(self._files) + self._decoding
        ahead = files + len(self._ready) + images
        begun = self.max_batch / 2 * self._running if self._running >= self.workers else 0  # a free one is there
        return self.pace(files + (images if decodes else 0), ahead + begun)

    async def submit(
        self, images: Sequence[bytes | NDArray[Any]], *, deadline: float = math.inf
    ) -> tuple[list[Answer | ImageError], Timing]:
        """Return the answer to each image, or why its file has none, before `deadline`, of `time.monotonic`.

        images: files, or arrays as the network takes them. Raises RefusedError where the queue is full, the deadline
        cannot be met or has passed before they ran; and what the network raises. Where nothing waits or runs they are
        tried: what a network takes is learnt in no other way.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        decodes = isinstance(images[0], bytes)
        self._admit(len(images), deadline, now, decodes=decodes)
        request = _Request[Answer]([None] * len(images), loop.create_future(), deadline, waiting=len(images))
        entries = [
            _Image(request, place, now, image, None)
            if isinstance(image, bytes)
            else _Image(request, place, now, None, image, ready=now)
            for place, image in enumerate(images)
        ]
        with self._pool.lock:
            (self._files if decodes else self._ready).extend(entries)
        self._unanswered += 1
        timers = [] if deadline == math.inf else [loop.call_later(deadline - now, _expire, request)]
        if self.max_delay:
            timers.append(loop.call_later(self.max_delay, self._pool.wake))
        try:
            self._pool.wake(len(images))
            await request.future
        finally:
            for timer in timers:
                timer.cancel()
            if request.waiting:
                self.done.failed += 1
                self._forget(request)
            self._unanswered -= 1
            if self._idle is not None and not self._unanswered:
                self._idle.set()
        if request.late:  # not raised by the timer: its traceback would hold the task, and that the body and the pixels
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        timing, done = request.timing, self.done
        done.requests += 1
        done.request_seconds += time.monotonic() - now
        done.queue_seconds += timing.seconds.get("queue", 0.0)
        done.infer_seconds += timing.seconds.get("infer", 0.0)
        return [answer for answer in request.answers if answer is not None], timing

    async def close(self) -> None:
        """Answer what waits, and take nothing more."""
        self._closed = True
        if self._unanswered:
            self._idle = asyncio.Event()
            self._pool.wake()
            await self._idle.wait()
        self._pool.remove(self)

    def _admit(self, images: int, deadline: float, now: float, *, decodes: bool) -> None:
        """Raise RefusedError where so many images cannot be answered in time, before anything is spent on them."""
        if self._closed:
            raise RefusedError("this model is being unloaded", retry_after=1.0, kind="queue")
        if self.waiting and self.waiting + images > self.max_queue:
            raise RefusedError("Exceeds maximum queue size", retry_after=self.wait_for(0), kind="queue")
        if now > deadline:
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        ahead = self.wait_for(images, decodes=decodes)
        needed = MARGIN * ahead + self.seconds_per_image
        if self.busy and now + needed > deadline:
            raise RefusedError(
                f"cannot be answered in time: up to {needed:.2f} s are needed", retry_after=ahead, kind="deadline"
            )

    def _forget(self, request: _Request[Answer]) -> None:
        """Late, failed, or its caller is gone: what has not run yet need not."""
        with self._pool.lock:
            self._files = deque(image for image in self._files if image.request is not request)
            self._ready = deque(image for image in self._ready if image.request is not request)

    # In the pool's threads

    def next_job(self, now: float) -> Job | None:
        """Take a batch where one is due, else a file to decode."""
        pool = self._pool
        may_decode = bool(self._files) and pool.decoding < pool.decode_threads
        if self._ready and self._running < self.workers:
            first, ready = self._ready[0], len(self._ready)
            full = ready >= self.max_batch or self._closed
            # Nobody waits longer for others to be decoded than those that are there take to run.
            gathers = may_decode and now - first.ready < self.seconds_per_image * ready
            if full or (not gathers and now - first.since >= self.max_delay):
                batch = [self._ready.popleft() for _ in range(min(ready, self.max_batch))]
                network = self.network
                if self.lone_network is not None and self._alone():
                    network = self.lone_network
                self._running += 1
                return functools.partial(self._run, batch, network)
        # Beyond what the next batches take, files wait as they are: pixels are larger.
        if may_decode and len(self._ready) < (self.workers + 1) * self.max_batch:
            self._decoding += 1
            pool.decoding += 1
            return functools.partial(self._decode, self._files.popleft())
        return None

    def _alone(self) -> bool:
        return not self.busy and all(one.oldest == math.inf for one in self._pool.others(self))

    def _decode(self, image: _Image[Answer]) -> None:
        file, image.file = image.file, None
        assert file is not None
        image.begun = time.monotonic()
        in_time = image.begun <= image.request.deadline
        failed: Exception | None = None
        if in_time:
            try:
                image.pixels = self.decode(file)
            except Exception as error:
                failed = error
        image.ready = time.monotonic()
        with self._pool.lock:
            self._decoding -= 1
            self._pool.decoding -= 1
            if image.pixels is not None and not image.request.future.done():
                self._ready.append(image)
            if in_time:
                self._pool.learn_decode(image.ready - image.begun)
        if failed is not None:
            image.request.future.get_loop().call_soon_threadsafe(self._answer, image, failed, image.intervals)

    def _run(self, batch: list[_Image[Answer]], network: Network[Answer]) -> None:
        start = time.monotonic()
        rows: Sequence[Answer | Exception]
        pixels = [image.pixels for image in batch if image.pixels is not None]
        try:
            rows = list(network(self._gather(pixels)))
        except Exception as error:
            rows = [error] if len(pixels) == 1 else [_one(network, self._gather([image])) for image in pixels]
        seconds = time.monotonic() - start
        with self._pool.lock:
            self._running -= 1
        loop = batch[0].request.future.get_loop()
        loop.call_soon_threadsafe(self._finish, batch, network, start, seconds, rows)

    # In the loop

    def _finish(
        self,
        batch: list[_Image[Answer]],
        network: Network[Answer],
        start: float,
        seconds: float,
        rows: Sequence[Answer | Exception],
    ) -> None:
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
            image.request.timing.batch = max(image.request.timing.batch, len(batch))
            ran = [Interval("queue", image.ready, start), Interval("infer", start, start + seconds)]
            self._answer(image, row, image.intervals + ran)

    def _answer(self, image: _Image[Answer], answer: Answer | Exception, intervals: list[Interval]) -> None:
        request = image.request
        if request.future.done():
            return
        if isinstance(answer, Exception) and not isinstance(answer, ImageError):
            request.future.set_exception(answer)
            return
        request.timing.add(intervals)
        request.answers[image.place] = answer
        request.waiting -= 1
        if not request.waiting:
            request.future.set_result(None)


def _expire(request: _Request[Any]) -> None:
    if not request.future.done():
        request.late = True
        request.future.set_result(None)


def _one(network: Network[Answer], image: NDArray[Any]) -> Answer | Exception:
    """Run one image (1, ...) of a batch that failed: its neighbours are to be answered."""
    try:
        return network(image)[0]
    except Exception as error:
        return error
