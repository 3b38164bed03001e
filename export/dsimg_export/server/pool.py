"""The threads of a server: each decodes images or calls a network, whichever is to be done now.

One set of threads for both and for all models: shared out by hand, some decode and others call, and cores stay idle.
Models that are asked at the same time get as much of the threads' time, whatever waits for each.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

# Of the threads, by thread as Linux has it: where they take the loop's turns, requests wait unread. ONNX Runtime's own
# threads stay as they are.
NICENESS = 5
# How much the last measurement weighs in what an image is thought to take, and how many times as long it may seem.
WEIGHT = 0.1
MOST = 4.0
Job = Callable[[], None]


class Source(Protocol):
    """Where jobs come from. All is asked with the pool's lock held."""

    spent: float  # seconds that threads have given it, from where the others were when it came back

    @property
    def waiting(self) -> int:
        """Images that wait."""

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""

    def work(self) -> "Work":
        """Return what is still to be done for all that is in hand."""

    def next_job(self, now: float) -> Job | None:
        """Take a job that can begin now."""


class Work:
    """Seconds of threads: of those that decode, and of those that call, each on so many cores."""

    def __init__(self, decode: float, infer: float, *, cores_a_call: int) -> None:
        self.decode, self.infer = decode, infer
        self.threads = decode + infer
        self.cores = decode + cores_a_call * infer


class Pool:
    """Threads that decode and call networks.

    threads: at most; they are started when they are needed. decode_threads: of them, those that may decode at a time.
    cores: those that the process may use. cpus: one for each thread, which keeps to it while all are busy; none: they
    go where they like.
    """

    def __init__(self, threads: int, *, decode_threads: int, cores: int, cpus: Sequence[int] = ()) -> None:
        assert 0 < decode_threads <= threads, (decode_threads, threads)
        assert len(cpus) in (0, threads), (cpus, threads)
        self.threads, self.decode_threads, self.cores = threads, decode_threads, cores
        self.lock = threading.Condition(threading.Lock())
        self.sources: list[Source] = []  # those that have anything in hand
        self.decode_seconds = 0.0  # an image
        self._cpus = tuple(cpus)
        self._decoding = 0  # images
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        self._workers: dict[int, threading.Thread] = {}  # by the place of each, from 0
        self._idle = 0  # threads
        self._closed = False

    @property
    def pinned(self) -> bool:
        """Whether each thread keeps to a core while all are busy."""
        return bool(self._cpus)

    def enter(self, source: Source) -> None:
        """Look for jobs there: something is in hand now. With the lock held."""
        if source not in self.sources:
            source.spent = max(source.spent, min((one.spent for one in self.sources), default=source.spent))
            self.sources.append(source)

    @property
    def may_decode(self) -> bool:
        """Whether one more thread may decode. With the lock held."""
        return self._decoding < self.decode_threads

    def begin_decode(self) -> None:
        """Note that a thread decodes. With the lock held."""
        self._decoding += 1

    def end_decode(self, seconds: float | None) -> None:
        """Note that it has done so; seconds: what a good image took. With the lock held."""
        self._decoding -= 1
        if seconds is not None:
            self.decode_seconds = learn(self.decode_seconds, seconds)

    def wake(self, jobs: int = 1) -> None:
        """Set threads to work, for there may be so many jobs. With the lock held.

        Raises RuntimeError where no thread can be started and none is there.
        """
        self.lock.notify(jobs)
        free = [place for place in range(self.threads) if place not in self._workers]
        for place in free[: max(0, jobs - self._idle)]:
            self._start(place)

    def close(self) -> None:
        """End the threads, once each has done what it does."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.join()

    def _start(self, place: int) -> None:
        # A daemon: what it does when the process ends, nobody waits for.
        worker = threading.Thread(target=self._work, args=(place,), name=f"image-{place}", daemon=True)
        self._workers[place] = worker
        try:
            worker.start()
        except RuntimeError:  # the system has no thread left
            del self._workers[place]
            if not self._workers:
                raise

    def _work(self, place: int) -> None:
        """Do one job after the other, until the end."""
        self._step_back()
        on_one = False
        try:
            while True:
                with self.lock:
                    while (job := self._next()) is None:
                        if self._closed:
                            return
                        self._idle += 1
                        self.lock.wait()
                        self._idle -= 1
                    all_busy = not self._idle and len(self._workers) == self.threads
                    if not all_busy and any(one.waiting for one in self.sources):
                        self.wake()
                if self._cpus and on_one != all_busy:
                    on_one = all_busy
                    self._keep_to([self._cpus[place]] if on_one else self._cpus)
                job()
                del job
        finally:
            with self.lock:
                del self._workers[place]

    def _next(self) -> Job | None:
        now = time.monotonic()
        sources = sorted(self.sources, key=lambda one: one.spent)
        return next((job for source in sources if (job := source.next_job(now)) is not None), None)

    def _step_back(self) -> None:
        """Let the loop's thread go before the calling one."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # forbidden here
                os.setpriority(os.PRIO_PROCESS, 0, self._niceness)  # not nice(), which adds to what a thread inherits

    @staticmethod
    def _keep_to(cpus: Sequence[int]) -> None:
        """Let the calling thread run on these alone."""
        with contextlib.suppress(OSError):  # one may have been taken away
            os.sched_setaffinity(0, cpus)


def learn(expected: float, seconds: float) -> float:
    """Return what an image is thought to take after one took so many seconds; a stall does not count for much."""
    return expected + WEIGHT * (min(seconds, MOST * expected) - expected) if expected else seconds
