"""What a session costs before it answers: seconds to load, and memory, each in a process of its own.

Within one process the second session would find memory that the first one gave back.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dsimg.errors import ModelError
from dsimg.runtime import Provider
from dsimg_export.session import WARM_UP_ROUNDS, noise_for, open_session, repeatable

PROCESSES = 3  # the median of them
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a session takes beyond a process that has loaded ONNX Runtime."""

    load_seconds: float  # from the file, which was read before and so is in the system's cache
    loaded_bytes: int  # of the host's memory that are in use once the session is open
    # Of the host's memory, at most, from there through the first runs; None where that cannot be told.
    peak_bytes: int | None


def footprint(
    path: Path, *, input_size: tuple[int, int, int], batch: int = 1, threads: int = 1, provider: Provider = "cpu"
) -> Footprint:
    """Return the medians of three processes that open the file and run it on noise (batch, *input_size).

    Raises ModelError where such a process fails.
    """
    words = [json.dumps([str(path), list(input_size), batch, threads, provider])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    found = []
    for _ in range(PROCESSES):
        answer = subprocess.run(
            [sys.executable, "-m", "dsimg_export.footprint", *words], capture_output=True, text=True, env=environment
        )
        if answer.returncode != 0:
            reason = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
            raise ModelError(f"a process that opens {path} failed ({reason}). Is there enough memory for it?")
        found.append(Footprint(**json.loads(answer.stdout.splitlines()[-1])))
    peaks = [one.peak_bytes for one in found if one.peak_bytes is not None]
    return Footprint(
        load_seconds=statistics.median(one.load_seconds for one in found),
        loaded_bytes=int(statistics.median(one.loaded_bytes for one in found)),
        peak_bytes=int(statistics.median(peaks)) if len(peaks) == PROCESSES else None,
    )


def _measure(path: Path, input_size: tuple[int, int, int], batch: int, threads: int, provider: Provider) -> Footprint:
    path.read_bytes()
    try:
        CLEAR_REFS.write_text("5")  # forget the peak so far: the file's bytes, the imports
        forgotten = True
    except OSError:  # some containers
        forgotten = False
    before, start = _memory("VmRSS"), time.perf_counter()
    session = open_session(path, threads=threads, provider=provider)
    seconds, loaded = time.perf_counter() - start, _memory("VmRSS")
    step = repeatable(session, noise_for(session, batch, input_size), provider)
    for _ in range(WARM_UP_ROUNDS):
        step()
    peak = _memory("VmHWM") - before if forgotten else None
    return Footprint(load_seconds=seconds, loaded_bytes=loaded - before, peak_bytes=peak)


def _memory(name: str) -> int:
    """Return one of the kernel's figures of this process in bytes. (`getrusage` keeps the peak of the parent.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(name)


if __name__ == "__main__":
    file, size, *rest = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(asdict(_measure(Path(file), tuple(size), *rest))) + "\n")
