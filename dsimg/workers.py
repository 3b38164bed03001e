"""Processes, or a thread, that prepare batches ahead of their use."""

import atexit
import math
import os
import queue
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dsimg.cache import gigabytes
from dsimg.errors import DeviceError, DsimgError
from dsimg.machine import all_cores

_SAME_EVENT_S = 2.0
_IN_FLIGHT = 2  # batches that each worker, or the thread, prepares ahead


class Keys:
    """The batches that the workers are to make next; set before each pass over the loader."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class Pool:
    """Processes that make `job[key]` for each of `keys`; they end with the pass or, where `lasting`, with `close`.

    `batch_bytes`: the largest item in shared memory. A DsimgError that the job returns is raised here. Raises
    DeviceError when there is too little shared memory, and when a process was killed.
    """

    def __init__(
        self, job: Any, keys: Iterable[Any], *, workers: int, batch_bytes: int, pin: bool, lasting: bool
    ) -> None:
        _check_shared_memory(workers, batch_bytes)
        self._lasting = lasting
        self._iterator: Any = None
        self._loader: DataLoader[Any] = DataLoader(
            job,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
            prefetch_factor=_IN_FLIGHT,
            persistent_workers=lasting,
            pin_memory=pin,
            # Without one of its own the loader draws from torch's global generator, which is the training's.
            generator=torch.Generator(),
        )
        _pools.add(self)

    def __iter__(self) -> Generator[Any]:
        try:
            self._iterator = iter(self._loader)
            for item in self._iterator:
                if isinstance(item, DsimgError):
                    raise item
                yield item
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.close()
            raise DeviceError(
                f"A process that decodes images was killed ({str(error).rstrip('. ')}). Memory ran out, most likely: "
                "use fewer workers, or a smaller micro-batch."
            ) from None
        finally:
            if not self._lasting:
                self.close()

    def close(self) -> None:
        """End the processes."""
        if self._iterator is not None:
            # What deleting it does; but a traceback can hold a reference until after Python waits for its children.
            self._iterator._shutdown_workers()
            self._iterator = None


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


def _as_it_is(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    """Leave stopping to the main process, which the same signals reach: it must finish its step first.

    Ctrl-C and a launcher's SIGTERM go to whole process groups or trees, a SIGTERM often twice at once. One that comes
    later ends a worker.
    """
    first = math.inf

    def end_if_again(*_: object) -> None:
        nonlocal first
        now = time.monotonic()
        if now > first + _SAME_EVENT_S:
            os._exit(128 + signal.SIGTERM)
        first = min(first, now)

    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_if_again)


def _check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Raise DeviceError where workers could not hand over their batches: they would die of SIGBUS."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    need, free = (workers * _IN_FLIGHT + 1) * batch_bytes, shutil.disk_usage(folder).free
    if need > free:
        raise DeviceError(
            f"{workers} workers need {gigabytes(need)} of shared memory, /dev/shm has {gigabytes(free)}. "
            "Start the container with a larger --shm-size, or use fewer workers."
        )


def prefetched(items: Iterator[Any]) -> Generator[Any]:
    """Yield `items`, made in a thread a few ahead; an exception there is raised here."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(_IN_FLIGHT)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                ready.put((True, item))
                if stopped.is_set():
                    return
            ready.put((False, None))
        except BaseException as error:
            ready.put((False, error))

    thread = threading.Thread(target=work, name="dsimg-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            good, item = ready.get()
            if good:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        stopped.set()
        while thread.is_alive():
            try:  # room for what it may be waiting to put
                ready.get(timeout=0.01)
            except queue.Empty:
                continue
        thread.join()


def decoding_workers(local_ranks: int) -> int:
    """Return how many workers decode for a rank: its share of the cores of this machine, at most 8."""
    return max(1, min(8, all_cores() // local_ranks))
