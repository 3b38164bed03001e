"""Say what is on images: the best classes of each, with their probabilities.

dsimg predict --source RUN photo.jpg more_photos/
dsimg predict --source RUN a_million_photos/ --out predictions.csv

A run with an ONNX file is asked through ONNX Runtime, on a host that may have no torch.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dsimg import cli, metrics
from dsimg.errors import ConfigError, DataError
from dsimg.folder import images_below, shown
from dsimg.machine import all_cores
from dsimg.prediction_table import PredictionTable, check_table
from dsimg.preprocess import Preprocess
from dsimg.run import Run, sha256
from dsimg.runtime import Provider, choose_runtime
from dsimg_export.measuring import Answer
from dsimg_export.reading import read_batches

BATCH = 32
CALLERS = 4  # batches in the network at once, each with its own memory there
PROGRESS_SECONDS = 0.1  # between two changes of the live line, which cost as much as some small images
NOT_FINITE = "the network gave NaN or infinity; run `dsimg verify` on the run"


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """The flags of `dsimg predict`."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, and folders of them at any depth."""
    source: Path
    """The run to ask."""
    top: int = 5
    """How many classes to give of each image."""
    json: bool = False
    """Print a JSON object a line for each image instead of a table, as soon as it is known: file and classes, or file
    and error."""
    out: Path | None = None
    """Write a table instead, predictions.csv or .parquet: a row a file, in their order, with the reason where a file
    cannot be read. The same command goes on with one that was stopped; OUT.state.json says what it was made from."""
    overwrite: bool = False
    """Replace what is in --out, once the new table is whole."""
    threads: int | None = None
    """Threads of ONNX Runtime's session and of its callers. Default: one a core."""
    provider: Provider = "cpu"
    """Where ONNX Runtime runs the file; one that is not there is an error."""

    def __post_init__(self) -> None:
        if not self.images:
            raise ConfigError("predict was given no image. Name image files or folders.")
        if self.top < 1:
            raise ConfigError(f"--top is {self.top}; it must be at least 1.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1.")
        if self.out is not None:
            if self.json:
                raise ConfigError("--json prints, and --out writes a table; give one of them.")
            check_table(self.out)


