"""A teacher's logits on disk: a view is a function of (seed, epoch, sample), so what was computed once can be replayed.

One file an epoch, one row a sample: its logits in fp16, of the TOP_K best classes where there are more (then with their
class ids and the mass of the others), and a checksum, so that a row that is missing or torn is computed again.
"""

import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsimg.errors import RunError
from dsimg.run import read_json, write_json

TOP_K = 100
SCHEMA = 1


class TeacherCache:
    """Rows of one teacher, written and read by every rank. `folder` and its `cache.json` are made by rank 0 before."""

    def __init__(self, folder: Path, *, samples: int, classes: int) -> None:
        self._folder, self._samples, self._classes = folder, samples, classes
        self.replayed = 0  # views that the caller took from here
        self.computed = 0  # views that had to be computed
        width = min(classes, TOP_K)
        fields: list[tuple[Any, ...]] = [("logits", "<f2", (width,))]
        if classes > TOP_K:
            fields += [("ids", "<u4", (width,)), ("rest", "<f2")]
        self._payload = np.dtype(fields)
        self._row = np.dtype([("payload", self._payload), ("check", "<u4")])
        self._open: tuple[int, int] | None = None  # epoch, descriptor

    def bytes_of(self, epochs: int) -> int:
        """Return what so many epochs take on the disk."""
        return epochs * self._samples * self._row.itemsize

    def read(self, epoch: int, ids: NDArray[np.int64]) -> Tensor | None:
        """Return the logits (N, C) float32 of samples (N,), or None unless all are there."""
        descriptor, size = self._file(epoch), self._row.itemsize
        content = b"".join(os.pread(descriptor, size, index * size).ljust(size, b"\0") for index in ids.tolist())
        rows = np.frombuffer(content, self._row)
        if any(zlib.crc32(row["payload"].tobytes()) != row["check"] for row in rows):
            return None
        return self._unpack(rows["payload"])

    def write(self, epoch: int, ids: NDArray[np.int64], logits: Tensor, *, keep: NDArray[np.bool_]) -> Tensor:
        """Keep the logits (N, C) of those samples (N,), and return all of them as `read` will. Raises RunError."""
        payload = self._pack(logits)
        self.computed += int(keep.sum())
        rows = np.zeros(len(ids), self._row)
        rows["payload"] = payload
        rows["check"] = [zlib.crc32(part.tobytes()) for part in payload]
        descriptor, size = self._file(epoch), self._row.itemsize
        try:
            for index, row in zip(ids[keep].tolist(), rows[keep], strict=True):
                os.pwrite(descriptor, row.tobytes(), index * size)
        except OSError as error:
            raise RunError(
                f"cannot write the teacher's cache {self._folder}: {error.strerror}. Free some space there; the "
                "same command goes on."
            ) from error
        return self._unpack(payload)

    def _file(self, epoch: int) -> int:
        if self._open is None or self._open[0] != epoch:
            if self._open is not None:
                os.close(self._open[1])
            path = self._folder / f"epoch_{epoch:05d}.bin"
            self._open = None
            try:
                self._open = epoch, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise RunError(
                    f"cannot open the teacher's cache {path}: {error.strerror}. Make it writable; the same command "
                    "goes on."
                ) from error
        return self._open[1]

    def _pack(self, logits: Tensor) -> NDArray[Any]:
        payload = np.zeros(len(logits), self._payload)
        # Logits are told apart by their differences alone; from the best one, fp16 is finest where it matters.
        shifted = (logits - logits.amax(1, keepdim=True)).float().cpu()
        if self._classes <= TOP_K:
            payload["logits"] = _half(shifted)
            return payload
        best, ids = shifted.topk(TOP_K, dim=1)
        payload["logits"], payload["ids"] = _half(best), ids.numpy()
        others = shifted.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        payload["rest"] = _half(others - math.log(self._classes - TOP_K))[:, 0]
        return payload

    def _unpack(self, payload: NDArray[Any]) -> Tensor:
        logits = torch.from_numpy(payload["logits"].astype(np.float32))
        if self._classes <= TOP_K:
            return logits
        rest = torch.from_numpy(payload["rest"].astype(np.float32))
        whole = rest.reshape(-1, 1).repeat(1, self._classes)
        return whole.scatter_(1, torch.from_numpy(payload["ids"].astype(np.int64)), logits)


def prepare_cache(folder: Path, key: Mapping[str, Any]) -> None:
    """Make a cache's folder for what `key` says of its rows, or check that the one there is of the same.

    Raises RunError that names what differs: another teacher, seed, augmentation, data.
    """
    path = folder / "cache.json"
    expected = {"schema": SCHEMA, **key}
    if path.exists():
        try:
            found = read_json(path)
        except RunError as error:
            raise RunError(
                f"{path} cannot be read. Remove {folder}, or choose another folder for the cache."
            ) from error
        different = [name for name in expected if found.get(name) != expected[name]]
        if different:
            name = different[0]
            raise RunError(
                f"--cache_teacher {folder} was made with another {name} ({found.get(name)}; now {expected[name]}). "
                "Choose another folder for the cache."
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = any(folder.iterdir())
    except OSError as error:
        raise RunError(
            f"--cache_teacher {folder} is no folder to write to: {error.strerror}. Choose another."
        ) from error
    if strange:
        raise RunError(f"--cache_teacher {folder} holds something other than a cache. Choose another folder.")
    write_json(path, expected)


def _half(values: Tensor) -> NDArray[np.float16]:
    """Return values as fp16; what is smaller than fp16 can hold becomes its smallest."""
    limit = float(np.finfo(np.float16).max)
    half: NDArray[np.float16] = values.clamp(min=-limit).numpy().astype(np.float16)
    return half
