"""Measure how fast exported runs are, all in turn within one measurement, so that their ratios hold.

dsimg bench --source RUN RUN2
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import dsimg
from dsimg import cli
from dsimg.console import busy_text, bytes_text, ms_number
from dsimg.errors import ConfigError
from dsimg.machine import all_cores, int8_is_exact, processor_name
from dsimg.run import Run, make_folder, sha256, write_json
from dsimg.runtime import Provider
from dsimg_export.footprint import footprint
from dsimg_export.served import Served, open_served
from dsimg_export.session import Times, in_turn, noise_for, open_session, repeatable

RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The flags of `dsimg bench`."""

    source: tuple[Path, ...]
    """The runs to measure, with an ONNX file each; ratios are to the first."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Images a call."""
    threads: tuple[int, ...] | None = None
    """Threads of a session. Default: one, and one a core."""
    provider: Provider = "cpu"
    """Where ONNX Runtime runs the files: cpu, cuda, tensorrt; one that is not there is an error."""
    seconds: float = 2.0
    """How long each run is measured, at each number of threads and images, with the calls that do not count."""
    out: Path | None = None
    """A folder for bench.json and bench.png. Default: only the table."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("--source names no run; give at least one.")
        for flag, values in (("--batch_sizes", self.batch_sizes), ("--threads", self.threads)):
            if values is not None and (not values or min(values) < 1 or len(set(values)) != len(values)):
                found = " ".join(map(str, values)) or "empty"
                raise ConfigError(f"{flag} is {found}; give different whole numbers, at least 1.")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds is {self.seconds}; it must be above 0.")


def bench(config: BenchConfig) -> dict[str, Any]:
    """Measure latency, throughput, load time and memory of exported runs, all in turn.

    In Python: returns what bench.json holds.
    """
    out = None if config.out is None else make_folder(config.out)
    threads = config.threads or tuple(sorted({1, all_cores()}))
    served = _open(config)
    machine = _machine(config.provider)
    terminal = cli.context().terminal
    where = [machine["processor"], f"{machine['cores']} cores", *([machine["gpu"]] if machine["gpu"] else [])]
    how = f"{config.seconds:g} s a run; threads: {_list(threads)}; images a call: {_list(config.batch_sizes)}"
    terminal.table(
        "plan",
        [
            *((name, _described(one)) for name, one in served.items()),
            ("machine", ", ".join(where)),
            ("session", f"ONNX Runtime {onnxruntime.__version__}, {config.provider}"),
            ("measurement", how),
        ],
    )
    runs = []
    for name, one in served.items():
        terminal.progress(f"loading {name} in processes of its own")
        cost = footprint(
            one.path,
            input_size=one.preprocess.input_size,
            batch=max(config.batch_sizes),
            threads=max(threads),
            provider=config.provider,
        )
        runs.append({**_identity(name, one), **asdict(cost)})
    measurements = [row for count in threads for row in _measure(served, config, count)]
    terminal.stop_live()
    report = {
        "dsimg": dsimg.__version__,
        "onnxruntime": onnxruntime.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "provider": config.provider,
        "seconds": config.seconds,
        "footprint_at": {"threads": max(threads), "batch_size": max(config.batch_sizes)},
        "runs": runs,
        "measurements": measurements,
    }
    _show(report)
    if out is not None:
        write_json(out / "bench.json", report)
        _picture(out / "bench.png", report)
    return report


def _measure(served: Mapping[str, Served], config: BenchConfig, threads: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of all runs with a number of threads, at each batch size."""
    sessions = {
        # Those that were opened to check the runs have one thread.
        name: one.session if threads == 1 else open_session(one.path, threads=threads, provider=config.provider)
        for name, one in served.items()
    }
    for batch in config.batch_sizes:
        cli.context().terminal.progress(f"measuring, threads: {threads}, images a call: {batch}")
        steps = {}
        for name, session in sessions.items():
            images = noise_for(session, batch, served[name].preprocess.input_size)
            steps[name] = repeatable(session, images, config.provider)
        yield from rows_of(in_turn(steps, seconds=config.seconds), threads=threads, batch=batch)


