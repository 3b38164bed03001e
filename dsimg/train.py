"""Train an image classifier with DeepSpeed: the first stage.

deepspeed dsimg/train.py --deepspeed_config ds_configs/zero2.json --data DIR --model resnet50 --out RUN --epochs 90
"""

import dataclasses
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsimg import cli, loop, models
from dsimg.checkpoint import choose_checkpoint, set_aside_newer
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.ds_lint import lint_ds_config
from dsimg.errors import RunError, StopRequested
from dsimg.folder import write_index
from dsimg.losses import cross_entropy, mixed_cross_entropy
from dsimg.plan import DEFAULT_BATCH_SIZE, TrainPlan, check_against_json, data_path, plan_training
from dsimg.preprocess import Preprocess
from dsimg.recipe import TrainConfig
from dsimg.run import Run, State, hold_lock, write_atomically, write_json
from dsimg.session import Trained, fit_run
from dsimg.stop import STOPPED, StopWatch, check_stop_file, reason_text
from dsimg.watch import RankWatch, open_store
from dsimg.weights import save_weights
from dsimg.world import World, start_world

__all__ = ["TrainConfig", "train"]

LOCK_SECONDS = 20.0

# What may differ when the same run is started again: none of it changes what is learned.
FREE = (
    "deepspeed_config",
    "out",
    "overwrite",
    "workers",
    "cache",
    "log_steps",
    "eval_epochs",
    "save_minutes",
    "keep_checkpoints",
    "on_save_error",
    "max_steps",
    "max_hours",
    "stop_file",
    "grace_seconds",
    "on_exit",
    "max_skipped_steps",
    "rank_timeout",
)


def train(config: TrainConfig) -> Run:
    """Train an image classifier with DeepSpeed, on any number of ranks, into a run folder.

    Asked to stop, it saves and ends with exit code 75 (in Python: StopRequested); the same command goes on.
    """
    context = cli.context()
    leaves = context.chatter is not None  # a command ends its process; a call from Python gets exceptions

    def at_once(reason: str, code: int) -> None:
        if leaves:
            text = reason_text(reason, stop_file=config.stop_file, max_hours=config.max_hours)
            if reason == "max_hours":  # the same command would never get further
                cli.leave(2, f"error: {text} are over before the first step. Give more.")
            when = "before the first step" if code == STOPPED else "at once, asked twice"
            cli.leave(code, f"stopped by {text} {when}. The checkpoints are untouched; the same command goes on.")

    world: World | None = None
    context.at_exit = lambda code, text: _at_exit(config, world, code, text)
    stop = StopWatch(stop_file=config.stop_file, max_hours=config.max_hours, at_once=at_once, signals=leaves)
    context.was_asked_to_end = lambda: stop.reason is not None
    watch: RankWatch | None = None
    planned = False
    try:
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
        world = start_world(collective_seconds=2 * config.rank_timeout)
        path = config.run_path
        state: State = world.on_rank_zero(lambda: _run_state(path, config))
        if state == "finished":
            context.terminal.say(
                f"{path} is a finished run of this very config: nothing to do. --overwrite trains it again."
            )
            return Run.open(path)
        if world.size > 1:
            watch = RankWatch(
                rank=world.rank,
                size=world.size,
                store=open_store(),
                timeout=config.rank_timeout,
                on_loss=lambda text: cli.leave(1, f"error: {text}"),
            )
            context.explain = watch.explain
        run = _train(
            dataclasses.replace(config, overwrite=config.overwrite and state == "new"),
            raw,
            ds_source=str(ds_path),
            batch_size=sizes.batch_size,
            world=world,
            stop=stop,
            watch=watch,
        )
        planned = True
        return run
    except StopRequested:
        assert world is not None
        world.barrier()  # none leaves, and makes a launcher end the others, before all have saved
        planned = True
        raise
    except torch.cuda.OutOfMemoryError as error:
        assert world is not None
        raise world.out_of_memory(
            "Halve train_micro_batch_size_per_gpu (and double gradient_accumulation_steps), add "
            "--gradient_checkpointing, or use a higher ZeRO stage (--deepspeed_config zero3, or zero3_offload). The "
            "same command then goes on from the last checkpoint."
        ) from error
    finally:
        if not leaves:  # a command keeps its handlers: the launcher's SIGTERM must not cut its last words short
            stop.close()
        # Else it has yet to explain what became of another rank, or to see this one end.
        if watch is not None and (planned or not leaves):
            watch.close()


def _at_exit(config: TrainConfig, world: World | None, code: int, text: str) -> None:
    """Run --on_exit on rank 0, as the last thing of the command."""
    if config.on_exit is None:
        return
    if int(os.environ.get("RANK", "0")) == 0:
        outcome = {0: "done", STOPPED: "stopped"}.get(code, "failed")
        told = {
            "DSIMG_OUTCOME": outcome,
            "DSIMG_EXIT_CODE": str(code),
            "DSIMG_RUN": str(config.run_path.resolve()),
            "DSIMG_MESSAGE": text,
        }
        done = subprocess.run(config.on_exit, shell=True, env={**os.environ, **told}, check=False)
        if done.returncode:
            cli.context().terminal.warn(
                f"--on_exit ended with exit code {done.returncode}; what it said is in the log of rank 0"
            )
    if world is not None and code in (0, STOPPED) and threading.current_thread() is threading.main_thread():
        world.barrier()  # a launcher would kill rank 0 after the others' exit


