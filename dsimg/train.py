"""Train an image classifier with DeepSpeed: the first stage.

deepspeed dsimg/train.py --deepspeed_config ds_configs/zero2.json --data DIR --model resnet50 --out RUN --epochs 90
"""

import collections
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsimg import cli, data, loop, models
from dsimg.augment import Augmentation, geometry_for
from dsimg.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from dsimg.console import bytes_text, count_text
from dsimg.digits import write_digits
from dsimg.ds_config import (
    DsConfig,
    StageDefaults,
    find_ds_config,
    lint_ds_config,
    read_ds_config,
    resolve_ds_config,
)
from dsimg.engine import Engine, OptimizerSpec, World, bf16_is_fast, start_world
from dsimg.errors import ConfigError, DataError, DeviceError
from dsimg.folder import ImageFolder, find_images, find_leaks, write_index
from dsimg.losses import cross_entropy, mixed_cross_entropy
from dsimg.memory import estimate_rank_memory
from dsimg.meter import Meter, MetricsFile
from dsimg.preprocess import Preprocess
from dsimg.run import Run, State, write_atomically, write_json
from dsimg.schedule import Schedule, scale_lr

DEFAULT_BATCH_SIZE = 128
# `--lr` when none is given, for a global batch of 256.
DEFAULT_LR = {"sgd": 0.1, "adamw": 1e-3, "adam": 1e-3, "lamb": 5e-3}
DEFAULT_WEIGHT_DECAY = {"sgd": 1e-4, "adamw": 0.05, "adam": 0.0, "lamb": 0.02}
BAD_IMAGES = "bad_images.jsonl"
LEAK_SEARCH_LIMIT = 100_000  # comparing validation with training files costs a stat each


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The flags of `dsimg train`. What a DeepSpeed JSON owns (precision, ZeRO, communication) is not here."""

    deepspeed_config: str = "zero0"
    """A DeepSpeed JSON: a path, or the name of one that dsimg ships (zero2). Its "auto" values are filled from here."""
    data: str = "digits"
    """A folder with train/ and val/ of class folders, or one folder of class folders; or "digits", the embedded set."""
    out: Path | None = None
    """The run folder to write. Default: runs/ and the name of the data."""
    model: str | None = None
    """A torchvision name, cifar_resnet20|32|44|56|110, timm:NAME, or package.module:function. Default: cifar_resnet20
    for images up to 64 pixels, resnet50 for larger ones."""
    weights: str | None = None
    """Start from these: a torchvision weights name, a .safetensors or .pth file, or a run folder."""
    image_size: int | None = None
    """Height and width of the network's input, in pixels. Default: the images' own size up to 64, else the model's."""
    epochs: int = 20
    """Passes over the training images."""
    batch_size: int | None = None
    """Images per optimizer step over all ranks, where the DeepSpeed JSON says "auto" or nothing. Default: 128."""
    optimizer: Literal["sgd", "adamw", "adam", "lamb"] | None = None
    """The optimizer, unless the DeepSpeed JSON names one. Default: sgd with Nesterov momentum."""
    lr: float | None = None
    """Peak learning rate for a global batch of 256. Default: 0.1 for sgd, 0.001 for adamw, 0.005 for lamb."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the real global batch."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float | None = None
    """Weight decay, not applied to norms and biases. Default: 0.0001 for sgd, 0.05 for adamw."""
    schedule: Literal["cosine", "step", "one_cycle"] | None = None
    """Learning rate over the run, unless the DeepSpeed JSON has a scheduler. Default: cosine."""
    warmup_epochs: float | None = None
    """Epochs of linear rise before cosine or step. Default: a twentieth of the run."""
    step_epochs: int = 30
    """With --schedule step: divide the learning rate by ten every so many epochs."""
    gradient_clipping: float | None = None
    """Clip the gradient's norm to this, unless the DeepSpeed JSON says otherwise; 0 turns clipping off. Default:
    off for sgd, 1 for the others."""
    augment: Literal["none", "light", "standard", "strong"] = "standard"
    """light: crop and flip. standard: and colour jitter, small rotation. strong: TrivialAugment and random erasing."""
    flip: bool | None = None
    """Mirror half of the images. Default: yes, but not for digits."""
    mixup: float = 0.0
    """Mixup's alpha; 0 is off."""
    cutmix: float = 0.0
    """CutMix's alpha; 0 is off."""
    label_smoothing: float = 0.0
    """Share of each label spread over all classes."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated and kept; 0 is off."""
    gradient_checkpointing: bool = False
    """Keep fewer activations and compute them again in the backward pass."""
    cache: Literal["auto", "ram", "none"] = "auto"
    """Keep decoded images in memory. auto: when they are small."""
    workers: int | None = None
    """Processes per rank that decode images. Default: the cores of this machine shared among its ranks, at most 8."""
    max_bad_images: float = 0.01
    """The share of training images that may fail to decode."""
    val_share: float = 0.2
    """Share of each class held out when the data has no val/ folder."""
    eval_epochs: int = 1
    """Evaluate after every so many epochs, and after the last."""
    log_steps: int = 10
    """Show and record every so many optimizer steps."""
    seed: int = 0
    """Fixes initial weights, order, augmentation and split."""
    overwrite: bool = False
    """Replace the run that is in --out."""

    def __post_init__(self) -> None:
        positive = {"epochs": self.epochs, "batch_size": self.batch_size, "eval_epochs": self.eval_epochs}
        positive |= {
            "log_steps": self.log_steps,
            "step_epochs": self.step_epochs,
            "image_size": self.image_size,
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1.")
        shares = {
            "max_bad_images": self.max_bad_images,
            "label_smoothing": self.label_smoothing,
            "ema": self.ema,
        }
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise ConfigError(f"--{name} is {share}; it must be at least 0 and below 1.")
        if not 0 < self.val_share < 1:
            raise ConfigError(f"--val_share is {self.val_share}; it must be between 0 and 1.")
        for name, alpha in {"mixup": self.mixup, "cutmix": self.cutmix}.items():
            if alpha < 0 or not math.isfinite(alpha):
                raise ConfigError(f"--{name} is {alpha}; it must be 0 (off) or a positive alpha such as 0.2.")
        for name, rate in {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "warmup_epochs": self.warmup_epochs,
        }.items():
            if rate is not None and not (rate >= 0 and math.isfinite(rate)):
                raise ConfigError(f"--{name} is {rate}; it must be a number of at least 0.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be 0 or more.")

    @property
    def run_path(self) -> Path:
        """Where the run goes."""
        return self.out or Path("runs") / Path(self.data).resolve().name


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
    if raw.get("scheduler") and config.schedule is not None:
        raise ConfigError(
            f"{ds_path} has a scheduler block and --schedule {config.schedule} was given as well. Keep one of them."
        )
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
        raise _out_of_memory(world) from error


def _run_state(path: Path, config: TrainConfig) -> State:
    """Tell what is in `path`, before anything else is looked at. Raises RunError when it is not this run."""
    state = Run.state(path)
    if state == "new" or config.overwrite:
        return "new"
    return Run.begin(path, stage="train", config=_as_json(config), free=FREE)[1]


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(config).items()}


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """Everything that is decided before the first step."""

    folder: ImageFolder
    arch: str
    model: nn.Module
    preprocess: Preprocess
    augmentation: Augmentation
    cache: data.CachePlan
    workers: int
    ds: DsConfig
    plan: data.StepPlan
    optimizer: OptimizerSpec | None
    weight_decay: float
    schedule: Schedule | None
    rows: list[tuple[str, str]]


