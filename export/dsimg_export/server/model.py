"""A run that is being served: verified, warmed up, and the way from an image file's bytes to its logits."""

import asyncio
import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsimg.errors import ImageError
from dsimg.preprocess import decode_file, normalise, resize_and_crop
from dsimg.run import Run, sha256
from dsimg.runtime import Provider
from dsimg.show import ancestry
from dsimg_export.golden import read_golden
from dsimg_export.served import Served, depends_on_batch, open_served
from dsimg_export.server.batcher import Batcher, Network, Timing, learn, step_back
from dsimg_export.server.errors import RefusedError
from dsimg_export.session import INPUT, OUTPUT, noise_for, takes_pixels


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a network is run, and what may wait for it."""

    workers: int  # calls of the session at a time
    threads: int  # of the session, a call
    lone_threads: int | None = None  # of a call beside which nothing runs or waits; None: it has no session of its own
    max_batch: int  # images a call
    max_delay: float  # seconds that an image waits at most for others
    max_queue: int  # images that wait at most
    provider: Provider = "cpu"


@dataclass(frozen=True, kw_only=True)
class Input:
    """An image as a network takes it, and what its file was."""

    pixels: NDArray[Any]
    format: str  # as in `dsimg.preprocess.Decoded`
    mode: str
    rotated: bool


class Decoder:
    """Threads that turn image files' bytes into pixels, for all models of a server."""

    def __init__(self, threads: int, *, max_pixels: int) -> None:
        self.threads = threads
        self._max_pixels = max_pixels
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=step_back)
        self.waiting = 0  # images, those that are being decoded included
        self.seconds_per_image = 0.0

    def wait_for(self, images: int) -> float:
        """Return the seconds after which so many further images would be decoded, as far as is known."""
        return self.seconds_per_image * (1 + (self.waiting + images - 1) / self.threads)

    async def decode(self, files: Sequence[bytes], model: "Model", *, deadline: float) -> list[Input | ImageError]:
        """Return the network's input for each file, or why it has none. Raises RefusedError past the deadline."""

        def work(data: bytes) -> tuple[Input | ImageError, float]:
            start = time.monotonic()
            if start > deadline:
                raise self._late()
            image: Input | ImageError
            try:
                image = model.input_of(data, max_pixels=self._max_pixels)
            except ImageError as error:
                image = error
            return image, time.monotonic() - start

        jobs: list[concurrent.futures.Future[tuple[Input | ImageError, float]]] = []
        futures: list[asyncio.Future[tuple[Input | ImageError, float]]] = []
        try:
            for data in files:
                jobs.append(self._pool.submit(work, data))
                futures.append(asyncio.wrap_future(jobs[-1]))
                futures[-1].add_done_callback(self._ended)
                self.waiting += 1  # after `submit`, which raises where no thread can be started
        except RuntimeError:
            for job in jobs:
                job.cancel()
            raise
        try:
            left = None if deadline == math.inf else deadline - time.monotonic()
            _, late = await asyncio.wait(futures, timeout=left)
        finally:
            for job in jobs:  # one that has begun runs to its end, and is counted until then
                job.cancel()
        if late:
            raise self._late()
        try:
            return [future.result()[0] for future in futures]
        finally:
            futures.clear()  # their errors hold this frame
            jobs.clear()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, future: "asyncio.Future[tuple[Any, float]]") -> None:
        self.waiting -= 1
        if not future.cancelled() and future.exception() is None:
            self.seconds_per_image = learn(self.seconds_per_image, future.result()[1])

    def _late(self) -> RefusedError:
        return RefusedError("its deadline has passed", kind="deadline", retry_after=self.wait_for(0))


