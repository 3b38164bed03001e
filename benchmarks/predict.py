"""`dsimg predict --out` as a share of its floor, and what is left of its table when it is killed.

    python benchmarks/predict.py --source RUN --images DIR [--limit N] [--rounds 3]
    python benchmarks/predict.py --source RUN --images DIR --make 1000      (photographs of 12 megapixels)
    python benchmarks/predict.py --source RUN --images DIR --kill 5 [--table .csv .parquet]

The floor is a process of plain threads, one a core, each of which takes the next 32 files, reads, decodes, resizes and
normalises them with dsimg's own functions, and runs them through dsimg's session; nothing is written, and nothing is
made of the logits. Its clock starts when the session is open and the files are listed. dsimg is the command, seen from
outside: its start (imports, listing, hashes, session) ends when the table is begun. The two run in turn, on files that
were read just before, so that they are in memory. CPU seconds are those of all threads, user and system.

--make writes 12-megapixel JPEGs of 2-4 MB: a few photographs of --images, enlarged, with noise; all others are hard
links to these, which are decoded as often as they have names. --kill ends the command with SIGKILL at random instants,
starts it again each time, and compares the table with that of a run without kills.
"""

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dsimg.folder import images_below
from dsimg.machine import all_cores
from dsimg.predict import BATCH
from dsimg.preprocess import decode, read_pixels
from dsimg.run import Run
from dsimg_export.served import open_served

SIZE = (4000, 3000)
DISTINCT = 8  # photographs that --make enlarges
NOISE = 4.0  # of 255: what a sensor gives in middling light
LOOK_SECONDS = 0.002  # between two looks whether the table has begun


@dataclass(frozen=True)
class Cost:
    """What a side took for all files; `start` and `start_cpu` are seconds before the first of them."""

    wall: float
    cpu: float
    start: float = 0.0
    start_cpu: float = 0.0
    peak_mib: float = 0.0


def floor(source: Path, files: Sequence[Path], *, session_threads: int) -> Cost:
    """Return what it takes at least: all files to logits, by a thread a core."""
    served = open_served(Run.open(source), threads=session_threads)
    starts, lock, bad = iter(range(0, len(files), BATCH)), threading.Lock(), [0]

    def following() -> int | None:
        with lock:
            return next(starts, None)

    def work() -> None:
        while (start := following()) is not None:
            pixels, reasons = read_pixels(files[start : start + BATCH], served.preprocess)
            served.logits(pixels)
            bad[0] += len(reasons)

    workers = [threading.Thread(target=work) for _ in range(all_cores())]
    begun, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    cost = Cost(time.perf_counter() - begun, time.process_time() - cpu)
    if bad[0]:
        raise SystemExit(f"{bad[0]} files cannot be read; choose --images without such")
    return cost


def floor_apart(source: Path, folder: Path, session_threads: int) -> Cost:
    """Return what `floor` does in a process of its own."""
    words = [sys.executable, __file__, "--source", str(source), "--images", str(folder)]
    words += ["--floor", str(session_threads)]
    return Cost(**json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout))


def command(source: Path, folder: Path, out: Path) -> list[str]:
    """Return the command that is measured."""
    return [sys.executable, "-m", "dsimg", "predict", "--source", str(source), str(folder), "--out", str(out)]


def ours(source: Path, folder: Path, out: Path) -> Cost:
    """Return what the command takes. It is looked at from outside."""
    partial = out.with_name(f"{out.name}.partial")
    begun = time.perf_counter()
    words = command(source, folder, out)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not partial.exists() and process.poll() is None:
        time.sleep(LOOK_SECONDS)
    assert process.stdout is not None
    if process.returncode is not None:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{process.stdout.read().decode()}")
    start = time.perf_counter() - begun
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        start_cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    peak = 0
    with process.stdout as stdout:
        for _ in stdout:  # a line every few seconds, and some at the end
            peak = _peak_kib(process.pid) or peak
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}; run it to see why")
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(wall - start, cpu - start_cpu, start, start_cpu, peak / 1024)


