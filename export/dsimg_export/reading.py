"""Image files to pixels on several threads, a few batches ahead, in bounded memory: Pillow works outside Python's
lock."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsimg.machine import all_cores
from dsimg.preprocess import Preprocess, read_pixels

PART = 8  # files a task


def read_batches(
    files: Sequence[Path], preprocess: Preprocess, *, batch_size: int, threads: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], dict[int, str]]]:
    """Yield (places in `files` (N,), their pixels (N, H, W, 3), why others cannot be read, by place), in order.

    Unreadable files are left out of a batch, which may then be smaller, or empty. threads: None is one a core.
    """
    count = threads or all_cores()
    places = [range(start, min(start + PART, len(files))) for start in range(0, len(files), PART)]
    ahead = max(2 * count, -(-2 * batch_size // PART))
    with ThreadPoolExecutor(count, thread_name_prefix="decode") as pool:

        def submit(part: range) -> Future[tuple[NDArray[np.uint8], dict[int, str]]]:
            return pool.submit(read_pixels, [files[place] for place in part], preprocess)

        rest = iter(places)
        waiting = deque((part, submit(part)) for part in itertools.islice(rest, ahead))
        ids: list[int] = []
        pixels: list[NDArray[np.uint8]] = []
        reasons: dict[int, str] = {}
        try:
            while waiting:
                part, future = waiting.popleft()
                images, bad = future.result()
                waiting.extend((following, submit(following)) for following in itertools.islice(rest, 1))
                good = [row for row in range(len(part)) if row not in bad]
                ids += [part[row] for row in good]
                pixels.append(images[good])
                reasons.update({part[row]: reason for row, reason in bad.items()})
                while len(ids) >= batch_size or (not waiting and (ids or reasons)):
                    whole = np.concatenate(pixels)
                    yield np.array(ids[:batch_size], np.int64), whole[:batch_size], reasons
                    ids, pixels, reasons = ids[batch_size:], [whole[batch_size:]], {}
        finally:
            for _, future in waiting:
                future.cancel()
