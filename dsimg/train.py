"""Train an image classifier with DeepSpeed: the first stage.

deepspeed dsimg/train.py --deepspeed_config ds_configs/zero2.json --data DIR --model resnet50 --out RUN --epochs 90
"""

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsimg import cli, data, loop, models
from dsimg.cache import free_memory
from dsimg.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.ds_lint import lint_ds_config
from dsimg.engine import Engine
from dsimg.errors import DataError, RunError
from dsimg.folder import write_index
from dsimg.losses import cross_entropy, mixed_cross_entropy
from dsimg.meter import Meter, MetricsFile
from dsimg.plan import DEFAULT_BATCH_SIZE, TrainPlan, check_against_json, data_path, json_lr, plan_training
from dsimg.preprocess import Preprocess
from dsimg.recipe import TrainConfig
from dsimg.run import Run, State, hold_lock, write_atomically, write_json
from dsimg.weights import save_weights
from dsimg.workers import decoding_workers
from dsimg.world import World, start_world

__all__ = ["TrainConfig", "train"]

BAD_IMAGES = "bad_images.jsonl"

# What may differ when the same run is started again: none of it changes what is learned.
FREE = ("deepspeed_config", "out", "overwrite", "workers", "cache", "log_steps", "eval_epochs")


def train(config: TrainConfig) -> Run:
    """Train an image classifier with DeepSpeed, on any number of ranks, into a run folder."""
    ds_path = find_ds_config(config.deepspeed_config)
    raw = read_ds_config(ds_path)
    sizes = lint_ds_config(
        raw,
        source=str(ds_path),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        batch_size=config.batch_size or DEFAULT_BATCH_SIZE,
        batch_size_given=config.batch_size is not None,
        optimizer=config.optimizer,
        gradient_clipping=config.gradient_clipping,
    )
    check_against_json(config, raw, source=str(ds_path))
    world = start_world()
    path = config.run_path
    state: State = world.on_rank_zero(lambda: _run_state(path, config))
    if state == "finished":
        cli.context().terminal.say(
            f"{path} is a finished run of this very config: nothing to do. --overwrite trains it again."
        )
        return Run.open(path)
    try:
        return _train(config, raw, ds_source=str(ds_path), batch_size=sizes.batch_size, world=world)
    except torch.cuda.OutOfMemoryError as error:
        raise world.out_of_memory(
            "Halve train_micro_batch_size_per_gpu (and double gradient_accumulation_steps), add "
            "--gradient_checkpointing, or use a higher ZeRO stage (--deepspeed_config zero3, or zero3_offload). The "
            "same command then goes on from the last checkpoint."
        ) from error


def _run_state(path: Path, config: TrainConfig) -> State:
    """Tell what is in `path`, before anything else is looked at. Raises RunError when it is not this run."""
    state = Run.state(path)
    if state == "new" or config.overwrite:
        return "new"
    return Run.begin(path, stage="train", config=_as_json(config), free=FREE)[1]