@dataclass(frozen=True)
class Prediction:
    """What the network says of one file: the best classes with their probabilities, or why there are none."""

    file: Path
    classes: tuple[tuple[str, float], ...]
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as a line of `--json`."""
        if self.error is not None:
            return {"file": str(self.file), "error": self.error}
        return {"file": str(self.file), "classes": [{"class": name, "probability": p} for name, p in self.classes]}


def predict(config: PredictConfig) -> list[Prediction]:
    """Say what is on images. A file that cannot be read is named, and the others go on; then the exit code is 2.

    With --out the table says which files those are, and the exit code is 0.

    In Python: returns the predictions; with `out` none.
    """
    run = Run.open(config.source)
    files = [file for given in config.images for file in (images_below(given) if given.is_dir() else [given])]
    if config.out is not None:
        _write_table(config.out, files, run=run, config=config)
        return []
    answer, callers = _answer(run, config, len(files))
    terminal = cli.context().terminal
    found: list[Prediction] = []
    for one in predictions(answer, files, run=run, top=config.top, callers=callers):
        found.append(one)
        if config.json:
            terminal.data(json.dumps(one.as_dict()))
        elif len(files) > BATCH:
            terminal.progress(f"{len(found)} of {len(files)} images")
    terminal.stop_live()
    failed = [one for one in found if one.error is not None]
    if config.json:
        if failed:
            raise SystemExit(2)  # each has said why on its line, and no other line may be between them
        return found
    if len(failed) < len(found):
        terminal.grid(("image", "class", "probability"), _rows(found))
    for one in failed:
        terminal.warn(f"{shown(one.file)}: {one.error}")
    if failed:
        raise DataError(f"{len(failed)} of {len(found)} files gave no prediction: see above, and mend or leave them.")
    return found


def _write_table(out: Path, files: Sequence[Path], *, run: Run, config: PredictConfig) -> None:
    """Write what is said of files as a table, from where an earlier start left it. Raises RunError."""
    terminal = cli.context().terminal
    asked = {"source": sha256(run.path / "run.json"), "provider": config.provider}
    top = min(config.top, len(run.model["classes"]))
    table = PredictionTable(out, files, asked=asked, top=top, overwrite=config.overwrite)
    if not config.overwrite and table.is_finished():
        terminal.say(f"{out} is there, whole: nothing to do. --overwrite makes it again.")
        return
    answer, callers = _answer(run, config, len(files))
    begun = told = time.monotonic()
    with table:
        first = table.rows
        if first:
            terminal.say(f"{first:,} rows of {out} are there; going on")
        for one in predictions(answer, files[first:], run=run, top=table.top, callers=callers):
            table.add(one.file, one.classes, one.error)
            if time.monotonic() - told > PROGRESS_SECONDS or table.rows == len(files):
                told = time.monotonic()
                terminal.progress(_progress_text(table.rows, len(files), (table.rows - first), begun))
        table.finish()
    terminal.stop_live()
    now, seconds = len(files) - first, time.monotonic() - begun
    rows = [
        ("files", f"{len(files):,}, {now:,} of them now, at {now / seconds:,.0f} a second"),
        ("unreadable", f"{table.bad:,}: see the column `error`" if table.bad else "none"),
        ("table", str(out)),
    ]
    terminal.table("predictions", rows)


def _progress_text(done: int, total: int, now: int, begun: float) -> str:
    rate = now / max(time.monotonic() - begun, 1e-9)
    left = round((total - done) / rate) if rate else 0
    return f"{done:,} of {total:,} images  {done / total:.0%}  {rate:,.0f} images/s  ETA {left // 60}:{left % 60:02}"


def predictions(answer: Answer, files: Sequence[Path], *, run: Run, top: int, callers: int = 1) -> Iterator[Prediction]:
    """Yield what is said of each file, in their order. answer: pixels (N, H, W, 3) -> logits (N, C).

    callers: threads that call `answer`, with a batch each.
    """
    preprocess, classes = Preprocess.from_dict(run.model["preprocess"]), run.model["classes"]

    def said(places: NDArray[np.int64], pixels: NDArray[np.uint8], reasons: dict[int, str]) -> dict[int, Prediction]:
        found = {place: Prediction(files[place], (), reason) for place, reason in reasons.items()}
        if len(places):
            for place, best in zip(places.tolist(), metrics.best_classes(answer(pixels), top), strict=True):
                named = () if best is None else tuple((classes[k], share) for k, share in best)
                found[place] = Prediction(files[place], named, NOT_FINITE if best is None else None)
        return found

    done: dict[int, Prediction] = {}
    following = 0
    waiting: deque[Future[dict[int, Prediction]]] = deque()
    batches = read_batches(files, preprocess, batch_size=BATCH)
    with ThreadPoolExecutor(callers, thread_name_prefix="answer") as pool:
        try:
            while True:
                batch = next(batches, None)
                if batch is not None:
                    waiting.append(pool.submit(said, *batch))
                while waiting and (batch is None or len(waiting) > callers):
                    done |= waiting.popleft().result()
                while following in done:
                    yield done.pop(following)
                    following += 1
                if batch is None:
                    break
        finally:
            for future in waiting:
                future.cancel()
    assert not done
    assert following == len(files)


def _answer(run: Run, config: PredictConfig, count: int) -> tuple[Answer, int]:
    """Return the network of a run, and from how many threads it is to be called for so many images."""
    if choose_runtime(run, threads=config.threads, provider=config.provider) == "onnxruntime":
        from dsimg_export.served import open_served

        threads = config.threads or all_cores()
        # The session's threads wait for one another after each operator, its callers never do.
        callers = min(CALLERS, threads, -(-count // BATCH)) if config.provider == "cpu" else 1
        return open_served(run, threads=threads - callers + 1, provider=config.provider).logits, callers
    from dsimg.predict_network import network_answer

    return network_answer(run), 1


def _rows(found: Sequence[Prediction]) -> list[tuple[str, str, str]]:
    """Return the lines of the table: an image's name beside its best class only."""
    return [
        (shown(one.file) if place == 0 else "", shown(name), f"{share:.2%}")
        for one in found
        for place, (name, share) in enumerate(one.classes)
    ]


if __name__ == "__main__":
    cli.run(predict)
