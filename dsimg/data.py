"""From a split's files to batches: decode, cache, order, shard. Training batches are augmented uint8."""

import atexit
import itertools
import math
import os
import queue
import re
import shutil
import signal
import struct
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import InterpolationMode, functional

from dsimg.augment import ORDER, REPLACE, Augmentation, hash_bits, uniform
from dsimg.errors import ConfigError, DataError, DeviceError, DsimgError, ImageError, near
from dsimg.folder import Split
from dsimg.preprocess import INTERPOLATIONS, MAX_PIXELS, Preprocess, decode, resize_and_crop

Pixels = NDArray[np.uint8]  # (H, W, 3)
Bad = tuple[str, str]  # a file, relative to the split's folder, and why it cannot be used

CACHE_MODES = ("auto", "ram", "none")
PILLOW_MAJOR = int(PIL.__version__.split(".")[0])
_CACHE_SHARE = 0.25  # of the memory that is free
_SAMPLED_HEADERS = 256
_REPLACEMENTS = 100
_IN_FLIGHT = 2  # batches that each worker, or the thread, prepares ahead


# Decoding


def decode_rgb(path: Path) -> Pixels:
    """Return a file's picture as (H, W, 3) uint8, within 1 of 255 of `preprocess.decode`.

    Plain JPEGs go through torchvision's decoder, about 1.2 times as fast and read straight into a tensor;
    whatever is unusual (CMYK, rotated by EXIF, damaged, another format) goes through `preprocess.decode`.
    Raises ImageError.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror or error}") from None
    # The public torchvision.io.decode_jpeg, this operator's wrapper, is announced to be removed.
    decode_jpeg = getattr(torch.ops.image, "decode_jpeg", None)
    if decode_jpeg is not None and _is_plain_jpeg(data.data):
        try:
            image: Tensor = decode_jpeg(torch.from_numpy(data), 3, False)
            return image.permute(1, 2, 0).numpy()
        except RuntimeError:
            pass  # damaged in a way that its header does not show: decode() names the reason
    return np.array(decode(data.tobytes()))


def _is_plain_jpeg(data: memoryview) -> bool:
    """Whether bytes are a complete 8-bit Huffman JPEG of one or three components that stands upright."""
    # libjpeg fills what a truncated file lacks with grey, without an error: hence the look at the end.
    if len(data) < 4 or bytes(data[:3]) != b"\xff\xd8\xff" or bytes(data[-2:]) != b"\xff\xd9":
        return False
    position = 2
    while position + 10 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        length = data[position + 2] << 8 | data[position + 3]
        if marker in (0xC0, 0xC1, 0xC2):
            precision, height, width, components = struct.unpack_from(">BHHB", data, position + 4)
            return precision == 8 and components in (1, 3) and 0 < height * width <= MAX_PIXELS
        if marker == 0xE1 and not _is_upright(bytes(data[position + 4 : position + 2 + length])):
            return False
        if not (0xE0 <= marker <= 0xEF or marker in (0xDB, 0xC4, 0xDD, 0xFE)):
            return False
        position += 2 + length
    return False


def _is_upright(segment: bytes) -> bool:
    """Whether a JPEG's APP1 segment surely asks for no rotation."""
    if not segment.startswith(b"Exif\0\0"):
        return b"Orientation" not in segment  # XMP has the tag too
    tiff = segment[6:]
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return False
    try:
        start = struct.unpack_from(f"{order}I", tiff, 4)[0]
        for entry in range(struct.unpack_from(f"{order}H", tiff, start)[0]):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, start + 2 + 12 * entry)
            if tag == 0x0112 and (kind, value) not in ((3, 0), (3, 1)):
                return False
    except struct.error:
        return False
    return True


def resize(pixels: Pixels, preprocess: Preprocess) -> Pixels:
    """Return (H, W, 3) of the model's size, antialiased, as Pillow does it, 2.5 times as fast.

    Within 1 of 255 of Pillow's, but for about one value in thirty million, which is 2 off: weights have 15 bits
    here and 22 there, and both round after each of the two passes.
    """
    height, width, _ = pixels.shape
    _, new_height, new_width = preprocess.input_size
    if preprocess.interpolation not in ("bilinear", "bicubic"):
        method = INTERPOLATIONS[preprocess.interpolation]
        return np.array(Image.fromarray(pixels).resize((new_width, new_height), method))
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    mode = InterpolationMode(preprocess.interpolation)
    if _vertical_first(height - new_height, width - new_width):
        image = functional.resize(image, [new_height, width], interpolation=mode, antialias=True)
    image = functional.resize(image, [new_height, new_width], interpolation=mode, antialias=True)
    result: Pixels = image.permute(1, 2, 0).numpy()
    return result


