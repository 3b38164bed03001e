"""Measure a run on a folder of images, each image once, on any number of ranks: the numbers that training reports.

dsimg evaluate --source RUN --data DIR
deepspeed dsimg/evaluate.py --source RUN --data DIR

A run with an ONNX file is measured by ONNX Runtime, on a host that may have no torch; the report is the same.
"""

import hashlib
import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dsimg import cli
from dsimg.console import count_text
from dsimg.errors import ConfigError
from dsimg.evaluation import Evaluation, find_split, result_rows, write_evaluation
from dsimg.processor import all_cores
from dsimg.run import Run, make_folder


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
    provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    """Where ONNX Runtime runs the file; one that is not there is an error."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch_size is {self.batch_size}; it must be at least 1.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be 0 or more.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1.")


def evaluate(config: EvaluateConfig) -> Evaluation | None:
    """Measure a run on a folder of images, each image once on any number of ranks. Rank 0 gets the result."""
    run = Run.open(config.source)
    if run.has("model"):
        result: Evaluation | None = _evaluate_file(run, config)
    else:
        if config.threads is not None or config.provider != "cpu":
            raise ConfigError(
                f"--threads and --provider are ONNX Runtime's, and {run.path} has no ONNX file. Leave them out, or "
                "export the run first: dsimg export."
            )
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(f"{run.path} is a network of torch's: pip install 'dsimg[train]', or export it first.")
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
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(f"{run.path} has an ONNX file: pip install 'dsimg[serve]', or 'dsimg[serve-gpu]'.")
    from dsimg_export.measuring import evaluate_session
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
            ("model", f"{block['arch']}: {served.path.name}, {count_text(served.path.stat().st_size)}B"),
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
    measured = {"file": served.path.name, "role": served.role, "provider": config.provider}
    return replace(result, report={**result.report, "measured": measured})


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