def _run_state(path: Path, config: TrainConfig) -> State:
    """Tell what is in `path`, before anything else is looked at. Raises RunError when it is not this run.

    What --overwrite is to replace is "new"; but not what it has begun: the same command goes on with that.
    """
    if Run.state(path) == "new":
        return "new"
    begun_so = tuple(key for key in FREE if key != "overwrite")
    if config.overwrite and not Run.was_begun_by(path, stage="train", config=_as_json(config), free=begun_so):
        return "new"
    return Run.begin(path, stage="train", config=_as_json(config), free=FREE)[1]


def _check_that_none_is_lost(path: Path) -> None:
    """Raise RunError where a run without checkpoints says that it had some: it is not begun anew in silence."""
    metrics = path / "metrics.jsonl"
    if metrics.is_file() and b'"kind": "checkpoint"' in metrics.read_bytes():
        raise RunError(
            f"the checkpoints of {path} are gone, though its metrics.jsonl records some. Copy them back, or start "
            "anew with --overwrite."
        )


def _claim(path: Path) -> None:
    """Lock a run that exists, waiting a little for ranks that have lost their launcher and are about to leave."""
    deadline = time.monotonic() + LOCK_SECONDS
    told = False
    while True:
        try:
            hold_lock(path)
        except RunError:
            if time.monotonic() > deadline:
                raise
            if not told:
                cli.context().terminal.say(f"another process is in {path}; waiting {LOCK_SECONDS:g} s for it to leave")
            told = True
            time.sleep(0.5)
        else:
            return


def _begin(path: Path, config: TrainConfig, setup: TrainPlan, *, checkpoint: Path | None) -> None:
    """Make the run folder, or find it again, with what is known before the first step."""
    if Run.state(path) != "new":
        hold_lock(path)  # it may have come since, and --overwrite removes it
    weights = [Path(config.weights)] if config.weights is not None and Path(config.weights).exists() else []
    parents = [Run.open(path) for path in weights if (path / "run.json").exists() and checkpoint is None]
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
    if checkpoint is None:
        write_index(setup.folder, path / "index.jsonl.gz")
    else:
        set_aside_newer(checkpoint)


def _as_json(config: TrainConfig) -> dict[str, Any]:
    """Return the config as `config.json` keeps it; the data's path in one form, however it was given."""
    values = dataclasses.asdict(config)
    if config.data != "digits":
        values["data"] = os.path.abspath(config.data)  # noqa: PTH100 - links stay as they are
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _train(
    config: TrainConfig,
    raw: dict[str, Any],
    *,
    ds_source: str,
    batch_size: int,
    world: World,
    stop: StopWatch,
    watch: RankWatch | None,
) -> Run:
    context = cli.context()
    terminal, path = context.terminal, config.run_path
    torch.manual_seed(config.seed)
    if (stop_file := config.stop_file) is not None:
        world.on_rank_zero(lambda: check_stop_file(stop_file))
    # Before a damaged checkpoint is set aside, or --overwrite removes what another process may be writing.
    world.on_rank_zero(lambda: _claim(path) if Run.state(path) != "new" else None)
    chosen = None if config.overwrite else choose_checkpoint(path / "checkpoints", world, terminal)
    if chosen is None and not config.overwrite:
        world.on_rank_zero(lambda: _check_that_none_is_lost(path))
    saved, state = chosen or (None, {})
    setup = plan_training(
        config,
        raw,
        ds_source=ds_source,
        batch_size=batch_size,
        world=world,
        index=path / "index.jsonl.gz" if saved else None,
        preprocess=Preprocess.from_dict(state["model"]["preprocess"]) if saved else None,
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
    world.on_rank_zero(lambda: _begin(path, config, setup, checkpoint=saved))
    if context.chatter is not None:
        try:
            context.chatter.move_to(path / "logs" / f"rank_{world.rank}.log")
        except OSError as error:
            raise RunError(f"cannot write a log in {path / 'logs'}: {error.strerror}. Make room for it.") from error
    run = Run(path, None)
    trained = fit_run(
        run,
        config,
        setup,
        world=world,
        resumed=chosen,
        same=same,
        loss=_classification_loss(config.label_smoothing),
        stop=stop,
        watch=watch,
    )
    with trained.engine.ema_weights():
        weights = trained.engine.full_state()
    world.on_rank_zero(lambda: _finish(run, config, setup, weights, trained))
    return Run.open(path)


def _finish(
    run: Run,
    config: TrainConfig,
    setup: TrainPlan,
    weights: dict[str, Tensor],
    trained: Trained,
) -> None:
    """Write the run's last files and its manifest, and show the result."""
    engine, saver, result = trained.engine, trained.saver, trained.result
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
    if saver.saves:
        rows.append(("checkpoints", f"{saver.saves} saved; they held training up for {saver.paused:.1f} s in all"))
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


if __name__ == "__main__":
    cli.run(train)
