"""The threads of a server: each decodes images or calls a network, whichever brings the oldest image nearer its answer.

One set of threads for both and for all models, and no more of them than cores: what is shared out by hand between
threads that decode and threads that call leaves some idle while others have too much.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

# Of the threads, by thread as Linux has it: where they take the loop's turns, requests wait unread. ONNX Runtime's own
# threads stay as they are.
NICENESS = 5
# How much the last one weighs in what an image is thought to take, and how many times as long it may seem.
WEIGHT = 0.1
MOST = 4.0
Job = Callable[[], None]


class Source(Protocol):
    """Where jobs come from. Its methods are called with the pool's lock held."""

    @property
    def oldest(self) -> float:
        """When its oldest image came, of `time.monotonic`; infinity where there is none."""

    def next_job(self, now: float) -> Job | None:
        """Take a job that can begin now."""


class Pool:
    """Threads that decode and call networks.

    threads: as many as there are. decode_threads: of them, those that may decode at a time. cores: what they share.
    """

    def __init__(self, threads: int, *, decode_threads: int, cores: int, cpus: Sequence[int] = ()) -> None:
        self.threads, self.decode_threads, self.cores = threads, decode_threads, cores
        self._cpus = tuple(cpus)
        self.lock = threading.Lock()
        self.decoding = 0  # images, now
        self.decode_seconds = 0.0  # an image
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="image", initializer=_step_back)
        self._places = itertools.count()
        self._place = threading.local()
        self._sources: list[Source] = []
        self._active = 0  # threads that look for jobs or do one
        self._void = 0  # calls of `_work` that wait for a thread though nobody counts on them

    def add(self, source: Source) -> None:
        """Let the threads look for jobs there."""
        with self.lock:
            self._sources.append(source)

    def remove(self, source: Source) -> None:
        """Look there no more."""
        with self.lock:
            self._sources.remove(source)

    def others(self, source: Source) -> Iterable[Source]:
        """The sources beside this one."""
        return (one for one in self._sources if one is not source)

    def wake(self, jobs: int = 1) -> None:
        """Set threads to work where some are idle: there may be so many jobs. Raises RuntimeError: none can start."""
        with self.lock:
            for _ in range(min(jobs, self.threads - self._active)):
                self._start()

    def learn_decode(self, seconds: float) -> None:
        """Note what decoding an image took."""
        self.decode_seconds = learn(self.decode_seconds, seconds)

    def close(self) -> None:
        """End the threads, once each has done what it does."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        self._active += 1
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # no thread can be started now; the call stays with the executor
            self._active -= 1
            self._void += 1
            if not self._active:
                raise

    def _work(self) -> None:
        """Do one job after the other until there is none."""
        with self.lock:
            if self._void:
                self._void -= 1
                return
        while True:
            with self.lock:
                job = self._next()
                if job is None:
                    self._active -= 1
                    return
                all_busy = self._active == self.threads
                if not all_busy and any(one.oldest < math.inf for one in self._sources):
                    self._start()
            if self._cpus:
                self._stay(all_busy)
            job()

    def _stay(self, on_one: bool) -> None:
        """Keep the calling thread on a CPU of its own, or let it go anywhere."""
        place = self._place
        if getattr(place, "on_one", False) == on_one:
            return
        if not hasattr(place, "number"):
            place.number = next(self._places)
        place.on_one = on_one
        with contextlib.suppress(OSError):  # a CPU may have been taken away
            os.sched_setaffinity(0, {self._cpus[place.number]} if on_one else self._cpus)

    def _next(self) -> Job | None:
        now = time.monotonic()
        sources = self._sources if len(self._sources) == 1 else sorted(self._sources, key=lambda one: one.oldest)
        return next((job for source in sources if (job := source.next_job(now)) is not None), None)


def learn(expected: float, seconds: float) -> float:
    """Return what an image is thought to take after one took so many seconds; a stall does not count for much."""
    return expected + WEIGHT * (min(seconds, MOST * expected) - expected) if expected else seconds


def _step_back() -> None:
    """Let the loop's thread go before the calling one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden here: the pool would be broken for good
            os.nice(NICENESS)
