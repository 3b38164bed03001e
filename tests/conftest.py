"""Fixtures shared by the tests: small data sets of real image files, and programs run on several ranks."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]

# The same figures on every machine: some are fast in bf16, which "auto" then takes.
os.environ["DSIMG_INSTRUCTION_SET"] = "vnni"
# More threads than cores, times the ranks of a test, make small layers crawl.
torch.set_num_threads(1)

Launch = Callable[..., list["subprocess.CompletedProcess[str]"]]


def write_image(path: Path, *, label: int, number: int, side: int = 32) -> None:
    """Write a PNG whose brightness tells its class, with noise that tells its number."""
    rng = np.random.default_rng([label, number])
    pixels = rng.integers(0, 100, (side, side, 3)) + 120 * label % 150
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def make_folder(root: Path, *, classes: tuple[str, ...] = ("ant", "bee"), train: int = 8, val: int = 4) -> Path:
    """Write `train` and `val` images a class into class folders, and return `root`."""
    for label, name in enumerate(classes):
        for number in range(train + val):
            split = "train" if number < train else "val"
            write_image(root / split / name / f"{number:04d}.png", label=label, number=number)
    return root


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """Two classes of eight training and four validation images, 32 x 32."""
    return make_folder(tmp_path / "insects")


NOBODY = 65534


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Act as a user whom permissions hold, where root runs the tests. What is imported must have been before: Python's
    own files may be root's."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that `without_rights` may look into and not write, as `tmp_path` is the owner's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher gives a rank, one core each, and this checkout on the path."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONWARNINGS", *ranks)}
    return {
        **kept,
        **{key: str(value) for key, value in ranks.items()},
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launch_ranks(
    size: int, *words: str, cwd: Path = ROOT, timeout: float = 240
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python WORDS` on `size` ranks at the same time; return what each printed and its exit code."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=rank_environment(rank, size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return results


@pytest.fixture
def launch() -> Launch:
    """Run a program on several ranks, as a launcher would, without its second of polling."""
    return launch_ranks