def _vertical_first(height_cut: int, width_cut: int) -> bool:
    """Whether Pillow shrinks the height before the width; the order shows in 15 % of the pixels, by 1 or 2.

    Since version 13 (its pull request 9549). The condition was found by trying 2,000 random sizes, and is tested.
    """
    return PILLOW_MAJOR >= 13 and height_cut > max(2 * width_cut, 0)


# The cache's size, known before it is taken


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Whether decoded images are kept in RAM, the bytes they take in each rank, and a line saying so."""

    ram: bool
    bytes: int
    text: str


def sample_sizes(split: Split) -> list[tuple[int, int]]:
    """Return (height, width) of up to 256 images, evenly spread, from their headers; no damaged ones."""
    count = len(split.files)
    sizes = []
    for index in np.unique(np.linspace(0, count - 1, min(count, _SAMPLED_HEADERS)).astype(int)):
        try:
            with Image.open(split.folder / split.files[index]) as image:
                sizes.append((image.height, image.width))
        except Exception:  # Pillow raises nearly any type on damaged bytes, which training will name
            continue
    return [(height, width) for height, width in sizes if height * width <= MAX_PIXELS]


def free_memory() -> int:
    """Return the bytes of RAM that can still be taken here: the machine's, or what its container leaves."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free = int(found[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
    return free


def plan_cache(
    count: int,
    sizes: Sequence[tuple[int, int]],
    mode: str,
    *,
    augmentation: Augmentation,
    local_ranks: int = 1,
) -> CachePlan:
    """Return whether `count` training images, `sizes` (h, w) a sample of theirs, are kept in RAM.

    Every rank keeps all of them, for each epoch deals them out anew. `auto` keeps images that are on average
    at most twice the model's input in pixels, in at most a quarter of the free memory for all ranks of the
    machine. Raises ConfigError for an unknown mode, DataError when `ram` is asked for and does not fit.
    """
    if mode not in CACHE_MODES:
        raise ConfigError(f"cache is '{mode}'{near(mode, CACHE_MODES)} Choose from {', '.join(CACHE_MODES)}.")
    target = augmentation.size[0] * augmentation.size[1]
    pixels = sum(height * width for height, width in sizes) / len(sizes) if sizes else float(target)
    size = round(count * 3 * (target if augmentation.fixed_size else pixels))
    free = free_memory()
    need = f"{count:,} decoded images take {_gigabytes(size)}" + (
        f" in each of {local_ranks} ranks, {_gigabytes(size * local_ranks)} together" if local_ranks > 1 else ""
    )
    if mode == "ram" and size * local_ranks > free:
        raise DataError(
            f"--cache ram: {need}; {_gigabytes(free)} are free. Use --cache none, a smaller image_size, or fewer ranks."
        )
    small, fits = pixels <= 2 * target, size * local_ranks <= _CACHE_SHARE * free
    if mode == "ram" or (mode == "auto" and small and fits):
        return CachePlan(ram=True, bytes=size, text=f"in RAM: {need} of {_gigabytes(free)} free")
    if mode == "none":
        return CachePlan(ram=False, bytes=0, text="none, decoded by the workers every epoch")
    why = (
        f"{need}, over a quarter of the {_gigabytes(free)} free"
        if small
        else "the images are much larger than the model's input"
    )
    return CachePlan(ram=False, bytes=0, text=f"none, decoded by the workers every epoch: {why}")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


# The order of an epoch and what each rank takes of it