def _peak_kib(process: int) -> int:
    """Return the peak of a process's memory so far; 0 when it has ended. Its rusage begins with its parent's."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def measure(source: Path, folder: Path, count: int, scratch: Path, options: argparse.Namespace) -> None:
    """Measure both sides in turn, and print a table in Markdown."""
    floors: list[Cost] = []
    found: list[Cost] = []
    for number in range(options.rounds):
        out = scratch / f"{number}{options.table[0]}"
        for side in ("floor", "dsimg") if number % 2 == 0 else ("dsimg", "floor"):
            if side == "floor":
                floors.append(floor_apart(source, folder, options.session_threads))
            else:
                found.append(ours(source, folder, out))
        print(f"round {number + 1}: floor {floors[-1].wall:.2f} s, dsimg {found[-1].wall:.2f} s", file=sys.stderr)
    print("| side | files/s | seconds | CPU seconds | ms of CPU a file | start, s | start, CPU s | peak, MiB |")
    print("|---" * 8 + "|")
    for name, costs in (("floor", floors), ("dsimg", found)):
        wall, cpu, start, start_cpu, peak = (
            statistics.median(getattr(one, key) for one in costs)
            for key in ("wall", "cpu", "start", "start_cpu", "peak_mib")
        )
        cells = [f"{count / wall:.0f}", f"{wall:.2f}", f"{cpu:.2f}", f"{1000 * cpu / count:.3f}"]
        cells += [f"{start:.2f}", f"{start_cpu:.2f}", f"{peak:.0f}"] if start else ["", "", ""]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| share of the floor | of medians | of rounds, least to most |\n|---|---|---|")
    for name, least, most in (
        ("rate, without the start", [one.wall for one in floors], [one.wall for one in found]),
        ("rate, with the start", [one.wall for one in floors], [one.wall + one.start for one in found]),
        ("CPU, without the start", [one.cpu for one in floors], [one.cpu for one in found]),
    ):
        shares = [a / b for a, b in zip(least, most, strict=True)]
        middle = statistics.median(least) / statistics.median(most)
        print(f"| {name} | {middle:.3f} | {min(shares):.3f} to {max(shares):.3f} |")


def kill(source: Path, folder: Path, files: Sequence[Path], scratch: Path, options: argparse.Namespace) -> None:
    """Kill the command at random instants, and check what becomes of its table."""
    chance = random.Random(options.seed)
    for suffix in options.table:
        whole = scratch / f"whole{suffix}"
        cost = ours(source, folder, whole)
        killed = tables = 0
        while killed < options.kill:
            out = scratch / f"{tables}{suffix}"
            while not out.exists():
                delay = chance.uniform(0, cost.start + cost.wall)
                if _killed_after(delay if killed < options.kill else None, command(source, folder, out)):
                    killed += 1
                    print(f"{suffix}: killed after {delay:.2f} s, {_rows_kept(out):,} rows kept", flush=True)
            _check_same(whole, out, files)
            tables += 1
        ends = ("", ".state.json")
        expected = {f"{name}{suffix}{end}" for name in ("whole", *range(tables)) for end in ends}
        if left := {entry.name for entry in scratch.iterdir() if suffix in entry.name} - expected:
            raise SystemExit(f"{suffix}: left beside the table: {' '.join(sorted(left))}")
        print(
            f"{suffix}: {killed} kills, finished tables: {tables}, each with {len(files):,} rows, every file once, in "
            "order, and the same as without kills; nothing left beside"
        )


def _killed_after(seconds: float | None, words: Sequence[str]) -> bool:
    """Run a command; tell whether it was killed for taking longer. Ends with a word where it fails by itself."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if process.wait(seconds):
            raise SystemExit(f"the command ended with {process.returncode}: {' '.join(words)}")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def _rows_kept(out: Path) -> int:
    state = out.with_name(f"{out.name}.state.json")
    return int(json.loads(state.read_text())["rows"]) if state.exists() else 0


