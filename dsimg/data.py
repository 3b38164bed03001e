"""From a split's files to batches: cached, augmented, sharded. Training batches are augmented uint8."""

import itertools
import math
import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dsimg.augment import REPLACE, Augmentation, uniform
from dsimg.errors import DataError, DsimgError, ImageError
from dsimg.folder import Split
from dsimg.pixels import Pixels, decode_rgb, resize
from dsimg.preprocess import Preprocess, decode, read_pixels, resize_and_crop
from dsimg.steps import StepPlan, epoch_order
from dsimg.workers import Keys, Pool, prefetched

Bad = tuple[str, str]  # a file, relative to the split's folder, and why it cannot be used
_REPLACEMENTS = 100


# Training


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's micro-batch."""

    images: Tensor  # (N, 3, H, W) uint8, channels_last in memory
    labels: Tensor  # (N,) int64
    ids: NDArray[np.int64]  # (N,) sample ids
    weights: Tensor  # (N,) float32: the loss is sum(weights * losses), see StepPlan
    partner: NDArray[np.int64]  # (N,) for augment.mix
    boundary: bool  # the last micro-batch of its optimizer step


class TrainImages:
    """A split's images, decoded on demand or once into RAM, augmented as a function of (seed, epoch, id).

    With `ram` the images are decoded by `threads` when this is made, and `bad` is complete from then on. A
    file that cannot be decoded is replaced by another of its class, a function of (seed, id). Raises
    DataError when a class has no image left to take its place.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        augmentation: Augmentation,
        *,
        seed: int,
        ram: bool = False,
        threads: int = 1,
    ) -> None:
        self.split = split
        self.preprocess = preprocess
        self.augmentation = augmentation
        self.seed = seed
        self.bad: dict[str, str] = {}
        # One array of bytes: workers would copy a list of strings, page by page, as they count references.
        self._files = np.array([os.fsencode(file) for file in split.files])
        self._by_label = np.argsort(split.labels, kind="stable")
        self._label_starts = np.searchsorted(split.labels[self._by_label], np.arange(split.labels.max() + 2))
        self._kept: list[Pixels] | Pixels | None = None
        if ram:
            self._keep(threads)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def in_ram(self) -> bool:
        """Whether the images are kept decoded."""
        return self._kept is not None

    def file(self, index: int) -> str:
        """Return a sample's file, relative to the split's folder."""
        return os.fsdecode(self._files[index])

    def batch(self, ids: NDArray[np.int64], *, epoch: int) -> tuple[Tensor, list[Bad]]:
        """Return augmented images (N, 3, H, W) uint8, channels_last in memory, and the unusable files met."""
        height, width = self.augmentation.size
        bad: list[Bad] = []
        if self.augmentation.fixed_size:
            pixels = self._fixed(ids, epoch, bad)
        else:
            pixels = np.empty((len(ids), height, width, 3), np.uint8)
            draws = self.augmentation.box_draws(ids, seed=self.seed, epoch=epoch)
            # Cropped and resized one by one: a batch of large photographs would take gigabytes.
            for row, index in enumerate(ids.tolist()):
                image = self._good(index, bad)
                top, left, height, width = self.augmentation.box(image.shape[0], image.shape[1], draws[row])
                pixels[row] = resize(image[top : top + height, left : left + width], self.preprocess)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        images = self.augmentation.pixel_ops(images, ids, seed=self.seed, epoch=epoch)
        return images.contiguous(memory_format=torch.channels_last), bad

    def _fixed(self, ids: NDArray[np.int64], epoch: int, bad: list[Bad]) -> Pixels:
        """Return (N, H, W, 3) of images that are all of the model's size, shifted where that is wanted."""
        height, width = self.augmentation.size
        down, right = self.augmentation.padding
        if isinstance(self._kept, np.ndarray):
            images = self._kept[ids]
        else:
            images = np.stack([self._good(index, bad) for index in ids.tolist()])
        if not down and not right:
            return images
        padded = np.zeros((len(ids), height + 2 * down, width + 2 * right, 3), np.uint8)
        padded[:, down : down + height, right : right + width] = images
        offsets = self.augmentation.offsets(ids, seed=self.seed, epoch=epoch).tolist()
        for index, (top, left) in enumerate(offsets):
            images[index] = padded[index, top : top + height, left : left + width]
        return images

    def _pixels(self, index: int) -> Pixels:
        """Return a sample as it is before augmentation. Raises ImageError."""
        path = self.split.folder / self.file(index)
        if self.augmentation.name == "none":
            try:
                return resize_and_crop(decode(path.read_bytes()), self.preprocess)
            except OSError as error:
                raise ImageError(f"cannot be read: {error.strerror or error}") from None
        pixels = decode_rgb(path)
        if self.augmentation.fixed_size and pixels.shape[:2] != self.augmentation.size:
            return resize_and_crop(Image.fromarray(pixels), self.preprocess)
        return pixels

    def _good(self, index: int, bad: list[Bad]) -> Pixels:
        """Return a sample's pixels or those of its replacement; note in `bad` what was unusable."""
        if self._kept is not None:
            return self._kept[index]
        for candidate in self._candidates(index):
            try:
                return self._pixels(candidate)
            except ImageError as error:
                bad.append((self.file(candidate), str(error)))
        raise self._no_replacement(index)

    def _candidates(self, index: int) -> Iterator[int]:
        """Yield a sample, then samples of its class that may take its place, a function of (seed, id)."""
        yield index
        low, high = self._label_starts[self.split.labels[index] : self.split.labels[index] + 2]
        draws = uniform(np.array([index]), seed=self.seed, epoch=0, draws=_REPLACEMENTS, stream=REPLACE)[0]
        yield from self._by_label[low + (draws * (high - low)).astype(np.int64)].tolist()

    def _no_replacement(self, index: int) -> DataError:
        file = self.file(index)
        return DataError(
            f"{self.split.folder / file} cannot be decoded, nor can those of its class tried in its place. "
            f"Replace the files of {self.split.folder / Path(file).parent}, or remove that class."
        )

    def _keep(self, threads: int) -> None:
        count = len(self)
        reasons: dict[int, str] = {}
        kept: list[Pixels] | Pixels
        if self.augmentation.fixed_size:
            kept = np.zeros((count, *self.augmentation.size, 3), np.uint8)
        else:
            kept = [np.zeros((0, 0, 3), np.uint8)] * count

        def load(index: int) -> None:
            try:
                kept[index] = self._pixels(index)
            except ImageError as error:
                reasons[index] = str(error)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(load, range(count)):
                pass
        for index in sorted(reasons):
            self.bad[self.file(index)] = reasons[index]
            good = next((other for other in self._candidates(index) if other not in reasons), None)
            if good is None:
                raise self._no_replacement(index)
            kept[index] = kept[good]
        self._kept = kept