def epoch_order(count: int, *, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the (count,) sample ids of an epoch in order: a function of its arguments, on any machine."""
    ids = np.arange(count, dtype=np.int64)
    if not shuffle:
        return ids
    return np.argsort(hash_bits(ids, seed=seed, epoch=epoch, draws=1, stream=ORDER)[:, 0], kind="stable")


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank takes of an epoch's order in one micro-batch."""

    positions: NDArray[np.int64]  # (N,) in the epoch's order
    weights: NDArray[np.float32]  # (N,) of the samples' losses
    partner: NDArray[np.int64]  # (N,) index in the block to mix with; its own where there is none
    step: int  # optimizer step in the epoch
    boundary: bool  # the last micro-batch of its optimizer step


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How an epoch's samples fall to optimizer steps, micro-batches and ranks.

    Step s takes positions [s * B, (s + 1) * B) of the epoch's order, B = micro * accumulation * world; within
    it micro-batch a of rank r is the contiguous block at a * world * micro + r * micro. Hence 1 rank of 64, 2
    of 32 and 1 of 32 with 2 accumulated see the same samples. The last, shorter step is dealt out as evenly
    as possible, over no more micro-batches than it needs. A block of it with fewer than two samples, which
    BatchNorm cannot bear, is filled up from the start of the order with samples of weight 0.

    The loss of a micro-batch is sum(weights * losses). Averaged over the ranks and divided by `accumulation`,
    as DeepSpeed always does, its gradient is exactly the mean over the step's samples, however many these
    are.
    """

    samples: int
    micro: int  # train_micro_batch_size_per_gpu
    accumulation: int  # gradient_accumulation_steps
    world: int

    @property
    def batch_size(self) -> int:
        """Samples in a full optimizer step."""
        return self.micro * self.accumulation * self.world

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, the shorter last one included."""
        return math.ceil(self.samples / self.batch_size)

    def blocks(self, rank: int, *, start_step: int = 0) -> Iterator[Block]:
        """Yield a rank's micro-batches from an optimizer step to the epoch's end; as many on every rank."""
        for step in range(start_step, self.steps):
            start = step * self.batch_size
            total = min(self.batch_size, self.samples - start)
            micro_batches = math.ceil(total / (self.world * self.micro))
            # Pairs for mixup stay together wherever the micro-batch is even.
            unit = 2 if self.micro % 2 == 0 else 1
            units, shares = math.ceil(total / unit), micro_batches * self.world
            weight = self.world * self.accumulation / total
            for index in range(micro_batches):
                share = index * self.world + rank
                low, high = (min(units * part // shares * unit, total) for part in (share, share + 1))
                positions = np.arange(start + low, start + high)
                fill = max(min(2, self.micro) - len(positions), 0)
                positions = np.concatenate([positions, np.arange(fill) % self.samples])
                weights = np.full(len(positions), weight, np.float32)
                weights[len(positions) - fill :] = 0
                yield Block(
                    positions=positions,
                    weights=weights,
                    partner=_partners(positions[: len(positions) - fill], len(positions)),
                    step=step,
                    boundary=index == micro_batches - 1,
                )


def _partners(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each of `count` the index of position 2k + 1 where it is 2k, and back; else its own."""
    partner = np.arange(count)
    if len(positions):
        other = np.arange(len(positions)) + np.where(positions % 2 == 0, 1, -1)
        inside = (other >= 0) & (other < len(positions))
        partner[: len(positions)][inside] = other[inside]
    return partner


# Training


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's micro-batch."""

    images: Tensor  # (N, 3, H, W) uint8, channels_last in memory
    labels: Tensor  # (N,) int64
    ids: NDArray[np.int64]  # (N,) sample ids
    weights: Tensor  # (N,) float32: the loss is sum(weights * losses), see StepPlan
    partner: NDArray[np.int64]  # (N,) for augment.mix
    step: int  # optimizer step in the epoch
    boundary: bool  # the last micro-batch of its optimizer step
    bad: list[Bad]  # files found unusable here for the first time, each replaced by one of its class


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
        shuffle: bool = True,
        prefetch: bool = True,
        pin: bool = False,
    ) -> None:
        assert plan.samples == len(images)
        self.images = images
        self.plan = plan
        self.bad: dict[str, str] = dict(images.bad)
        self._unreported: list[Bad] = list(images.bad.items())
        self._rank, self._shuffle, self._prefetch, self._pin = rank, shuffle, prefetch, pin
        self._keys = _Keys()
        self._pool: _Pool | None = None
        if workers and not images.in_ram:
            height, width = images.augmentation.size
            _check_shared_memory(workers, plan.micro * height * width * 3)
            self._pool = _Pool(_TrainJob(images), self._keys, workers=workers, pin=pin, lasting=True)

    @property
    def split(self) -> Split:
        """The split that the batches come from."""
        return self.images.split

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the shorter last one included."""
        return self.plan.steps

    def epoch(self, epoch: int, *, start_step: int = 0) -> Generator[Batch]:
        """Yield the epoch's micro-batches from an optimizer step on. Raises DataError, DeviceError."""
        order = epoch_order(self.plan.samples, seed=self.images.seed, epoch=epoch, shuffle=self._shuffle)
        blocks = list(self.plan.blocks(self._rank, start_step=start_step))
        keys = ((epoch, order[block.positions]) for block in blocks)
        results: Iterator[tuple[Tensor, list[Bad]]]
        if self._pool is not None:
            self._keys.keys = keys
            results = iter(self._pool)
        else:
            results = map(self._here, keys)
            if self._prefetch:
                results = _prefetched(results)
        for block in blocks:
            images, bad = next(results)
            ids = order[block.positions]
            yield Batch(
                images=images.permute(0, 3, 1, 2),
                labels=torch.from_numpy(self.images.split.labels[ids]),
                ids=ids,
                weights=torch.from_numpy(block.weights),
                partner=block.partner,
                step=block.step,
                boundary=block.boundary,
                bad=self._new(bad),
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

    def _new(self, bad: list[Bad]) -> list[Bad]:
        new, self._unreported = self._unreported, []
        for file, reason in bad:
            if file not in self.bad:
                self.bad[file] = reason
                new.append((file, reason))
        return new


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
        _check_shared_memory(self._workers, self._batch_bytes)
        return iter(_Pool(self._job, self._batches, workers=self._workers, pin=self._pin, lasting=False))

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


# To the device


def to_input(
    images: Tensor, preprocess: Preprocess, device: torch.device | str, *, channels_last: bool = True
) -> Tensor:
    """Return (N, 3, H, W) uint8 as the model's input, normalised float32, on the device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    scale, shift = _scale_and_shift(preprocess.mean, preprocess.std, torch.device(device))
    moved = images.to(device, non_blocking=True).to(torch.float32, memory_format=layout)
    return moved.mul_(scale).add_(shift)


@lru_cache
def _scale_and_shift(
    mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device
) -> tuple[Tensor, Tensor]:
    means, stds = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (1 / (255 * stds)).to(device, torch.float32), (-means / stds).to(device, torch.float32)


# Workers and threads


class _Keys:
    """The batches that the workers are to make next; set before each pass over the loader."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class _TrainJob:
    def __init__(self, images: TrainImages) -> None:
        self.images = images

    def __getitem__(self, key: tuple[int, NDArray[np.int64]]) -> tuple[Tensor, list[Bad]] | DsimgError:
        try:
            images, bad = self.images.batch(key[1], epoch=key[0])
        except DsimgError as error:
            return error  # raised in the main process, without the worker's traceback
        return images.permute(0, 2, 3, 1), bad


class _EvalJob:
    def __init__(self, split: Split, preprocess: Preprocess) -> None:
        self.split = split
        self.preprocess = preprocess

    def __getitem__(self, ids: NDArray[np.int64]) -> tuple[Tensor, dict[int, str]]:
        _, height, width = self.preprocess.input_size
        images = np.zeros((max(len(ids), 1), height, width, 3), np.uint8)
        reasons: dict[int, str] = {}
        for row, index in enumerate(ids.tolist()):
            try:
                data = (self.split.folder / self.split.files[index]).read_bytes()
                images[row] = resize_and_crop(decode(data), self.preprocess)
            except ImageError as error:
                reasons[index] = str(error)
            except OSError as error:
                reasons[index] = f"cannot be read: {error.strerror or error}"
        return torch.from_numpy(images), reasons


class _Pool:
    """Processes that make `job[key]` for each of `keys`; they end with the pass or, where `lasting`, with `close`."""

    def __init__(self, job: Any, keys: Iterable[Any], *, workers: int, pin: bool, lasting: bool) -> None:
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
        if self._iterator is not None:
            # What deleting it does; but a traceback can hold a reference until after Python waits for its children.
            self._iterator._shutdown_workers()
            self._iterator = None


_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


def _as_it_is(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    """Leave stopping to the main process, which the same signals reach: it must finish its step first.

    Ctrl-C and a launcher's SIGTERM go to whole process groups or trees. A second SIGTERM ends a worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Raise DeviceError where workers could not hand over their batches: they would die of SIGBUS."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    need, free = (workers * _IN_FLIGHT + 1) * batch_bytes, shutil.disk_usage(folder).free
    if need > free:
        raise DeviceError(
            f"{workers} workers need {_gigabytes(need)} of shared memory, /dev/shm has {_gigabytes(free)}. "
            "Start the container with a larger --shm-size, or use fewer workers."
        )


def _prefetched(items: Iterator[Any]) -> Generator[Any]:
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
    return max(1, min(8, len(os.sched_getaffinity(0)) // local_ranks))
