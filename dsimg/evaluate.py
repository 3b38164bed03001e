"""Measure a run on a folder of images, each image once, on any number of ranks: the numbers that training reports.

dsimg evaluate --source RUN --data DIR
deepspeed dsimg/evaluate.py --source RUN --data DIR
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsimg import cli, data, loop, models
from dsimg.console import count_text
from dsimg.ds_config import StageDefaults, resolve_ds_config
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.errors import ConfigError, DataError, RunError
from dsimg.folder import Split, find_labelled, read_index
from dsimg.forward import inference_forward
from dsimg.preprocess import Preprocess
from dsimg.run import Run
from dsimg.weights import open_network
from dsimg.workers import decoding_workers
from dsimg.world import World, bf16_is_fast, start_world


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
    """Processes per rank that decode images. Default: the cores of this machine shared among its ranks, at most 8."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch_size is {self.batch_size}; it must be at least 1.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be 0 or more.")


def evaluate(config: EvaluateConfig) -> loop.Evaluation | None:
    """Measure a run on a folder of images, each image once on any number of ranks. Rank 0 gets the result."""
    run = Run.open(config.source)
    described = run.model
    classes: list[str] = described["classes"]
    preprocess = Preprocess.from_dict(described["preprocess"])
    settings = _deepspeed_settings(config)
    world = start_world()
    terminal = cli.context().terminal
    split, notes = world.on_rank_zero(lambda: _find_split(run, config.data, classes))
    model = open_network(run)
    out = config.out or run.path / "evaluations" / _name(config.data)
    world.on_rank_zero(lambda: _make_folder(out))
    resolved, precision = _resolve(settings, model, world, config)
    workers = decoding_workers(world.local_size) if config.workers is None else config.workers
    rows = [
        ("run", str(run.path)),
        ("model", f"{described['arch']}: {count_text(models.count_parameters(model))} parameters, {precision}"),
        ("data", f"{split.folder}: {len(split.files):,} images, {len(classes)} classes"),
        *(("", note) for note in notes),
        ("world", f"{world.size} rank{'s' if world.size > 1 else ''}, {config.batch_size} images each a forward"),
    ]
    terminal.table("plan", rows)
    forward = inference_forward(model, config=resolved, world=world)
    batches = data.EvalLoader(
        split,
        preprocess,
        batch_size=config.batch_size,
        rank=world.rank,
        world=world.size,
        workers=workers,
        pin=world.device.type == "cuda",
    )
    try:
        result = loop.evaluate(
            forward, world=world, batches=batches, split=split, preprocess=preprocess, classes=classes
        )
    except torch.cuda.OutOfMemoryError as error:
        remedy = "Give a smaller --batch_size, more ranks with --deepspeed_config zero3, or bf16 in its JSON."
        raise world.out_of_memory(remedy) from error
    if result is not None:
        loop.write_evaluation(out, result, classes)
        terminal.table("result", [*loop.result_rows(result.report), ("report", str(out / "evaluation.json"))])
        terminal.grid(("class", "images", "right", "accuracy"), _worst_classes(result.report))
    return result


def _make_folder(out: Path) -> None:
    """Make the folder of an evaluation. Raises RunError when it is a run, whose own evaluation would be replaced."""
    if out.is_dir() and any((out / name).exists() for name in ("run.json", "config.json")):
        raise RunError(f"--out {out} is a run folder. Choose another one for the evaluation.")
    out.mkdir(parents=True, exist_ok=True)


def _name(folder: str | None) -> str:
    """Return the folder of an evaluation: the data's name and a mark of its path, since many are called "val"."""
    if folder is None:
        return "held_out"
    path = Path(folder).resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def _find_split(run: Run, folder: str | None, classes: list[str]) -> tuple[Split, tuple[str, ...]]:
    """Return the images to measure on. The folder that the run was trained on gives what training held out."""
    index = read_index(run.file("index"))
    held_out = ("the images that training held out",)
    if folder is None and not index.val.folder.is_dir():
        raise DataError(
            f"{index.val.folder}, which the run was trained with, is not there. Give its place now with --data."
        )
    if folder is None or Path(folder).resolve() == index.root.resolve():
        return index.val, held_out
    moved = Path(folder) / index.val.folder.relative_to(index.root)
    drawn = index.val.folder == index.train.folder  # no val/ folder: a share of each class was drawn
    if drawn and all((moved / file).is_file() for file in index.val.files):
        return Split(moved, index.val.files, index.val.labels), held_out
    return find_labelled(Path(folder), classes)


def _deepspeed_settings(config: EvaluateConfig) -> tuple[dict[str, Any], str] | None:
    if config.deepspeed_config is None:
        return None
    path = find_ds_config(config.deepspeed_config)
    return read_ds_config(path), str(path)


def _resolve(
    settings: tuple[dict[str, Any], str] | None, model: Any, world: World, config: EvaluateConfig
) -> tuple[dict[str, Any] | None, str]:
    """Return the resolved JSON, or None without one, and the precision in words."""
    if settings is None:
        return None, "fp32"
    raw, source = settings
    kept = {key: value for key, value in raw.items() if key not in ("optimizer", "scheduler")}
    ds = resolve_ds_config(
        {
            **kept,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 1,
        },
        source=source,
        world_size=world.size,
        device=world.device.type,
        has_batchnorm=models.has_batchnorm(model),
        bf16_fast=world.on_rank_zero(lambda: bf16_is_fast(world.device)),
        parameter_count=models.count_parameters(model),
        defaults=StageDefaults(
            batch_size=config.batch_size * world.size,
            lr=0.0,
            weight_decay=0.0,
            momentum=0.0,
            optimizer=None,
            total_steps=1,
            warmup_steps=0,
            gradient_clipping=None,
        ),
    )
    return ds.config, f"ZeRO stage {ds.zero_stage}, {ds.precision}"


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
