"""A run that is being served: verified, warmed up, and the way from an image file's bytes to its logits."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsimg.machine import all_cores
from dsimg.metrics import TOP, best_classes
from dsimg.preprocess import MAX_PIXELS, Decoded, decode_file, normalise, resize_and_crop
from dsimg.run import Run, sha256
from dsimg.runtime import Provider
from dsimg.show import ancestry
from dsimg_export.golden import read_golden
from dsimg_export.served import Served, depends_on_batch, open_served
from dsimg_export.server.batcher import Batcher, Network
from dsimg_export.server.pool import Pool
from dsimg_export.session import INPUT, OUTPUT, takes_pixels


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


@dataclass(frozen=True, eq=False)
class Answer:
    """What a network says of an image. top: its best classes with their probabilities; None: a logit is not finite."""

    logits: NDArray[np.float32]  # (C,)
    top: list[tuple[int, float]] | None

    def best(self, k: int) -> list[tuple[int, float]] | None:
        """Return the best k classes with their probabilities, best first; None where a logit is not finite."""
        if self.top is None or k <= len(self.top):
            return self.top and self.top[:k]
        return best_classes(self.logits[None], k)[0]


def open_pool(plan: Plan, decode_threads: int, *, pin: bool = True) -> Pool:
    """Return threads for models that run by a plan: on a CPU they share the cores, and a call on a GPU takes none.

    decode_threads: of them, those that may decode at a time. pin: whether each may keep to a core, where there are as
    many threads as cores.
    """
    beside = 0 if plan.provider == "cpu" else plan.workers
    threads = max(decode_threads + beside, plan.workers)
    cpus = sorted(os.sched_getaffinity(0)) if pin else []
    return Pool(threads, decode_threads=decode_threads, cores=all_cores(), cpus=cpus if len(cpus) == threads else ())


class Model:
    """A run in a server, under a name. Made by `load`."""

    def __init__(
        self,
        name: str,
        served: Served,
        plan: Plan,
        pool: Pool,
        *,
        max_pixels: int,
        lone: Served | None = None,
        decoded: Callable[[Decoded], None],
        observe: Callable[[int, float], None],
    ) -> None:
        self.name, self.served, self.plan = name, served, plan
        self._max_pixels, self._decoded = max_pixels, decoded
        self.version = sha256(served.run.path / "run.json")[:12]
        self.takes_pixels = takes_pixels(served.session)
        self.card = _card(served, name=name, version=self.version, provider=plan.provider)
        self._users = 0  # requests that have this model in hand
        self._unused = asyncio.Event()
        self.batcher: Batcher[Answer] = Batcher(
            _network(served),
            pool,
            decode=self._decode,
            gather=self._gather,
            cores_a_call=plan.threads if plan.provider == "cpu" else 0,
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

    def _decode(self, data: bytes) -> NDArray[np.uint8]:
        decoded = decode_file(data, max_pixels=self._max_pixels)
        pixels = resize_and_crop(decoded.image, self.served.preprocess)
        self._decoded(decoded)
        return pixels

    def _gather(self, images: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return pixels (H, W, 3) of files, and images as the network takes them, as it takes a batch."""
        if self.takes_pixels or not any(image.dtype == np.uint8 for image in images):
            return np.stack(images)
        if all(image.dtype == np.uint8 for image in images):
            return normalise(np.stack(images), self.served.preprocess)
        return np.concatenate([self._gather([image]) for image in images])

    def warm_up(self) -> None:
        """Run every size of batch once, and learn what an image takes: the first runs allocate."""
        lone, network, most = self.batcher.lone_network, self.batcher.network, self.batcher.max_batch
        _, height, width = self.served.preprocess.input_size
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        for size in range(1, most + 1):
            if lone is not None:
                lone(self._gather([noise] * size))
            network(self._gather([noise] * size))
        start = time.monotonic()
        network(self._gather([noise] * most))
        self.batcher.seconds_per_image = (time.monotonic() - start) / most

    def decode_seconds(self) -> float:
        """Return what decoding a golden image takes here."""
        images = read_golden(self.served.run.file("golden")).encoded
        start = time.monotonic()
        for data in images:
            resize_and_crop(decode_file(data).image, self.served.preprocess)
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


def load(
    path: Path,
    name: str,
    plan: Plan,
    pool: Pool,
    *,
    max_pixels: int = MAX_PIXELS,
    decoded: Callable[[Decoded], None] = lambda decoded: None,
    observe: Callable[[int, float], None] = lambda images, seconds: None,
) -> Model:
    """Open a run and warm it up; the pool's threads run it.

    max_pixels: an image at most. decoded: told of each image that could be read. observe: told of each batch, its
    images and seconds. Raises DsimgError as `open_served`.
    """
    run = Run.open(path)
    served = open_served(run, threads=plan.threads, provider=plan.provider)
    lone = plan.lone_threads
    model = Model(
        name,
        served,
        plan,
        pool,
        max_pixels=max_pixels,
        decoded=decoded,
        lone=None if lone is None else open_served(run, threads=lone, provider=plan.provider),
        observe=observe,
    )
    model.warm_up()
    return model


def _network(served: Served) -> Network[Answer]:
    def run(images: NDArray[Any]) -> list[Answer]:
        logits: NDArray[np.float32] = served.session.run([OUTPUT], {INPUT: images})[0]
        # For the whole batch here: in the loop's thread each image would cost all others the time.
        return [Answer(row, top) for row, top in zip(logits, best_classes(logits, TOP), strict=True)]

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