def _check_same(whole: Path, out: Path, files: Sequence[Path]) -> None:
    """End with a word where a table has not each file once, in order, or differs from another."""
    if out.suffix == ".csv":
        with out.open(newline="") as stream:
            names = [row["file"] for row in csv.DictReader(stream)]
        same = out.read_bytes() == whole.read_bytes()
    else:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        table = parquet.read_table(out)
        names, same = table["file"].to_pylist(), table.equals(parquet.read_table(whole))
    if names != [str(file) for file in files]:
        raise SystemExit(f"{out.name} has {len(names)} rows, which are not one a file in their order")
    if not same:
        raise SystemExit(f"{out.name} has each file once, and is not what the run without kills wrote")


def make_photographs(folder: Path, sources: Sequence[Path], count: int) -> None:
    """Write 12-megapixel JPEGs; all beyond the first few are hard links to those."""
    noise = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number:05}.jpg"
        if number >= DISTINCT:
            path.hardlink_to(folder / f"{number % DISTINCT:05}.jpg")
            continue
        picture = decode(sources[number % len(sources)].read_bytes()).resize(SIZE, Image.Resampling.BICUBIC)
        grain = noise.normal(0, NOISE, (SIZE[1], SIZE[0], 1)).astype(np.float32)
        pixels = np.clip(np.asarray(picture, np.float32) + grain, 0, 255).astype(np.uint8)
        path.write_bytes(_jpeg(Image.fromarray(pixels)))


def _jpeg(image: Image.Image) -> bytes:
    """Return a JPEG of at most 4 MB: the best quality that keeps to it."""
    for quality in range(95, 50, -5):
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=quality)
        if stream.tell() < 4_000_000:
            break
    return stream.getvalue()


@contextlib.contextmanager
def few(files: Iterable[Path]) -> Iterator[Path]:
    """Give a folder of only these files: hard links, or copies where the file system cannot."""
    with tempfile.TemporaryDirectory() as place:
        for number, file in enumerate(files):
            target = Path(place) / f"{number:07}{file.suffix}"
            try:
                target.hardlink_to(file)
            except OSError:
                shutil.copyfile(file, target)
        yield Path(place)


def main() -> None:
    """Measure, or kill; print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="an exported run")
    parser.add_argument("--images", type=Path, required=True, help="a folder of readable images, at any depth")
    parser.add_argument("--limit", type=int, help="take so many files, spread over all")
    parser.add_argument("--make", type=int, default=0, metavar="N", help="N large JPEGs from the images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--session_threads", type=int, default=1, help="of the floor's session, for each of its threads"
    )
    parser.add_argument(
        "--kill", type=int, default=0, metavar="N", help="kill the command N times in place of measuring"
    )
    parser.add_argument("--table", nargs="+", default=[".csv"], choices=[".csv", ".parquet"])
    parser.add_argument("--seed", type=int, default=0, help="of the instants at which it is killed")
    parser.add_argument("--floor", type=int, help=argparse.SUPPRESS)  # this program as the floor's process
    options = parser.parse_args()
    if options.floor:
        cost = floor(options.source, images_below(options.images), session_threads=options.floor)
        print(json.dumps(cost.__dict__))
        return
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = options.images
        if options.make:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_photographs(folder, images_below(options.images), options.make)
        elif options.limit:
            files = images_below(folder)
            step = max(1, len(files) // options.limit)
            folder = stack.enter_context(few(files[::step][: options.limit]))
        files = images_below(folder)
        sizes = [len(file.read_bytes()) for file in files]  # which also brings them into memory
        print(f"{len(files):,} files, {statistics.median(sizes) / 1000:,.1f} kB at the median; {all_cores()} cores\n")
        if options.kill:
            kill(options.source, folder, files, scratch, options)
        else:
            measure(options.source, folder, len(files), scratch, options)


if __name__ == "__main__":
    main()
