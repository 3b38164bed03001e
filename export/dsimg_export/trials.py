"""The ways of quantizing one network: ranges found once, files written and tried on images as often as needed."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsimg.errors import DataError, ModelError
from dsimg.evaluation import measure
from dsimg.folder import Split
from dsimg.preprocess import Preprocess, normalise
from dsimg_export import calibrate
from dsimg_export.calibrate import Range
from dsimg_export.int8 import layers, prepare, write_dynamic, write_static
from dsimg_export.reading import read_batches
from dsimg_export.sensitivity import relative_error, worst_first
from dsimg_export.served import logits_of
from dsimg_export.session import open_session, takes_pixels

Way = Literal["minmax", "percentile", "mse", "dynamic"]

BATCH = 32
RANKING_IMAGES = 64  # for the error of each layer alone, of which there may be hundreds


@dataclass(frozen=True)
class Images:
    """Images in memory. pixels: (N, H, W, 3); labels: (N,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """What a file said of images."""

    logits: NDArray[np.float32]  # (N, C)
    top1: NDArray[np.int64]  # (N,)
    correct: int
    loss: float  # mean of those that are finite; infinite where none is

    def agreement(self, other: "Trial") -> float:
        """Return the share of images on which two files have the same Top-1."""
        return float(np.mean(self.top1 == other.top1))


class Candidates:
    """One network in fp32, and what it takes to write it in int8."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        *,
        calibration: Split,
        preprocess: Preprocess,
        ops: Sequence[str],
        threads: int,
        reduce_range: bool,
    ) -> None:
        """folder: for files that are not kept. reduce_range: whether trials are written with weights of 7 bits, as this
        processor needs them. Raises ModelError."""
        self.source = source
        self.folder = folder
        self.prepared = folder / "prepared.onnx"
        self.unreadable: dict[str, str] = {}  # calibration images
        self._scratch = folder / "trial.onnx"
        self._calibration = calibration
        self._preprocess = preprocess
        self._ops = tuple(ops)
        self._threads = threads
        self._reduce_range = reduce_range
        self._normalised = not takes_pixels(open_session(source))
        self._ranges: dict[str, dict[str, Range]] = {}
        prepare(source, self.prepared)
        self.layers = layers(self.prepared, self._ops)
        if not self.layers:
            raise ModelError(f"{source} has no operator that int8 is made for ({', '.join(ops)}). Serve it in fp32.")

    def ranges(self, way: Way) -> Mapping[str, Range]:
        """Return the ranges of activations by tensor; none for `dynamic`. Raises DataError, ModelError."""
        if way == "dynamic":
            return {}
        if way not in self._ranges:
            if way == "minmax":
                ends = calibrate.extremes(self.prepared, self._batches(), ops=self._ops, threads=self._threads)
                self._ranges[way] = ends
            else:
                search = calibrate.SEARCHES[way]
                self._ranges[way] = {name: search(histogram) for name, histogram in self._histograms.items()}
        return self._ranges[way]

    def write(
        self, way: Way, target: Path, *, in_float: Collection[str] = (), reduce_range: bool | None = None
    ) -> None:
        """Write the network in int8, but for the layers `in_float`. Raises ModelError."""
        reduced = self._reduce_range if reduce_range is None else reduce_range
        if way == "dynamic":
            write_dynamic(self.prepared, target, exclude=in_float, reduce_range=reduced)
        else:
            ranges = self.ranges(way)
            write_static(self.prepared, target, ranges, ops=self._ops, exclude=in_float, reduce_range=reduced)

    def trial(self, way: Way | None, images: Images, *, in_float: Collection[str] = ()) -> Trial:
        """Return what the network says of images, quantized in this way; None is fp32."""
        if way is not None:
            self.write(way, self._scratch, in_float=in_float)
        session = open_session(self.source if way is None else self._scratch, threads=self._threads)
        starts = range(0, len(images.pixels), BATCH)
        logits = np.concatenate(
            [logits_of(session, images.pixels[start : start + BATCH], self._preprocess) for start in starts]
        )
        rows = measure(logits, images.labels, np.arange(len(logits)))
        top1 = rows[:, 3].astype(np.int64)
        losses = rows[np.isfinite(rows[:, 1]), 1]
        loss = float(losses.mean()) if len(losses) else math.inf
        return Trial(logits, top1, int((top1 == images.labels).sum()), loss)

    def sensitivity(self, way: Way, images: Images, said: Callable[[str], None]) -> list[tuple[str, float]]:
        """Return the layers with the relative error of the logits when each alone is in int8, the largest first."""
        few = Images(images.pixels[:RANKING_IMAGES], images.labels[:RANKING_IMAGES])
        expected = self.trial(None, few).logits

        def error_of(layer: str) -> float:
            said(layer)
            others = [name for name in self.layers if name != layer]
            return relative_error(self.trial(way, few, in_float=others).logits, expected)

        return worst_first(self.layers, error_of)

    @cached_property
    def _histograms(self) -> dict[str, calibrate.Histogram]:
        ends = self.ranges("minmax")
        return calibrate.histograms(self.prepared, self._batches(), ends, threads=self._threads)

    def _batches(self) -> Iterator[NDArray[Any]]:
        """Yield the calibration images as the file takes them: decoded anew in each pass, so that none are kept."""
        files = [self._calibration.folder / file for file in self._calibration.files]
        seen = 0
        for _, pixels, bad in read_batches(files, self._preprocess, batch_size=BATCH):
            self.unreadable.update({self._calibration.files[place]: reason for place, reason in bad.items()})
            seen += len(pixels)
            if len(pixels):
                yield normalise(pixels, self._preprocess) if self._normalised else pixels
        if not seen:
            raise DataError(
                f"none of the {len(files)} calibration images in {self._calibration.folder} can be decoded. Give "
                "--data a folder with images."
            )


def read_images(split: Split, preprocess: Preprocess) -> Images:
    """Decode a split into memory; files that cannot be decoded are left out. Raises DataError when none can be."""
    files = [split.folder / file for file in split.files]
    ids: list[NDArray[np.int64]] = []
    pixels: list[NDArray[np.uint8]] = []
    for places, some, _ in read_batches(files, preprocess, batch_size=BATCH):
        ids.append(places)
        pixels.append(some)
    good = np.concatenate(ids) if ids else np.empty(0, np.int64)
    if not len(good):
        raise DataError(
            f"none of {len(files)} images in {split.folder} can be decoded. Give --data a folder with images."
        )
    return Images(np.concatenate(pixels), split.labels[good].astype(np.int64))