class Model:
    """A run in a server, under a name. Made by `load`."""

    def __init__(
        self,
        name: str,
        served: Served,
        plan: Plan,
        *,
        lone: Served | None = None,
        observe: Callable[[int, float], None],
    ) -> None:
        self.name, self.served, self.plan = name, served, plan
        self.version = sha256(served.run.path / "run.json")[:12]
        self.takes_pixels = takes_pixels(served.session)
        self.card = _card(served, name=name, version=self.version, provider=plan.provider)
        self._users = 0  # requests that have this model in hand
        self._unused = asyncio.Event()
        self.batcher = Batcher(
            _network(served),
            lone_network=None if lone is None else _network(lone),
            lone_gain=max(plan.workers, (plan.lone_threads or plan.threads) / plan.threads),
            max_batch=1 if depends_on_batch(served.session) else plan.max_batch,
            max_delay=plan.max_delay,
            max_queue=plan.max_queue,
            workers=plan.workers,
            observe=observe,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.served.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one image as the network takes it: (3, H, W) normalised, or (H, W, 3) of pixels."""
        channels, height, width = self.served.preprocess.input_size
        return (height, width, channels) if self.takes_pixels else (channels, height, width)

    def input_of(self, data: bytes, *, max_pixels: int) -> Input:
        """Return an image file as the network takes it, by the steps of evaluation. Raises ImageError."""
        decoded = decode_file(data, max_pixels=max_pixels)
        pixels = resize_and_crop(decoded.image, self.served.preprocess)
        return Input(
            pixels=pixels if self.takes_pixels else normalise(pixels[None], self.served.preprocess)[0],
            format=decoded.format,
            mode=decoded.mode,
            rotated=decoded.rotated,
        )

    def warm_up(self) -> None:
        """Run every size of batch once, and learn what an image takes: the first runs allocate."""
        seconds = 0.0
        lone, network = self.batcher.lone_network, self.batcher.network
        for size in range(1, self.batcher.max_batch + 1):
            noise = noise_for(self.served.session, size, self.served.preprocess.input_size)
            if lone is not None:
                lone(noise)
            start = time.monotonic()
            network(noise)
            seconds = (time.monotonic() - start) / size
        self.batcher.seconds_per_image = seconds

    def decode_seconds(self) -> float:
        """Return what decoding a golden image takes here."""
        images = read_golden(self.served.run.file("golden")).encoded
        start = time.monotonic()
        for data in images:
            self.input_of(data, max_pixels=2**31)
        return (time.monotonic() - start) / len(images)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model from being retired: from a request's choice of it to the answer."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def retire(self) -> None:
        """End the model, once everybody who has it in hand is answered; nobody new is given it any more."""
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        await self.batcher.close()

    def statistics(self) -> dict[str, Any]:
        """Return what has been done since it was loaded, as Triton's statistics extension has it."""
        done = self.batcher.done
        nothing = {"count": 0, "ns": 0}
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round(1000 * done.last),
            "inference_count": done.images,
            "execution_count": done.batches,
            "inference_stats": {
                "success": {"count": done.requests, "ns": round(1e9 * done.request_seconds)},
                "fail": {"count": done.failed, "ns": 0},
                "queue": {"count": done.requests, "ns": round(1e9 * done.queue_seconds)},
                "compute_input": nothing,
                "compute_infer": {"count": done.requests, "ns": round(1e9 * done.infer_seconds)},
                "compute_output": nothing,
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": nothing,
                    "compute_infer": {"count": count, "ns": round(1e9 * seconds)},
                    "compute_output": nothing,
                }
                for size, (count, seconds) in sorted(done.by_size.items())
            ],
            "memory_usage": [],
            "response_stats": {},  # of models that answer a request several times
        }

    async def logits(self, images: Sequence[NDArray[Any]], *, deadline: float) -> tuple[NDArray[np.float32], Timing]:
        """Return the logits (N, C) of N images as the network takes them. Raises RefusedError."""
        return await self.batcher.submit(images, deadline=deadline)


def load(path: Path, name: str, plan: Plan, *, observe: Callable[[int, float], None]) -> Model:
    """Open a run and warm it up. Raises DsimgError as `open_served`."""
    run = Run.open(path)
    served = open_served(run, threads=plan.threads, provider=plan.provider)
    lone = plan.lone_threads
    model = Model(
        name,
        served,
        plan,
        lone=None if lone is None else open_served(run, threads=lone, provider=plan.provider),
        observe=observe,
    )
    model.warm_up()
    return model


def _network(served: Served) -> Network:
    def run(images: NDArray[Any]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = served.session.run([OUTPUT], {INPUT: images})[0]
        return logits

    return run


def _card(served: Served, *, name: str, version: str, provider: Provider) -> dict[str, Any]:
    """Return what a model says of itself: name, version, classes, and the steps that it was made by."""
    steps = [step.as_dict() for step in ancestry(served.run)]
    for step in steps:  # where things lie on this host is nobody's business
        step["path"] = Path(step["path"]).name
        step["begun_from"] = None if step["begun_from"] is None else Path(step["begun_from"]).name
        step.pop("parents")
        if step["data"]:
            step["data"] = {**step["data"], "folder": Path(str(step["data"].get("folder", ""))).name}
    return {
        "name": name,
        "version": version,
        "classes": list(served.classes),
        "preprocess": served.preprocess.as_dict(),
        "file": served.role,
        "provider": provider,
        "steps": steps,
    }
