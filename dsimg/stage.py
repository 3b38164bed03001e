"""What surrounds the training of every stage that trains: joining the ranks, claiming the run folder or finding it
again, and leaving, whatever happens, so that the same command goes on."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dsimg import cli
from dsimg.checkpoint import choose_checkpoint, set_aside_newer
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.ds_lint import lint_ds_config
from dsimg.errors import ConfigError, RunError, StopRequested
from dsimg.evaluation import images_of, result_rows, write_evaluation
from dsimg.folder import write_index
from dsimg.plan import DEFAULT_BATCH_SIZE, Images, Network, TrainPlan, check_against_json, plan_training
from dsimg.recipe import Recipe
from dsimg.run import Run, State, as_plain, hold_lock, nothing_to_do, read_json, write_json, write_labels
from dsimg.session import Trained
from dsimg.shards import is_adapter
from dsimg.stop import STOPPED, StopWatch, check_stop_file, reason_text
from dsimg.watch import RankWatch, open_store
from dsimg.weights import save_weights
from dsimg.world import World, start_world

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

C = TypeVar("C", bound=Recipe)


@dataclass(frozen=True, kw_only=True)
class Job(Generic[C]):
    """One start of a stage: what was asked, and the ranks that do it. `again` when the run folder had been begun."""

    config: C
    stage: str
    free: tuple[str, ...]
    raw: dict[str, Any]  # the DeepSpeed JSON as it was given
    ds_source: str
    batch_size: int
    world: World
    stop: StopWatch
    watch: RankWatch | None
    again: bool

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.config.run_path

    def resume_point(self, checkpoints: Path) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest whole checkpoint in a folder and its state, or None where the run starts anew."""
        if not self.again:
            return None
        chosen = choose_checkpoint(checkpoints, self.world, cli.context().terminal)
        if chosen is None:
            self.world.on_rank_zero(lambda: _check_that_none_is_lost(checkpoints.parent))
        return chosen

    def plan(self, config: Recipe, images: Images, network: Network) -> TrainPlan:
        """Plan a training of this stage's with the DeepSpeed JSON that it was given."""
        return plan_training(
            config,
            self.raw,
            ds_source=self.ds_source,
            batch_size=self.batch_size,
            world=self.world,
            images=images,
            network=network,
        )

    def begin(self, setup: TrainPlan, *, begun: bool, reads: Sequence[Path] = ()) -> Run:
        """Show the plan, make the run folder or find it again with what is known before the first step, and move the
        logs into it. `begun` when it has its list of images already; `reads` are the runs and other files that the
        stage reads: those that are runs become the parents of a new one. Raises RunError."""
        context = cli.context()
        context.terminal.table("plan", setup.rows)
        self.world.on_rank_zero(lambda: self._begin(setup, begun=begun, reads=reads))
        if context.chatter is not None:
            try:
                context.chatter.move_to(self.path / "logs" / f"rank_{self.world.rank}.log")
            except OSError as error:
                raise RunError(
                    f"cannot write a log in {self.path / 'logs'}: {error.strerror}. Make room for it."
                ) from error
        return Run(self.path, None)

    def _begin(self, setup: TrainPlan, *, begun: bool, reads: Sequence[Path]) -> None:
        path, folder = self.path, setup.folder
        if Run.state(path) != "new":
            hold_lock(path)  # it may have come since, and --overwrite removes it
        parents = [] if begun else [Run.open(read) for read in reads if (read / "run.json").exists()]
        Run.begin(
            path,
            stage=self.stage,
            config=as_json(self.config),
            free=self.free,
            parents=parents,
            reads=[folder.train.folder, folder.val.folder, *reads],
            overwrite=self.config.overwrite and not self.again,
        )
        hold_lock(path)
        write_json(path / "ds_config.json", setup.ds.config)
        write_labels(path, folder.classes)
        if not begun:
            write_index(folder, path / "index.jsonl.gz")

    def go_on(self, setup: TrainPlan, resumed: tuple[Path, dict[str, Any]] | None) -> None:
        """Check that a checkpoint may be resumed with this plan. Raises RunError where the JSON has changed it."""
        if resumed is None:
            return
        checkpoint, state = resumed
        changed = [
            f"{key} was {state[key]}, now {value}" for key, value in setup.must_stay().items() if state[key] != value
        ]
        if changed:
            raise RunError(
                f"{self.path} cannot go on: {'; '.join(changed)}. Give the DeepSpeed JSON it was started with, or "
                "--overwrite."
            )
        self.world.on_rank_zero(lambda: set_aside_newer(checkpoint))


