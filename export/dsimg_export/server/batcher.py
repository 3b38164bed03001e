"""Images of many requests into batches for one network: no polling, a bounded queue, no answer after its deadline.

A thread that is free decodes until it has its share of what is in hand, at most a batch, then runs it; with a delay,
once a batch is full or its oldest image has waited that long. What is counted is images, not requests. Requests come
and are answered in one event loop; images are decoded and run in the threads of a `Pool`.
"""

import asyncio
import contextlib
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
from dsimg_export.server.pool import Job, Pool, Work, learn
from dsimg_export.server.stages import Interval, Stages

Answer = TypeVar("Answer")
Network = Callable[[NDArray[Any]], Sequence[Answer]]
Decode = Callable[[bytes], NDArray[Any]]
Gather = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]
# How many times as long as expected the wait may be, and the answer still in time. Without it the queue grows until
# half of what is admitted comes late: decoded, and perhaps run, for nothing.
MARGIN = 2.0


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
    stages: Stages
    waiting: int  # images without an answer
    due: bool  # whether its images wait for others no more
    late: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class _Image(Generic[Answer]):
    request: _Request[Answer]
    place: int
    since: float  # when it came
    content: Any  # its file, from when that is decoded its pixels, and once it runs nothing
    begun: float | None = None  # when its decoding began
    ready: float | None = None  # when it could run

    def before_run(self, until: float) -> list[Interval]:
        """Return what became of it until it ran, failed or was given up."""
        if self.begun is None:
            return [Interval("queue", self.since, until)]
        ready = until if self.ready is None else self.ready
        found = [Interval("queue", self.since, self.begun), Interval("decode", self.begun, ready)]
        return [*found, Interval("queue", ready, until)] if ready < until else found


