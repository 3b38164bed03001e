"""A run's training from its plan to its last epoch, for every stage that trains: data, engine, checkpoints, evaluation.

Stages differ in what they plan and in the loss; what they make of the result is theirs.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dsimg import cli, data, loop, models
from dsimg.cache import free_memory
from dsimg.checkpoint import Saver, load_checkpoint
from dsimg.control import Control, Limits, Position
from dsimg.engine import Engine
from dsimg.errors import DataError
from dsimg.evaluation import Evaluation
from dsimg.health import Health
from dsimg.meter import Meter, MetricsFile
from dsimg.plan import TrainPlan, json_lr
from dsimg.preprocess import Preprocess
from dsimg.recipe import Recipe
from dsimg.run import Run, write_atomically
from dsimg.stop import StopWatch
from dsimg.watch import RankWatch
from dsimg.workers import decoding_workers
from dsimg.world import World

BAD_IMAGES = "bad_images.jsonl"
DIVERGENCE = "divergence.json"


@dataclass(frozen=True)
class Trained:
    """What training leaves: the engine with its weights, and on rank 0 the evaluation after the last epoch."""

    engine: Engine
    saver: Saver
    result: Evaluation | None
    seconds: float  # of this start, without evaluations
    stepped: bool  # whether this start had anything left to train


def fit_run(
    run: Run,
    config: Recipe,
    setup: TrainPlan,
    *,
    world: World,
    resumed: tuple[Path, dict[str, Any]] | None,
    loss: loop.Loss,
    stop: StopWatch,
    watch: RankWatch | None,
) -> Trained:
    """Train a run that has been begun, from the start or from the checkpoint and state `resumed`, to its last epoch.

    Raises StopRequested after a save, and whatever ends a run that is not healthy.
    """
    terminal, path = cli.context().terminal, run.path
    saved, state = resumed or (None, {})
    begun = time.perf_counter()
    evaluating = 0.0
    images = data.TrainImages(
        setup.folder.train,
        setup.network.preprocess,
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
    validation = _validation_batches(setup.network.preprocess, setup, world)
    engine = Engine(
        setup.network.model,
        config=setup.ds.config,
        groups=models.parameter_groups(setup.network.model, setup.weight_decay),
        optimizer=setup.optimizer,
        lr=setup.schedule.peak if setup.schedule else json_lr(setup.ds, default=0.0),
        world=world,
        ema_decay=config.ema,
    )
    start = Position()
    if saved is not None:
        load_checkpoint(saved, state, engine)
        engine.load_counters(state["engine"])
        start = Position(epoch=state["epoch"], epoch_step=state["epoch_step"], step=state["step"])
        within = f" and {start.epoch_step} steps" if start.epoch_step else ""
        terminal.say(f"resuming after epoch {start.epoch}{within}, step {start.step}, from {saved}")
    lenient = config.on_save_error == "continue"
    file = MetricsFile(path / "metrics.jsonl", step=start.step, rank=world.rank, keep_trying=lenient)
    meter = Meter(
        engine,
        steps_per_epoch=setup.plan.steps,
        images_per_epoch=setup.plan.samples,
        batch_size=setup.plan.batch_size,
        epochs=config.epochs,
        start_step=start.step,
        log_steps=config.log_steps,
        file=file,
        terminal=terminal,
        state=state.get("meter"),
    )
    health = Health(engine, max_skipped=config.max_skipped_steps, state=state.get("health"))
    saver = Saver(
        path / "checkpoints",
        engine,
        keep=config.keep_checkpoints,
        on_error=config.on_save_error,
        saved_step=start.step if saved else None,
        terminal=terminal,
    )

    def state_at(position: Position) -> dict[str, Any]:
        return {
            **dataclasses.asdict(position),
            **setup.must_stay(),
            "model": setup.network.saved(setup.folder.classes),
            "engine": engine.counters(),
            "meter": meter.state(),
            "health": health.state(),
        }

    control = Control(
        engine,
        start=start,
        limits=Limits(
            save_minutes=config.save_minutes,
            max_steps=config.max_steps,
            max_hours=config.max_hours,
            stop_file=config.stop_file,
            grace_seconds=config.grace_seconds,
            bad_images=bad_image_limit,
        ),
        meter=meter,
        health=health,
        saver=saver,
        state=state_at,
        # In RAM, every rank knows them all and they were counted before.
        count_bad_images=lambda: 0 if images.in_ram else len(loader.bad),
        too_many_bad_images=lambda: keep_bad_images(loader.bad),
        divergence_file=path / DIVERGENCE,
        stop=stop,
        watch=watch,
        terminal=terminal,
    )
    result: Evaluation | None = None

    def evaluate(position: Position) -> None:
        """Measure after an epoch, where that is due and was not done before the run stopped."""
        nonlocal result, evaluating
        result, final = None, position.epoch == config.epochs
        keep_bad_images(loader.bad)
        done = world.on_rank_zero(lambda: file.was_evaluated(position.step))
        if not final and (done or position.epoch % config.eval_epochs != 0):
            return
        begun = time.perf_counter()
        engine.eval()
        with engine.ema_weights():
            result = loop.evaluate(
                engine.forward,
                world=world,
                batches=validation,
                split=setup.folder.val,
                preprocess=setup.network.preprocess,
                classes=setup.folder.classes,
                between=lambda: control.evaluating(position),
            )
        if result is not None:
            if not done:
                meter.evaluated(result.report, epoch=position.epoch, step=position.step)
            terminal.say(f"epoch {position.epoch}/{config.epochs}  validation  {_accuracy_text(result.report)}")
        seconds = time.perf_counter() - begun
        evaluating += seconds
        meter.pause(seconds)

    begun = time.perf_counter()
    loop.fit(
        engine,
        loader=loader,
        preprocess=setup.network.preprocess,
        loss=loss,
        schedule=setup.schedule,
        seed=config.seed,
        mixup=config.mixup,
        cutmix=config.cutmix,
        start=start,
        epochs=config.epochs,
        meter=meter,
        control=control,
        evaluate=evaluate,
    )
    loader.close()
    seconds = time.perf_counter() - begun - evaluating
    return Trained(engine, saver, result, seconds, start.epoch < config.epochs)


def _validation_batches(preprocess: Preprocess, setup: TrainPlan, world: World) -> data.EvalLoader:
    """Return this rank's validation images, for a network that takes them so; kept in memory where they are small."""
    return data.EvalLoader(
        setup.folder.val,
        preprocess,
        batch_size=max(32, setup.plan.micro),
        rank=world.rank,
        world=world.size,
        workers=setup.workers,
        cache_bytes=free_memory() // (8 * world.local_size),
        pin=world.device.type == "cuda",
    )


def evaluate_on_validation(
    forward: Callable[[Tensor], Any], preprocess: Preprocess, setup: TrainPlan, world: World
) -> Evaluation | None:
    """Measure a network that takes images so on a plan's validation images; as `loop.evaluate`, on all ranks."""
    return loop.evaluate(
        forward,
        world=world,
        batches=_validation_batches(preprocess, setup, world),
        split=setup.folder.val,
        preprocess=preprocess,
        classes=setup.folder.classes,
    )


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
    lines = path.read_text().splitlines() if path.exists() else []
    known: dict[str, str] = {}  # also by starts before this one
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that someone has damaged
            entry = json.loads(line)
            known[entry["file"]] = entry["reason"]
    fresh = sorted(together.keys() - known.keys())
    for file in fresh[:10]:
        cli.context().terminal.warn(f"cannot decode {file}: {together[file]}; another image of its class stands in")
    if len(fresh) > 10:
        cli.context().terminal.warn(f"and {len(fresh) - 10} more, listed in {path}")
    known |= together
    lines = [json.dumps({"file": file, "reason": reason}) + "\n" for file, reason in sorted(known.items())]
    write_atomically(path, "".join(lines).encode())
    return len(together)