def rows_of(times: Mapping[str, Times], *, threads: int, batch: int) -> list[dict[str, Any]]:
    """Return the figures of runs that were measured in turn, one dict each.

    calls, and all that follows: of those that count (`in_turn`). p50_ms, p99_ms: of a call; images_per_second: one call
    after the other; speedup: how many times as fast as the first run, the ratio of the medians; interval: 95 % of it;
    waited: wall time over processor time, where one thread does all the work.
    """
    first = next(iter(times.values())).wall
    rows = []
    for name, value in times.items():
        low, high = ratio_interval(first, value.wall)
        rows.append(
            {
                "run": name,
                "threads": threads,
                "batch_size": batch,
                "calls": len(value.wall),
                "p50_ms": 1000 * float(np.median(value.wall)),
                "p99_ms": 1000 * float(np.percentile(value.wall, 99)),
                "images_per_second": batch * len(value.wall) / float(value.wall.sum()),
                "speedup": float(np.median(first) / np.median(value.wall)),
                "interval": [low, high],
                "waited": float(value.wall.sum() / value.cpu.sum()) if threads == 1 else None,
            }
        )
    return rows


def ratio_interval(first: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of median(first) / median(other), both (R,), measured in the same R rounds.

    Rounds are drawn again 1,000 times, the same for both, so that what slowed both in a round does so in each draw; in
    blocks of about sqrt(R) rounds that follow one another, because what disturbs one round disturbs the next (the
    circular block bootstrap: Politis and Romano 1992).
    """
    count = len(first)
    length = max(round(count**0.5), 1)
    random = np.random.default_rng(0)
    ratios = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        starts = random.integers(0, count, -(-count // length))
        rounds = ((starts[:, None] + np.arange(length)) % count).ravel()[:count]
        ratios[number] = np.median(first[rounds]) / np.median(other[rounds])
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _open(config: BenchConfig) -> dict[str, Served]:
    """Return the runs by name: that of the folder, or its path where two folders have the same."""
    names = [path.resolve().name for path in config.source]
    served: dict[str, Served] = {}
    for path, name in zip(config.source, names, strict=True):
        key = name if names.count(name) == 1 else str(path)
        if key in served:
            raise ConfigError(f"--source names {path} twice; give each run once.")
        served[key] = open_served(Run.open(path), provider=config.provider)
    return served


def _machine(provider: Provider) -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": all_cores(),
        "int8": "exact" if int8_is_exact() else "saturating",
        "gpu": None if provider == "cpu" else _gpu_name(),
    }


def _gpu_name() -> str | None:
    """Return what the driver calls the first GPU, which sessions take, or None where there is no nvidia-smi."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.splitlines()), None) if answer.returncode == 0 else None


def _identity(name: str, one: Served) -> dict[str, Any]:
    return {
        "run": name,
        "path": str(one.run.path),
        "sha256": sha256(one.run.path / "run.json"),
        "arch": one.run.model["arch"],
        "file": one.path.name,
        "bytes": one.path.stat().st_size,
        "input_size": list(one.preprocess.input_size),
    }


def _described(one: Served) -> str:
    _, height, width = one.preprocess.input_size
    size = bytes_text(one.path.stat().st_size)
    return f"{one.run.model['arch']}: {one.path.name}, {size}, {height}x{width}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _show(report: Mapping[str, Any]) -> None:
    terminal = cli.context().terminal
    several = len(report["runs"]) > 1
    header = ["threads", "images", "run", "p50 ms", "p99 ms", "images/s"]
    rows = []
    for row in report["measurements"]:
        cells = [str(row["threads"]), str(row["batch_size"]), row["run"]]
        cells += [*(ms_number(row[key] / 1000) for key in ("p50_ms", "p99_ms")), f"{row['images_per_second']:.4g}"]
        if several:
            first = row["run"] == report["runs"][0]["run"]
            low, high = row["interval"]
            cells.append("1" if first else f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})")
        rows.append(cells)
    terminal.grid([*header, *(["times as fast (95 %)"] if several else [])], rows)
    terminal.grid(
        ("run", "file", "load ms", "memory", "at its peak"),
        [
            (
                run["run"],
                bytes_text(run["bytes"]),
                ms_number(run["load_seconds"]),
                bytes_text(run["loaded_bytes"]),
                "not known here" if run["peak_bytes"] is None else bytes_text(run["peak_bytes"]),
            )
            for run in report["runs"]
        ],
    )
    busiest = max((row["waited"] for row in report["measurements"] if row["waited"] is not None), default=None)
    busy = busy_text(busiest)
    if busy is not None and report["provider"] == "cpu":
        terminal.warn(busy)


def _picture(path: Path, report: Mapping[str, Any]) -> None:
    terminal = cli.context().terminal
    files = [str(path.with_suffix(".json"))]
    try:
        from dsimg_export.plots import draw_bench
    except ImportError:
        terminal.say(f"no {path.name}: there is no matplotlib here (pip install matplotlib)")
    else:
        draw_bench(path, report)
        files.append(str(path))
    terminal.say(f"written: {', '.join(files)}")


if __name__ == "__main__":
    cli.run(bench)