def _last_checkpoint(path: Path, config: TrainConfig) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint of an unfinished run, and what it was saved with."""
    found = [] if config.overwrite else checkpoints(path / "checkpoints")
    return (found[-1], read_state(found[-1])) if found else (None, {})


def _begin(path: Path, config: TrainConfig, setup: TrainPlan, *, resuming: bool) -> None:
    """Make the run folder, or find it again, with what is known before the first step."""
    if Run.state(path) != "new":
        hold_lock(path)  # before --overwrite removes what another process may be writing
    weights = [Path(config.weights)] if config.weights is not None and Path(config.weights).exists() else []
    parents = [Run.open(path) for path in weights if path.is_dir() and not resuming]
    Run.begin(
        path,
        stage="train",
        config=_as_json(config),
        free=FREE,
        parents=parents,
        reads=[setup.folder.train.folder, setup.folder.val.folder, *weights],
        overwrite=config.overwrite,
    )
    hold_lock(path)
    write_json(path / "ds_config.json", setup.ds.config)
    labels = "".join(f"{name}\n" for name in setup.folder.classes)
    write_atomically(path / "labels.txt", labels.encode("utf-8", "surrogateescape"))
    if not resuming:
        write_index(setup.folder, path / "index.jsonl.gz")


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(config).items()}


def _train(config: TrainConfig, raw: dict[str, Any], *, ds_source: str, batch_size: int, world: World) -> Run:
    context = cli.context()
    terminal, path = context.terminal, config.run_path
    torch.manual_seed(config.seed)
    saved, state = world.on_rank_zero(lambda: _last_checkpoint(path, config))
    setup = plan_training(
        config,
        raw,
        ds_source=ds_source,
        batch_size=batch_size,
        world=world,
        index=path / "index.jsonl.gz" if saved else None,
        preprocess=Preprocess.from_dict(state["preprocess"]) if saved else None,
    )
    # What a DeepSpeed JSON may not change between a stop and a resume.
    same = {
        "batch_size": setup.plan.batch_size,
        "optimizer": setup.optimizer_name,
        "scheduler_type": setup.ds.scheduler and setup.ds.scheduler["type"],
    }
    changed = [f"{key} was {state[key]}, now {value}" for key, value in same.items() if saved and state[key] != value]
    if changed:
        raise RunError(
            f"{path} cannot go on: {'; '.join(changed)}. Give the DeepSpeed JSON it was started with, or --overwrite."
        )
    terminal.table("plan", setup.rows)
    world.on_rank_zero(lambda: _begin(path, config, setup, resuming=saved is not None))
    if context.chatter is not None:
        context.chatter.move_to(path / "logs" / f"rank_{world.rank}.log")
    run = Run(path, None)

    begun = time.perf_counter()
    images = data.TrainImages(
        setup.folder.train,
        setup.preprocess,
        setup.augmentation,
        seed=config.seed,
        ram=setup.cache.ram,
        threads=decoding_workers(world.local_size),
    )
    bad_image_limit = math.floor(config.max_bad_images * len(images))

    def keep_bad_images(bad: dict[str, str]) -> None:
        """Name new ones, list all in the run, and stop when they are too many."""
        found = _keep_bad_images(run, bad, world)
        if found > bad_image_limit:
            raise DataError(
                f"{found} of {len(images)} training images cannot be decoded, more than --max_bad_images "
                f"{config.max_bad_images:g} (a share) allows. {path / BAD_IMAGES} lists them with their reasons: "
                "mend or remove them, or raise --max_bad_images."
            )

    keep_bad_images(images.bad)
    if setup.cache.ram:
        seconds = time.perf_counter() - begun
        terminal.say(
            f"{len(images):,} images decoded into RAM in {seconds:.1f} s, {len(images.bad)} of them unreadable"
        )
    cuda = world.device.type == "cuda"
    loader = data.TrainLoader(images, setup.plan, rank=world.rank, workers=setup.workers, prefetch=cuda, pin=cuda)
    validation = data.EvalLoader(
        setup.folder.val,
        setup.preprocess,
        batch_size=max(32, setup.plan.micro),
        rank=world.rank,
        world=world.size,
        workers=setup.workers,
        cache_bytes=free_memory() // (8 * world.local_size),
        pin=cuda,
    )
    engine = Engine(
        setup.model,
        config=setup.ds.config,
        groups=models.parameter_groups(setup.model, setup.weight_decay),
        optimizer=setup.optimizer,
        lr=setup.schedule.peak if setup.schedule else json_lr(setup.ds, default=0.0),
        world=world,
        ema_decay=config.ema,
    )
    start_epoch, step = 0, 0
    if saved is not None:
        load_checkpoint(saved, engine)
        engine.load_counters(state["engine"])
        start_epoch, step = state["epoch"], state["step"]
        terminal.say(f"resuming after epoch {start_epoch}, step {step}, from {saved}")
    meter = Meter(
        engine,
        steps_per_epoch=setup.plan.steps,
        images_per_epoch=setup.plan.samples,
        batch_size=setup.plan.batch_size,
        epochs=config.epochs,
        start_step=step,
        log_steps=config.log_steps,
        file=MetricsFile(path / "metrics.jsonl", step=step, rank=world.rank),
        terminal=terminal,
    )

    def measure() -> loop.Evaluation | None:
        engine.eval()
        with engine.ema_weights():
            return loop.evaluate(
                engine.forward,
                world=world,
                batches=validation,
                split=setup.folder.val,
                preprocess=setup.preprocess,
                classes=setup.folder.classes,
            )

    result: loop.Evaluation | None = None

    def end_of_epoch(epoch: int, step: int) -> None:
        nonlocal result
        result = None
        engine.pool_batchnorm()
        if epoch % config.eval_epochs == 0 or epoch == config.epochs:
            result = measure()
            if result is not None:
                meter.evaluated(result.report, epoch=epoch, step=step)
                terminal.say(f"epoch {epoch}/{config.epochs}  validation  {_accuracy_text(result.report)}")
        keep_bad_images(loader.bad)
        state = {"step": step, "epoch": epoch, "engine": engine.counters(), **same}
        state["preprocess"] = setup.preprocess.as_dict()
        save_checkpoint(path / "checkpoints", engine, state)

    loop.fit(
        engine,
        loader=loader,
        preprocess=setup.preprocess,
        loss=_classification_loss(config.label_smoothing),
        schedule=setup.schedule,
        seed=config.seed,
        mixup=config.mixup,
        cutmix=config.cutmix,
        start_epoch=start_epoch,
        epochs=config.epochs,
        bad_image_limit=bad_image_limit,
        meter=meter,
        too_many_bad_images=lambda: keep_bad_images(loader.bad),
        end_of_epoch=end_of_epoch,
    )
    if start_epoch == config.epochs:  # the run stopped between its last checkpoint and its end
        result = measure()
    with engine.ema_weights():
        weights = engine.full_state()
    loader.close()
    world.on_rank_zero(lambda: _finish(run, config, setup, weights, result, engine))
    return Run.open(path)


def _finish(
    run: Run,
    config: TrainConfig,
    setup: TrainPlan,
    weights: dict[str, Tensor],
    result: loop.Evaluation | None,
    engine: Engine,
) -> None:
    """Write the run's last files and its manifest, and show the result."""
    assert result is not None
    terminal = cli.context().terminal
    save_weights(weights, run.path / "weights.safetensors")
    loop.write_evaluation(run.path, result, setup.folder.classes)
    report = result.report
    run.finish(
        seed=config.seed,
        model={
            "arch": setup.arch,
            "num_classes": len(setup.folder.classes),
            "classes": list(setup.folder.classes),
            "preprocess": setup.preprocess.as_dict(),
        },
        metrics={
            "validation": {key: report[key] for key in ("images", "correct", "top1", "top5", "loss")},
            "skipped_steps": engine.skipped_steps,
            "peak_memory_bytes": engine.peak_memory(),
        },
    )
    rows = loop.result_rows(report)
    if engine.skipped_steps:
        rows.append(("skipped steps", f"{engine.skipped_steps}, where the gradient was not finite"))
    rows += [
        ("run", str(run.path)),
        ("next", f"dsimg evaluate --source {run.path} --data {data_path(config)}"),
    ]
    if config.data == "digits":
        rows.append(("your images", "dsimg train --data DIR, with DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"))
    terminal.table("result", rows)


