"""Measure a run on a folder of images, each image once, on any number of ranks: the numbers that training reports.

dsimg evaluate --source RUN --data DIR
deepspeed dsimg/evaluate.py --source RUN --data DIR

A run with an ONNX file is measured by ONNX Runtime, on a host that may have no torch; the report is the same.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsimg import cli
from dsimg.console import bytes_text
from dsimg.errors import ConfigError
from dsimg.evaluation import Evaluation, find_split, result_rows, write_evaluation
from dsimg.machine import all_cores
from dsimg.run import Run, make_folder
from dsimg.runtime import Provider, choose_runtime
from dsimg_export.measuring import evaluate_session, measured_on


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The flags of `dsimg evaluate`."""

    source: Path
    """The run to measure."""
    data: str | None = None
    """A folder with val/ (or valid/, validation/, test/) of class folders, or the class folders themselves. Default,
    and for the folder that the run was trained on: the very images that training held out."""
    out: Path | None = None
    """Where evaluation.json and predictions.csv go. Default: evaluations/ and the data's name, inside the run."""
    batch_size: int = 128
    """Images per rank and forward pass."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON for its ZeRO stage and precision, for networks larger than one device. Default: each rank holds
    the whole network in fp32."""
    workers: int | None = None
    """Processes per rank that decode images; 0 decodes in the rank itself. Default: the cores of this machine shared
    among its ranks, at most 8. For an ONNX file they are threads; 0 and 1 are one, and the default is one a core."""
    threads: int | None = None
    """Threads of ONNX Runtime's session. Default: one a core."""
    provider: Provider = "cpu"
    """Where ONNX Runtime runs the file; one that is not there is an error."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch_size is {self.batch_size}; it must be at least 1.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be 0 or more.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1.")


def evaluate(config: EvaluateConfig) -> Evaluation | None:
    """Measure a run on a folder of images, each image once on any number of ranks.

    In Python: rank 0 gets the result, the others None.
    """
    run = Run.open(config.source)
    if choose_runtime(run, threads=config.threads, provider=config.provider) == "onnxruntime":
        result: Evaluation | None = _evaluate_file(run, config)
    else:
        from dsimg.evaluate_network import evaluate_network

        result = evaluate_network(run, config)
    if result is not None:
        classes = run.model["classes"]
        out = evaluation_folder(config, run)
        terminal = cli.context().terminal
        write_evaluation(out, result, classes)
        terminal.table("result", [*result_rows(result.report), ("report", str(out / "evaluation.json"))])
        terminal.grid(("class", "images", "right", "accuracy"), _worst_classes(result.report))
    return result


def _evaluate_file(run: Run, config: EvaluateConfig) -> Evaluation:
    if config.deepspeed_config is not None:
        raise ConfigError(f"{run.path} has an ONNX file, which DeepSpeed does not run. Leave out --deepspeed_config.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"{run.path} has an ONNX file, which one process measures: dsimg evaluate, no launcher.")
    from dsimg_export.served import open_served

    split, notes = find_split(run, config.data, run.model["classes"])
    threads = config.threads or all_cores()
    served = open_served(run, threads=threads, provider=config.provider)
    evaluation_folder(config, run)
    block = run.model
    cli.context().terminal.table(
        "plan",
        [
            ("run", str(run.path)),
            ("model", f"{block['arch']}: {served.path.name}, {bytes_text(served.path.stat().st_size)}"),
            ("data", f"{split.folder}: {len(split.files):,} images, {len(served.classes)} classes"),
            *(("", note) for note in notes),
            ("session", f"ONNX Runtime, {config.provider}, {threads} thread{'s' * (threads > 1)}"),
        ],
    )
    result = evaluate_session(
        served.logits,
        split=split,
        preprocess=served.preprocess,
        classes=served.classes,
        batch_size=config.batch_size,
        threads=None if config.workers is None else max(config.workers, 1),
    )
    return measured_on(result, file=served.path, role=served.role, provider=config.provider)


def evaluation_folder(config: EvaluateConfig, run: Run) -> Path:
    """Make the folder of an evaluation. Raises RunError as `make_folder`."""
    return make_folder(config.out or run.path / "evaluations" / _name(config.data))


def _name(folder: str | None) -> str:
    """Return the folder of an evaluation: the data's name and a mark of its path, since many are called "val"."""
    if folder is None:
        return "held_out"
    path = Path(folder).resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def _worst_classes(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the ten classes with the lowest accuracy, lowest first."""
    measured = [entry for entry in report["per_class"] if entry["accuracy"] is not None]
    measured.sort(key=lambda entry: entry["accuracy"])
    return [
        (entry["class"], str(entry["images"]), str(entry["correct"]), f"{entry['accuracy']:.1%}")
        for entry in measured[:10]
    ]


if __name__ == "__main__":
    cli.run(evaluate)