class TrainLoader:
    """One rank's training batches; the workers, where there are any, live until `close`.

    `bad` maps each file found unusable so far to its reason. With `prefetch`, and no workers, one thread
    prepares the next batches. With `pin` they arrive in page-locked memory, for copies to a GPU beside the
    computation.
    """

    def __init__(
        self,
        images: TrainImages,
        plan: StepPlan,
        *,
        rank: int = 0,
        workers: int = 0,
        prefetch: bool = True,
        pin: bool = False,
    ) -> None:
        assert plan.samples == len(images)
        self.images = images
        self.plan = plan
        self.bad: dict[str, str] = dict(images.bad)
        self._rank, self._prefetch, self._pin = rank, prefetch, pin
        self._keys = Keys()
        self._pool: Pool | None = None
        if workers and not images.in_ram:
            height, width = images.augmentation.size
            self._pool = Pool(
                _TrainJob(images),
                self._keys,
                workers=workers,
                batch_bytes=plan.micro * height * width * 3,
                pin=pin,
                lasting=True,
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the shorter last one included."""
        return self.plan.steps

    def epoch(self, epoch: int, *, start_step: int = 0) -> Generator[Batch]:
        """Yield the epoch's micro-batches from an optimizer step on. Raises DataError, DeviceError."""
        order = epoch_order(self.plan.samples, seed=self.images.seed, epoch=epoch)
        blocks = list(self.plan.blocks(self._rank, start_step=start_step))
        keys = ((epoch, order[block.positions]) for block in blocks)
        results: Iterator[tuple[Tensor, list[Bad]]]
        if self._pool is not None:
            self._keys.keys = keys
            results = iter(self._pool)
        else:
            results = map(self._here, keys)
            if self._prefetch:
                results = prefetched(results)
        for block in blocks:
            images, bad = next(results)
            self.bad.update(bad)
            ids = order[block.positions]
            yield Batch(
                images=images.permute(0, 3, 1, 2),
                labels=torch.from_numpy(self.images.split.labels[ids]),
                ids=ids,
                weights=torch.from_numpy(block.weights),
                partner=block.partner,
                boundary=block.boundary,
            )

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _here(self, key: tuple[int, NDArray[np.int64]]) -> tuple[Tensor, list[Bad]]:
        images, bad = self.images.batch(key[1], epoch=key[0])
        images = images.permute(0, 2, 3, 1)
        return (images.pin_memory() if self._pin else images), bad


class _TrainJob:
    def __init__(self, images: TrainImages) -> None:
        self.images = images

    def __getitem__(self, key: tuple[int, NDArray[np.int64]]) -> tuple[Tensor, list[Bad]] | DsimgError:
        try:
            images, bad = self.images.batch(key[1], epoch=key[0])
        except DsimgError as error:
            return error  # raised in the main process, without the worker's traceback
        return images.permute(0, 2, 3, 1), bad


# Evaluation


@dataclass(frozen=True, kw_only=True)
class EvalBatch:
    """One rank's images to evaluate; one black image, not `valid`, where other ranks have more batches."""

    images: Tensor  # (N, 3, H, W) uint8, channels_last in memory
    labels: Tensor  # (N,) int64
    ids: NDArray[np.int64]  # (N,) sample ids
    valid: Tensor  # (N,) bool: to be counted. The others are files in `bad`, and what keeps the ranks in step
    bad: list[Bad]  # files that cannot be decoded, black in `images`


class EvalLoader:
    """One rank's share of a split: every image on exactly one rank, and as many batches on every rank.

    Pixels come from `preprocess.decode` and `resize_and_crop`, the ones that serving uses. When the rank's
    share takes no more than `cache_bytes`, it is kept after the first pass, so that later ones decode
    nothing.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        cache_bytes: int = 0,
        pin: bool = False,
    ) -> None:
        count = len(split.files)
        bounds = [count * part // world for part in range(world + 1)]
        largest = max(high - low for low, high in itertools.pairwise(bounds))
        low, high = bounds[rank], bounds[rank + 1]
        self._labels = split.labels
        self._batches = [
            np.arange(start, min(start + batch_size, high))
            for start in range(low, low + batch_size * math.ceil(largest / batch_size), batch_size)
        ]
        self._job = _EvalJob(split, preprocess)
        _, height, width = preprocess.input_size
        self._workers, self._pin = workers, pin
        self._batch_bytes = batch_size * height * width * 3
        self._keeps = (high - low) * height * width * 3 <= cache_bytes
        self._kept: list[tuple[Tensor, dict[int, str]]] = []

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return len(self._batches)

    def __iter__(self) -> Generator[EvalBatch]:
        """Yield the batches in the split's order."""
        complete = len(self._kept) == len(self._batches)
        results = iter(self._kept) if complete else self._decoded()
        kept: list[tuple[Tensor, dict[int, str]]] = []
        for ids in self._batches:
            images, reasons = next(results)
            if self._keeps and not complete:
                kept.append((images, reasons))
            yield self._batch(ids, images, reasons)
        if kept:
            self._kept = kept

    def _decoded(self) -> Iterator[tuple[Tensor, dict[int, str]]]:
        if not self._workers:
            return map(self._job.__getitem__, self._batches)
        pool = Pool(
            self._job,
            self._batches,
            workers=self._workers,
            batch_bytes=self._batch_bytes,
            pin=self._pin,
            lasting=False,
        )
        return iter(pool)

    def _batch(self, ids: NDArray[np.int64], images: Tensor, reasons: dict[int, str]) -> EvalBatch:
        valid = [index not in reasons for index in ids.tolist()]
        if not len(ids):
            ids, valid = np.zeros(1, np.int64), [False]
        return EvalBatch(
            images=images.permute(0, 3, 1, 2),
            labels=torch.from_numpy(self._labels[ids]),
            ids=ids,
            valid=torch.tensor(valid),
            bad=[(self._job.split.files[index], reason) for index, reason in sorted(reasons.items())],
        )


class _EvalJob:
    def __init__(self, split: Split, preprocess: Preprocess) -> None:
        self.split = split
        self.preprocess = preprocess

    def __getitem__(self, ids: NDArray[np.int64]) -> tuple[Tensor, dict[int, str]]:
        files = [self.split.folder / self.split.files[index] for index in ids.tolist()]
        images, reasons = read_pixels(files, self.preprocess)
        return torch.from_numpy(images), {int(ids[place]): reason for place, reason in reasons.items()}


# To the device


def to_input(images: Tensor, preprocess: Preprocess, device: torch.device | str) -> Tensor:
    """Return (N, 3, H, W) uint8 as the model's input on the device: normalised float32, channels_last in memory."""
    scale, shift = _scale_and_shift(preprocess.mean, preprocess.std, torch.device(device))
    moved = images.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
    return moved.mul_(scale).add_(shift)


@lru_cache
def _scale_and_shift(
    mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device
) -> tuple[Tensor, Tensor]:
    means, stds = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (1 / (255 * stds)).to(device, torch.float32), (-means / stds).to(device, torch.float32)