class Batcher(Generic[Answer]):
    """Gathers images for a network.

    network: (N, ...) -> N answers, called in `workers` threads of the pool at a time. decode: an image's file -> its
    pixels, raises ImageError. gather: pixels of files, and images as the network takes them -> (N, ...). lone_network:
    called in the network's place where nothing else runs or waits in the pool, at most `lone_gain` times as fast.
    cores_a_call: of the pool's. max_batch: images a call. max_delay: seconds that the oldest image waits at most for
    others. max_queue: images that wait at most. observe: told of each batch, its images and seconds.
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
        self._gather, self._observe, self._lone_gain = gather, observe, lone_gain
        self._pool = pool
        # With the pool's lock held:
        self._files: deque[_Image[Answer]] = deque()
        self._ready: deque[_Image[Answer]] = deque()
        self._decoding = 0
        self.spent = 0.0
        self._running = 0  # batches
        self._running_images = 0
        self._closed = False
        # In the loop's thread:
        self._unanswered = 0  # requests
        self._idle: asyncio.Event | None = None
        self.done = Done()
        # Seconds of a worker: what an image adds to the wait of those behind it is this over `workers`.
        self.seconds_per_image = seconds_per_image

    @property
    def waiting(self) -> int:
        """Images in the queue."""
        return len(self._files) + len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._files or self._ready or self._decoding or self._running)

    def work(self, files: float = 0, images: float = 0) -> Work:
        """Return what is still to be done for what is in hand, and for so many more files and images to run."""
        # What runs is half done, as far as is known.
        files += len(self._files) + self._decoding
        images += len(self._files) + self._decoding + len(self._ready) + self._running_images / 2
        infer = self.seconds_per_image * images
        return Work(self._pool.decode_seconds * files, infer, cores_a_call=self.cores_a_call)

    def wait_for(self, images: int, *, decodes: bool = False) -> float:
        """Return the seconds after which so many further images would be answered, as far as is known.

        Threads, cores, those that may decode and those that may call this network: the scarcest sets the pace.
        """
        pool = self._pool
        with pool.lock:
            mine = self.work(images if decodes else 0, images)
            others = [one.work() for one in pool.sources if one is not self]
            a_free_one = self._running < self.workers  # waits for nobody
            calls = mine.infer - (self.seconds_per_image * self._running_images / 2 if a_free_one else 0)
        # Until mine is done, each other model gets as much of the time as this one, or less.
        return max(
            calls / self.workers,
            sum(min(work.decode, mine.decode) for work in (mine, *others)) / pool.decode_threads,
            sum(min(work.threads, mine.threads) for work in (mine, *others)) / pool.threads,
            sum(min(work.cores, mine.cores) for work in (mine, *others)) / pool.cores,
        )

    async def submit(
        self,
        images: Sequence[bytes] | Sequence[NDArray[Any]],
        *,
        deadline: float = math.inf,
        stages: Stages | None = None,
    ) -> list[Answer | ImageError]:
        """Return the answer to each image, or why its file has none, before `deadline`, of `time.monotonic`.

        images: files, or arrays as the network takes them. stages: told where the time went, also where it raises.
        Raises RefusedError where the queue is full, the deadline cannot be met, or has passed before the answers were
        there; and what decoding or the network raise. Where nothing waits or runs they are tried: what a network takes
        is learnt in no other way.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        stages = Stages() if stages is None else stages
        decodes = isinstance(images[0], bytes)
        self._admit(len(images), deadline, now, decodes=decodes)
        request = _Request[Answer](
            answers=[None] * len(images),
            future=loop.create_future(),
            deadline=deadline,
            stages=stages,
            waiting=len(images),
            due=not self.max_delay,
        )
        entries = [
            _Image(request, place, now, image, ready=None if decodes else now) for place, image in enumerate(images)
        ]
        timers = [] if deadline == math.inf else [loop.call_later(deadline - now, _expire, request)]
        if self.max_delay:
            timers.append(loop.call_later(self.max_delay, self._is_due, request))
        self._unanswered += 1
        try:
            with self._pool.lock:
                self._pool.enter(self)
                (self._files if decodes else self._ready).extend(entries)
                self._pool.wake(len(images))
            await request.future
        finally:
            for timer in timers:
                timer.cancel()
            self._leave(request, entries)
        # Not by the future: an error that a task keeps holds, by its traceback, this frame, the body and the pixels.
        if request.late:
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        error, request.error = request.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
        done = self.done
        done.requests += 1
        done.request_seconds += time.monotonic() - now
        done.queue_seconds += stages.seconds.get("queue", 0.0)
        done.infer_seconds += stages.seconds.get("infer", 0.0)
        answers = [answer for answer in request.answers if answer is not None]
        assert len(answers) == len(images)
        return answers

    async def close(self) -> None:
        """Answer what waits, and take nothing more."""
        with self._pool.lock:
            self._closed = True
            if self._unanswered:
                self._pool.wake()
        if self._unanswered:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def _admit(self, images: int, deadline: float, now: float, *, decodes: bool) -> None:
        """Raise RefusedError where so many images cannot be answered in time, before anything is spent on them."""
        if self._closed:
            raise RefusedError("this model is being unloaded", retry_after=1.0, kind="queue")
        if self.waiting and self.waiting + images > self.max_queue:
            raise RefusedError("Exceeds maximum queue size", retry_after=self.wait_for(0), kind="queue")
        if now > deadline:
            raise RefusedError("its deadline has passed", retry_after=self.wait_for(0), kind="deadline")
        if deadline == math.inf or not self._pool.sources:
            return
        ahead = self.wait_for(images, decodes=decodes)
        needed = MARGIN * ahead + self.seconds_per_image
        if now + needed > deadline:
            raise RefusedError(
                f"cannot be answered in time: up to {needed:.2f} s are needed", retry_after=ahead, kind="deadline"
            )

    def _leave(self, request: _Request[Answer], entries: Sequence[_Image[Answer]]) -> None:
        """End a request, answered or not."""
        self._unanswered -= 1
        with self._pool.lock:
            if request.waiting:  # late, failed, or its caller is gone: what has not run yet need not
                self._files = deque(image for image in self._files if image.request is not request)
                self._ready = deque(image for image in self._ready if image.request is not request)
            if not self._unanswered:
                self._pool.sources.remove(self)
        if request.waiting:
            self.done.failed += 1
            until = time.monotonic()
            for entry in entries:
                if request.answers[entry.place] is None:
                    request.stages.image(entry.before_run(until))
        if self._idle is not None and not self._unanswered:
            self._idle.set()

    def _is_due(self, request: _Request[Answer]) -> None:
        with self._pool.lock:
            request.due = True
            self._pool.wake()

    # In the pool's threads

    def next_job(self, now: float) -> Job | None:
        """Take a batch where one is due, else a file to decode."""
        pool = self._pool
        may_decode = bool(self._files) and pool.may_decode
        if may_decode:  # beyond what the next batches take, files wait as they are: pixels are larger
            decoded = sum(image.begun is not None for image in self._ready)
            may_decode = decoded < (self.workers + 1) * self.max_batch
        # Tensors that come later do not pass files by.
        decodes_first = may_decode and bool(self._ready) and self._files[0].since < self._ready[0].since
        if self._ready and not decodes_first and self._running < self.workers:
            ready, since = len(self._ready), self._ready[0].ready
            assert since is not None
            # What is in hand is shared out to the calls that are free: one of all of it would leave the others idle.
            in_hand = ready + len(self._files) + self._decoding
            share = min(self.max_batch, math.ceil(in_hand / (self.workers - self._running)))
            # Nobody waits longer for others to be decoded than those that are there take to run.
            gathers = may_decode and ready < share and now - since < self.seconds_per_image * ready
            due = self._closed or any(image.request.due for image in self._ready)
            if ready >= self.max_batch or (due and not gathers):
                batch = [self._ready.popleft() for _ in range(min(ready, share if due else self.max_batch))]
                lone = self.lone_network is not None and not any(one.busy for one in pool.sources)
                self._running += 1
                self._running_images += len(batch)
                return functools.partial(self._run_batch, batch, lone)
        if may_decode:
            self._decoding += 1
            pool.begin_decode()
            return functools.partial(self._decode_file, self._files.popleft())
        return None

    def _decode_file(self, image: _Image[Answer]) -> None:
        request, file, image.content = image.request, image.content, None
        failed: Exception | None = None
        begun = image.begun = time.monotonic()
        try:
            if begun <= request.deadline:
                image.content = self.decode(file)
        except ImageError as error:
            failed = error.with_traceback(None)
        except Exception as error:
            failed = error
        finally:
            ended = image.ready = time.monotonic()
            with self._pool.lock:
                self._decoding -= 1
                self.spent += ended - begun
                self._pool.end_decode(None if image.content is None else ended - begun)
                if image.content is not None and not request.future.done():
                    self._ready.append(image)
        if failed is not None:
            _tell(request, self._answer, image, failed, image.before_run(ended))
        del failed, file, image, request  # an error holds this frame

    def _run_batch(self, batch: list[_Image[Answer]], lone: bool) -> None:
        network = self.network if self.lone_network is None or not lone else self.lone_network
        pixels: list[NDArray[Any]] = [image.content for image in batch]
        for image in batch:
            image.content = None  # a request of many images is in hand until the last one has run
        start = time.monotonic()
        try:
            rows: Sequence[Answer | Exception] | None = self._together(network, pixels) if len(pixels) > 1 else None
            if rows is None:  # the neighbours of one that fails are to be answered
                rows = [self._alone(network, one) for one in pixels]
        finally:
            seconds = time.monotonic() - start
            with self._pool.lock:
                self._running -= 1
                self._running_images -= len(batch)
                self.spent += seconds
        _tell(batch[0].request, self._finish, batch, lone, start, seconds, rows)
        del rows, pixels, batch, image  # errors hold this frame

    def _together(self, network: Network[Answer], pixels: Sequence[NDArray[Any]]) -> Sequence[Answer] | None:
        try:
            rows = network(self._gather(pixels))
            return rows if len(rows) == len(pixels) else None
        except Exception:
            return None

    def _alone(self, network: Network[Answer], pixels: NDArray[Any]) -> Answer | Exception:
        try:
            return network(self._gather([pixels]))[0]
        except Exception as error:
            return error

    # In the loop's thread

    def _finish(
        self,
        batch: list[_Image[Answer]],
        lone: bool,
        start: float,
        seconds: float,
        rows: Sequence[Answer | Exception],
    ) -> None:
        known, taken = self.seconds_per_image, seconds / len(batch)
        if lone:  # one that shares the cores takes as long at least, and `lone_gain` times that at most
            taken = min(max(known, taken), taken * self._lone_gain)
        if not any(isinstance(row, Exception) for row in rows):
            self.seconds_per_image = learn(known, taken)
        self._observe(len(batch), seconds)
        did = self.done
        did.last, did.images, did.batches = time.time(), did.images + len(batch), did.batches + 1
        count, total = did.by_size.get(len(batch), (0, 0.0))
        did.by_size[len(batch)] = (count + 1, total + seconds)
        for image, row in zip(batch, rows, strict=True):
            image.request.stages.batch = max(image.request.stages.batch, len(batch))
            self._answer(image, row, [*image.before_run(start), Interval("infer", start, start + seconds)])

    def _answer(self, image: _Image[Answer], answer: Answer | Exception, intervals: list[Interval]) -> None:
        request = image.request
        if request.future.done():
            return
        if isinstance(answer, Exception) and not isinstance(answer, ImageError):
            request.error = answer
            request.future.set_result(None)
            return
        request.stages.image(intervals)
        request.answers[image.place] = answer
        request.waiting -= 1
        if not request.waiting:
            request.future.set_result(None)


def _tell(request: _Request[Any], callback: Callable[..., None], *words: Any) -> None:
    """Call back in the loop's thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever asked
        request.future.get_loop().call_soon_threadsafe(callback, *words)


def _expire(request: _Request[Any]) -> None:
    if not request.future.done():
        request.late = True
        request.future.set_result(None)