def run_stage(
    config: C, *, stage: str, body: Callable[[Job[C]], Run], free: Sequence[str] = (), same: Sequence[Path] = ()
) -> Run:
    """Run a stage that trains, on any number of ranks, into a run folder; `body` plans, trains and finishes it.

    `free` names flags of the stage's own that may differ when the same run is started again; the parents in `same`
    must not have been made anew since it was begun, finished or not. Asked to stop, the stage
    saves and ends with exit code 75 (in Python: StopRequested); the same command goes on.
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

    may_differ = (*FREE, *free)
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
        state: State = world.on_rank_zero(lambda: _run_state(path, config, stage=stage, free=may_differ, same=same))
        if state == "finished":
            context.terminal.say(nothing_to_do(path))
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
        torch.manual_seed(config.seed)
        if (stop_file := config.stop_file) is not None:
            world.on_rank_zero(lambda: check_stop_file(stop_file))
        # Before a damaged checkpoint is set aside, or --overwrite removes what another process may be writing.
        world.on_rank_zero(lambda: _claim(path) if Run.state(path) != "new" else None)
        run = body(
            Job(
                config=config,
                stage=stage,
                free=may_differ,
                raw=raw,
                ds_source=str(ds_path),
                batch_size=sizes.batch_size,
                world=world,
                stop=stop,
                watch=watch,
                again=state != "new",
            )
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


def trained_weights(trained: Trained) -> dict[str, torch.Tensor]:
    """Return the state dict that a training leaves, the EMA's where there is one. All ranks take part."""
    with trained.engine.ema_weights():
        weights = trained.engine.full_state()
    return {name: tensor for name, tensor in weights.items() if not is_adapter(name)}


def finish_run(
    run: Run,
    config: Recipe,
    setup: TrainPlan,
    trained: Trained,
    *,
    metrics: Mapping[str, Any] | None = None,
    rows: Sequence[tuple[str, str]] = (),
) -> Run:
    """Write a trained run's last files and its manifest, and show the result; `metrics`, `rows` are the stage's own."""
    weights = trained_weights(trained)
    world = trained.engine.world
    world.on_rank_zero(lambda: _finish(run, config, setup, trained, weights, metrics=metrics or {}, rows=rows))
    return Run.open(run.path)


def _finish(
    run: Run,
    config: Recipe,
    setup: TrainPlan,
    trained: Trained,
    weights: dict[str, torch.Tensor],
    *,
    metrics: Mapping[str, Any],
    rows: Sequence[tuple[str, str]],
) -> None:
    engine, saver, result = trained.engine, trained.saver, trained.result
    assert result is not None
    save_weights(weights, run.path / "weights.safetensors")
    if setup.network.pruning is not None:
        setup.network.pruning.save(run.path / "pruning.json")
    write_evaluation(run.path, result, setup.folder.classes)
    report = result.report
    run.finish(
        seed=config.seed,
        model=setup.network.described(setup.folder.classes),
        metrics={
            "validation": {key: report[key] for key in ("images", "correct", "top1", "top5", "loss")},
            "skipped_steps": engine.skipped_steps,
            "peak_memory_bytes": engine.peak_memory(),
            **metrics,
        },
    )
    shown = result_rows(report)
    if engine.skipped_steps:
        shown.append(("skipped steps", f"{engine.skipped_steps}, where the gradient was not finite"))
    if saver.saves:
        shown.append(("checkpoints", f"{saver.saves} saved; they held training up for {saver.paused:.1f} s in all"))
    cli.context().terminal.table("result", [*shown, *rows, ("run", str(run.path))])


def data_of(source: Path) -> str:
    """Return the --data that a run was trained with. Raises ConfigError where `source` is no run, or does not say."""
    if not source.is_dir() and (":" in str(source) or "_Weights." in str(source)):
        raise ConfigError(f"{source} is no run, which would say what images it was trained on. Give them with --data.")
    run = Run.open(source)
    images = images_of(run)
    given = read_json(run.file("config"))["data"]
    return "digits" if given == "digits" else str(images.root)


def as_json(config: Recipe) -> dict[str, Any]:
    """Return the config as `config.json` keeps it; the data's path in one form, however it was given."""
    values: dict[str, Any] = as_plain(config)
    if config.data is None:
        values["data"] = "digits"
    elif config.data != "digits":
        values["data"] = os.path.abspath(config.data)  # noqa: PTH100 - links stay as they are
    return values


def _at_exit(config: Recipe, world: World | None, code: int, text: str) -> None:
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


def _run_state(path: Path, config: Recipe, *, stage: str, free: Sequence[str], same: Sequence[Path]) -> State:
    """Tell what is in `path`, before anything else is looked at. Raises RunError when it is not this run, or was made
    from others than those that are now in `same`.

    What --overwrite is to replace is "new"; but not what it has begun: the same command goes on with that.
    """
    if Run.state(path) == "new":
        return "new"
    begun_so = tuple(key for key in free if key != "overwrite")
    if config.overwrite and not Run.was_begun_by(path, stage=stage, config=as_json(config), free=begun_so):
        return "new"
    state = Run.begin(path, stage=stage, config=as_json(config), free=free)[1]
    Run.check_parents(path, same)
    return state


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
