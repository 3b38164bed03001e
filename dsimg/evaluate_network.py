"""Measure a training run on any number of ranks, through DeepSpeed where it is asked for: what `dsimg evaluate` does
with a network of torch's."""

from typing import Any

import torch

from dsimg import cli, data, loop, models
from dsimg.console import count_text
from dsimg.ds_config import StageDefaults, resolve_ds_config
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.evaluate import EvaluateConfig, evaluation_folder
from dsimg.evaluation import Evaluation, find_split
from dsimg.forward import inference_forward
from dsimg.preprocess import Preprocess
from dsimg.run import Run
from dsimg.weights import open_network
from dsimg.workers import decoding_workers
from dsimg.world import World, bf16_is_fast, start_world


def evaluate_network(run: Run, config: EvaluateConfig) -> Evaluation | None:
    """Measure a run's network, each image once on any number of ranks. Rank 0 gets the result."""
    described = run.model
    classes: list[str] = described["classes"]
    preprocess = Preprocess.from_dict(described["preprocess"])
    settings = _deepspeed_settings(config)
    world = start_world()
    terminal = cli.context().terminal
    split, notes = world.on_rank_zero(lambda: find_split(run, config.data, classes))
    model = open_network(run)
    world.on_rank_zero(lambda: evaluation_folder(config, run))
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
        return loop.evaluate(forward, world=world, batches=batches, split=split, preprocess=preprocess, classes=classes)
    except torch.cuda.OutOfMemoryError as error:
        remedy = "Give a smaller --batch_size, more ranks with --deepspeed_config zero3, or bf16 in its JSON."
        raise world.out_of_memory(remedy) from error


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