def _classification_loss(label_smoothing: float) -> loop.Loss:
    """Return cross-entropy over the network's logits, and its auxiliary logits where it has them."""

    def loss(output: Any, images: Tensor, targets: loop.Targets) -> Tensor:
        def one(logits: Tensor) -> Tensor:
            if targets.partners is None or targets.lam is None:
                return cross_entropy(logits, targets.labels, label_smoothing=label_smoothing)
            return mixed_cross_entropy(
                logits, targets.labels, targets.partners, targets.lam, label_smoothing=label_smoothing
            )

        logits, auxiliary = models.split_outputs(output)
        total = one(logits)
        for logits, weight in auxiliary:
            total = total + weight * one(logits)
        return total

    return loss


def _accuracy_text(report: dict[str, Any]) -> str:
    text = f"Top-1 {report['top1']['value']:.2%}"
    if report["top5"] is not None:
        text += f"  Top-5 {report['top5']['value']:.2%}"
    return text if report["loss"] is None else f"{text}  loss {report['loss']:.4f}"


def _keep_bad_images(run: Run, bad: dict[str, str], world: World) -> int:
    """Name each undecodable training file once, list them all in the run, and return how many all ranks know."""
    path = run.path / BAD_IMAGES
    together = {file: reason for part in world.gather(bad) for file, reason in part.items()}
    if world.rank != 0 or not together:
        return len(together)
    known = {json.loads(line)["file"] for line in path.read_text().splitlines()} if path.exists() else set()
    fresh = sorted(together.keys() - known)
    for file in fresh[:10]:
        cli.context().terminal.warn(f"cannot decode {file}: {together[file]}; another image of its class stands in")
    if len(fresh) > 10:
        cli.context().terminal.warn(f"and {len(fresh) - 10} more, listed in {path}")
    lines = [json.dumps({"file": file, "reason": reason}) + "\n" for file, reason in sorted(together.items())]
    write_atomically(path, "".join(lines).encode())
    return len(together)


if __name__ == "__main__":
    cli.run(train)