def _train(config: TrainConfig, raw: dict[str, Any], *, ds_source: str, batch_size: int, world: World) -> Run:
    context = cli.context()
    terminal, path = context.terminal, config.run_path
    torch.manual_seed(config.seed)
    setup = _set_up(config, raw, ds_source=ds_source, batch_size=batch_size, world=world)
    terminal.table("plan", setup.rows)
    for note in setup.ds.notes:
        if note.kind == "plan":
            continue
        (terminal.warn if note.kind == "warning" else terminal.say)(f"{note.kind}: {note.text}")

    def begin() -> None:
        Run.begin(path, stage="train", config=_as_json(config), free=FREE, overwrite=config.overwrite)
        write_json(path / "ds_config.json", setup.ds.config)
        write_index(setup.folder, path / "index.jsonl.gz")
        labels = "".join(f"{name}\n" for name in setup.folder.classes)
        write_atomically(path / "labels.txt", labels.encode("utf-8", "surrogateescape"))

    world.on_rank_zero(begin)
    if context.chatter is not None:
        context.chatter.move_to(path / "logs" / f"rank_{world.rank}.log")
    run = Run(path, None)

    images = data.TrainImages(
        setup.folder.train,
        setup.preprocess,
        setup.augmentation,
        seed=config.seed,
        ram=setup.cache.ram,
        threads=data.decoding_workers(world.local_size),
    )
    bad_image_limit = math.floor(config.max_bad_images * len(images))

    def keep_bad_images(bad: dict[str, str]) -> None:
        """Name new ones, list all in the run, and stop when they are too many."""
        found = _keep_bad_images(run, bad, world)
        if found > bad_image_limit:
            raise DataError(
                f"{found} of {len(images)} training images cannot be decoded, more than --max_bad_images "
                f"{config.max_bad_images:g} (a share) allows. {path / BAD_IMAGES} lists them with their reasons: mend or "
                "remove them, or raise --max_bad_images."
            )

    keep_bad_images(images.bad)
    cuda = world.device.type == "cuda"
    loader = data.TrainLoader(images, setup.plan, rank=world.rank, workers=setup.workers, prefetch=cuda, pin=cuda)
    validation = data.EvalLoader(
        setup.folder.val,
        setup.preprocess,
        batch_size=max(32, setup.plan.micro),
        rank=world.rank,
        world=world.size,
        workers=setup.workers,
        cache_bytes=data.free_memory() // (8 * world.local_size),
        pin=cuda,
    )
    engine = Engine(
        setup.model,
        config=setup.ds.config,
        groups=models.parameter_groups(setup.model, setup.weight_decay),
        optimizer=setup.optimizer,
        lr=setup.schedule.peak if setup.schedule else _json_lr(setup.ds, default=0.0),
        world=world,
        ema_decay=config.ema,
    )
    start_epoch, step = 0, 0
    saved = world.on_rank_zero(lambda: checkpoints(path / "checkpoints"))
    if saved:
        state = load_checkpoint(saved[-1], engine)
        start_epoch, step = state["epoch"], state["step"]
        engine.skipped_steps = state["skipped_steps"]
        terminal.say(f"resuming after epoch {start_epoch}, step {step}, from {saved[-1]}")
    # Dropout and stochastic depth: another stream on each rank, the same in every run.
    torch.manual_seed(config.seed * 1_000_003 + 7919 * start_epoch + world.rank + 1)
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
        engine.pool_batchnorm()
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
        if epoch % config.eval_epochs == 0 or epoch == config.epochs:
            result = measure()
            if result is not None:
                meter.evaluated(result.report, epoch=epoch, step=step)
                terminal.say(f"epoch {epoch}/{config.epochs}  validation  {_accuracy_text(result.report)}")
        engine.pool_batchnorm()
        keep_bad_images(loader.bad)
        state = {"step": step, "epoch": epoch, "skipped_steps": engine.skipped_steps}
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
    setup: _Setup,
    weights: dict[str, Tensor],
    result: loop.Evaluation | None,
    engine: Engine,
) -> None:
    """Write the run's last files and its manifest, and show the result."""
    assert result is not None
    terminal = cli.context().terminal
    models.save_weights(weights, run.path / "weights.safetensors")
    loop.write_evaluation(run.path, result, setup.folder.classes)
    parents = []
    if config.weights is not None and Path(config.weights).is_dir():
        parents = [Run.open(Path(config.weights))]
    report = result.report
    run.finish(
        seed=config.seed,
        parents=parents,
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
        ("next", f"dsimg evaluate --source {run.path} --data {_data_path(config)}"),
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


# --- Before the first step


def _set_up(config: TrainConfig, raw: dict[str, Any], *, ds_source: str, batch_size: int, world: World) -> _Setup:
    """Decide everything, and check it, before a run folder is made or memory taken."""
    folder, sizes, notes = world.on_rank_zero(lambda: _find_data(config))
    arch, preprocess = _choose_model(config, sizes)
    model = models.build_model(arch, num_classes=len(folder.classes), input_size=preprocess.input_size[1])
    rows = [("data", f"{folder.root}: {len(folder.train.files):,} training images, {len(folder.classes)} classes")]
    rows.append(("validation", f"{len(folder.val.files):,} images"))
    rows += [("", note) for note in notes]
    models.check_input_size(model, preprocess.input_size[1], arch, num_classes=len(folder.classes))
    parameters = models.count_parameters(model)
    macs = models.count_macs(model, preprocess.input_size[1])
    side = preprocess.input_size[1]
    rows.append(("model", f"{arch}: {count_text(parameters)} parameters, {count_text(macs)} MACs at {side}x{side}"))
    if config.weights is not None:
        loaded = models.load_weights(model, config.weights, arch=arch, classes=folder.classes)
        rows.append(("weights", str(loaded)))
    if config.gradient_checkpointing:
        blocks = models.enable_gradient_checkpointing(model)
        rows.append(("", f"activations of {blocks} blocks are computed again in the backward pass"))

    flip = config.flip if config.flip is not None else config.data != "digits"
    size = preprocess.input_size[1:]
    augmentation = Augmentation(name=config.augment, size=size, geometry=geometry_for(size, sizes), flip=flip)
    cache = world.on_rank_zero(
        lambda: data.plan_cache(
            len(folder.train.files),
            sizes,
            config.cache,
            augmentation=augmentation,
            local_ranks=world.local_size,
        )
    )
    workers = (
        0 if cache.ram else (data.decoding_workers(world.local_size) if config.workers is None else config.workers)
    )

    own_optimizer = config.optimizer or "sgd"
    json_block = raw.get("optimizer")
    json_type = json_block.get("type") if isinstance(json_block, dict) else json_block
    named = str(json_type or own_optimizer).lower()
    lr = DEFAULT_LR.get(named, DEFAULT_LR["adamw"]) if config.lr is None else config.lr
    peak = scale_lr(lr, batch_size=batch_size, scaling=config.lr_scaling)
    weight_decay = config.weight_decay
    if weight_decay is None:
        weight_decay = DEFAULT_WEIGHT_DECAY.get(named, 0.0)
    steps_per_epoch = math.ceil(len(folder.train.files) / batch_size)
    total_steps = steps_per_epoch * config.epochs
    warmup_epochs = config.epochs / 20 if config.warmup_epochs is None else config.warmup_epochs
    warmup_steps = min(round(warmup_epochs * steps_per_epoch), total_steps)
    ds = resolve_ds_config(
        raw,
        source=ds_source,
        world_size=world.size,
        device="cuda" if world.device.type == "cuda" else "cpu",
        has_batchnorm=models.has_batchnorm(model),
        bf16_fast=world.on_rank_zero(lambda: bf16_is_fast(world.device)),
        parameter_count=parameters,
        defaults=StageDefaults(
            batch_size=config.batch_size or DEFAULT_BATCH_SIZE,
            batch_size_given=config.batch_size is not None,
            lr=peak,
            weight_decay=weight_decay,
            momentum=config.momentum,
            optimizer=config.optimizer,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            gradient_clipping=config.gradient_clipping,
            auto_clipping=0.0 if named == "sgd" else 1.0,
        ),
    )
    assert ds.batch_size == batch_size
    if ds.optimizer is not None:
        weight_decay = float(ds.optimizer["params"].get("weight_decay", 0.0))
    schedule = None
    if ds.scheduler is None:
        name = config.schedule or "cosine"
        milestones = range(config.step_epochs * steps_per_epoch, total_steps, config.step_epochs * steps_per_epoch)
        schedule = Schedule(
            name=name,
            peak=_json_lr(ds, default=peak),
            steps=total_steps,
            warmup_steps=warmup_steps,
            milestones=tuple(milestones) if name == "step" else (),
        )
    plan = data.StepPlan(
        samples=len(folder.train.files),
        micro=ds.micro_batch_size,
        accumulation=ds.accumulation_steps,
        world=world.size,
    )
    optimizer = _own_optimizer(config, ds, own_optimizer, world)
    memory = estimate_rank_memory(
        parameters,
        zero_stage=ds.zero_stage,
        world_size=world.size,
        weight_bytes=2 if ds.precision in ("bf16", "fp16") else 4,
        optimizer=named,
        ema=config.ema > 0,
    )
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    per_machine = f", {world.local_size} on this machine" if world.local_size != world.size else ""
    rows.append(("world", f"{world.size} rank{'s' if world.size > 1 else ''} on {device}{per_machine}"))
    rows += [("", note.text) for note in ds.notes if note.kind == "plan"]
    rows.append(
        (
            "ZeRO",
            f"stage {ds.zero_stage}; bytes per rank: parameters {bytes_text(memory.parameters)}, gradients "
            f"{bytes_text(memory.gradients)}, optimizer states {bytes_text(memory.optimizer)}",
        )
    )
    rows.append(("learning rate", _lr_text(config, ds, schedule, given=lr, batch_size=batch_size, named=named)))
    rows.append(("epochs", f"{config.epochs} of {steps_per_epoch} steps"))
    rows.append(("augmentation", _augmentation_text(config, augmentation)))
    rows.append(("cache", cache.text + (f"; {workers} workers per rank" if workers else "")))
    rows.append(("run", str(config.run_path)))
    return _Setup(
        folder=folder,
        arch=arch,
        model=model,
        preprocess=preprocess,
        augmentation=augmentation,
        cache=cache,
        workers=workers,
        ds=ds,
        plan=plan,
        optimizer=optimizer,
        weight_decay=weight_decay,
        schedule=schedule,
        rows=rows,
    )


def _data_path(config: TrainConfig) -> Path:
    """Return the folder of images; the embedded digits lie beside the run."""
    return config.run_path.parent / "data" / "digits" if config.data == "digits" else Path(config.data)


def _find_data(config: TrainConfig) -> tuple[ImageFolder, list[tuple[int, int]], list[str]]:
    """List the images, look at the sizes (h, w) of a sample, and collect what the user should hear of."""
    root = _data_path(config)
    if config.data == "digits":
        write_digits(root)
    folder = find_images(root, seed=config.seed, val_share=config.val_share)
    notes = list(folder.notes)
    if len(folder.train.files) + len(folder.val.files) <= LEAK_SEARCH_LIMIT:
        leaks = find_leaks(folder)
        if leaks:
            pairs = "; ".join(f"{ours} = {theirs}" for ours, theirs in leaks[:3])
            notes.append(f"{len(leaks)} validation images also in train, byte for byte: {pairs}")
    return folder, data.sample_sizes(folder.train), notes


def _choose_model(config: TrainConfig, sizes: list[tuple[int, int]]) -> tuple[str, Preprocess]:
    """Return the architecture and how it takes images: small images keep their size."""
    longest = [max(size) for size in sizes]
    small = bool(longest) and max(longest) <= 64
    arch = config.model or ("cifar_resnet20" if small else "resnet50")
    image_size = config.image_size
    if image_size is None and small and config.weights is None:
        image_size = collections.Counter(longest).most_common(1)[0][0]
    return arch, models.default_preprocess(arch, image_size=image_size, weights=config.weights)


def _own_optimizer(config: TrainConfig, ds: DsConfig, name: str, world: World) -> OptimizerSpec | None:
    """Return the optimizer that dsimg builds from torch, or None where DeepSpeed builds the JSON's.

    SGD, Adam and AdamW of the JSON are torch's too, so that nothing has to be compiled; only offloading on a GPU
    machine is left to DeepSpeed's CPUAdam, which is much faster there.
    """
    if ds.optimizer is None:
        return OptimizerSpec(name=name, momentum=config.momentum)
    kind = ds.optimizer["type"].lower()
    params = dict(ds.optimizer["params"])
    own = {"lr", "weight_decay", "momentum", "nesterov", "betas", "eps", "torch_adam", "adam_w_mode"}
    offloaded = ds.offload_optimizer and world.device.type == "cuda"
    if kind not in ("sgd", "adam", "adamw") or offloaded or set(params) - own:
        return None
    if kind == "adam" and params.get("adam_w_mode", True):  # DeepSpeed's Adam decays weights as AdamW does
        kind = "adamw"
    betas = params.get("betas", (0.9, 0.999))
    return OptimizerSpec(
        name=kind,
        momentum=float(params.get("momentum", 0.0)),
        nesterov=bool(params.get("nesterov", False)),
        betas=(float(betas[0]), float(betas[1])),
        eps=float(params.get("eps", 1e-8)),
    )


def _json_lr(ds: DsConfig, *, default: float) -> float:
    """Return the learning rate of the JSON's optimizer, which is taken as it stands."""
    return float(ds.optimizer["params"].get("lr", default)) if ds.optimizer is not None else default


def _lr_text(
    config: TrainConfig, ds: DsConfig, schedule: Schedule | None, *, given: float, batch_size: int, named: str
) -> str:
    if schedule is None:
        return f"{named}; by the scheduler {ds.scheduler and ds.scheduler['type']} of the DeepSpeed JSON"
    shape = {
        "cosine": "cosine to 0",
        "step": f"a tenth every {config.step_epochs} epochs",
        "one_cycle": "one cycle",
    }
    text = f"{named}; peak {schedule.peak:g}"
    if ds.optimizer is None or schedule.peak != _json_lr(ds, default=math.nan) or config.lr is not None:
        text += f" = {given:g} at batch 256, {config.lr_scaling} scaling to {batch_size}"
    if schedule.name != "one_cycle":
        text += f"; {schedule.warmup_steps} warm-up steps"
    return f"{text}, then {shape[schedule.name]}" if schedule.name != "one_cycle" else f"{text}; one cycle"


def _augmentation_text(config: TrainConfig, augmentation: Augmentation) -> str:
    text: str = config.augment
    if config.augment != "none":
        text += f", {augmentation.geometry.replace('_', ' ')}, {'with' if augmentation.flip else 'no'} flip"
    for name in ("mixup", "cutmix", "label_smoothing"):
        if getattr(config, name) > 0:
            text += f", {name} {getattr(config, name):g}"
    return text


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
    loop.write_bad_images(path, together)
    return len(together)


def _out_of_memory(world: World) -> DeviceError:
    taken = torch.cuda.max_memory_allocated(world.device)
    total = torch.cuda.get_device_properties(world.device).total_memory
    return DeviceError(
        f"GPU {world.local_rank} is out of memory: {bytes_text(taken)} of its {bytes_text(total)} were allocated. "
        "Halve train_micro_batch_size_per_gpu (and double gradient_accumulation_steps), add --gradient_checkpointing, "
        "or use a higher ZeRO stage (--deepspeed_config zero3, or zero3_offload). The same command then goes on from "
        "the last checkpoint."
    )


if __name__ == "__main__":
    cli.run(train)
