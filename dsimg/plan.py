"""Everything that is decided, checked and shown before the first step: the training plan."""

import collections
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsimg import models
from dsimg.augment import Augmentation, geometry_for
from dsimg.cache import CachePlan, plan_cache, sample_sizes
from dsimg.console import bytes_text, count_text
from dsimg.digits import write_digits
from dsimg.ds_config import DsConfig, StageDefaults, resolve_ds_config
from dsimg.errors import ConfigError, DataError, RunError
from dsimg.folder import ImageFolder, difference, find_images, find_leaks, read_index
from dsimg.memory import estimate_rank_memory
from dsimg.optimizers import OptimizerSpec
from dsimg.preprocess import Preprocess
from dsimg.pruned import Record, rebuild
from dsimg.recipe import NetworkChoice, Place, Recipe
from dsimg.recompute import enable_gradient_checkpointing
from dsimg.schedule import Schedule, scale_lr
from dsimg.shards import saved_model
from dsimg.steps import StepPlan
from dsimg.weights import load_weights
from dsimg.workers import decoding_workers
from dsimg.world import World, bf16_is_fast

DEFAULT_BATCH_SIZE = 128
# `--lr` when none is given, for a global batch of 256.
DEFAULT_LR = {"sgd": 0.1, "adamw": 1e-3, "adam": 1e-3, "lamb": 5e-3}
DEFAULT_MOMENTUM = 0.9
DEFAULT_STEP_EPOCHS = 30
DEFAULT_WEIGHT_DECAY = {"sgd": 1e-4, "adamw": 0.05, "adam": 0.0, "lamb": 0.02}
LEAK_SEARCH_LIMIT = 100_000  # comparing validation with training files costs a stat each


def check_against_json(config: Recipe, raw: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError where a flag and the DeepSpeed JSON both say what the optimizer or the schedule is."""
    if raw.get("scheduler") and config.schedule is not None:
        raise ConfigError(
            f"{source} has a scheduler block and --schedule {config.schedule} was given as well. Keep one of them."
        )
    block = raw.get("optimizer")
    params = block.get("params") if isinstance(block, Mapping) else None
    for name in ("lr", "weight_decay", "momentum"):
        flag, value = getattr(config, name), params.get(name) if isinstance(params, Mapping) else None
        if flag is not None and value not in (None, "auto"):
            raise ConfigError(
                f"{source} has optimizer.params.{name} {value} and --{name} {flag} was given as well. Keep one of "
                'them, or write "auto" in the file.'
            )


@dataclass(frozen=True)
class Images:
    """The images of a run: where they are, the sizes (h, w) of a sample of them, what the user should hear of."""

    folder: ImageFolder
    sizes: list[tuple[int, int]]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network that a training begins with."""

    arch: str
    model: nn.Module
    preprocess: Preprocess
    pruning: Record | None = None  # what was cut out of the architecture
    rows: tuple[tuple[str, str], ...] = ()  # for the plan: where the weights come from

    def described(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the model block of a run's manifest."""
        return {
            "arch": self.arch,
            "num_classes": len(classes),
            "classes": list(classes),
            "preprocess": self.preprocess.as_dict(),
        }

    def saved(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the model block of a checkpoint, which stands alone: with what was cut out of the architecture."""
        cut = {"pruning": self.pruning.as_dict()} if self.pruning is not None else {}
        return {**self.described(classes), **cut}


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Everything that is decided before the first step."""

    folder: ImageFolder
    network: Network
    augmentation: Augmentation
    cache: CachePlan
    workers: int
    ds: DsConfig
    plan: StepPlan
    optimizer: OptimizerSpec | None
    optimizer_name: str
    weight_decay: float
    schedule: Schedule | None
    rows: list[tuple[str, str]]

    def must_stay(self) -> dict[str, Any]:
        """Return what a DeepSpeed JSON may not change between a stop and a resume, as checkpoints keep it."""
        return {
            "batch_size": self.plan.batch_size,
            "optimizer": self.optimizer_name,
            "scheduler_type": self.ds.scheduler and self.ds.scheduler["type"],
        }


def find_images_of(config: Recipe, *, index: Path | None, world: World) -> Images:
    """List the images, on rank 0 for all. `index` is that of a run that is resumed: they must not have changed."""
    return world.on_rank_zero(lambda: _find_data(config, index))


def choose_network(config: NetworkChoice, images: Images, *, saved: Mapping[str, Any] | None) -> Network:
    """Build the network that the flags ask for, with its weights; `saved` is the model block of a run that is resumed:
    it goes on with the same network, whatever has happened to --weights since."""
    classes = images.folder.classes
    block = saved
    if block is None and config.weights is not None and Path(config.weights).is_dir():
        block = saved_model(Path(config.weights))
    default = block["arch"] if block is not None else "cifar_resnet20" if _are_small(images.sizes) else "resnet50"
    arch = config.model or default
    if saved is not None:
        preprocess = Preprocess.from_dict(saved["preprocess"])
    else:
        preprocess = _choose_preprocess(config, arch, images.sizes)
    model = models.build_model(arch, num_classes=len(classes), input_size=preprocess.input_size[1])
    pruning = None
    if block is not None and "pruning" in block and block["arch"] == arch:
        pruning = Record.from_dict(block["pruning"])
        rebuild(model, pruning)
    rows = []
    if config.weights is not None and saved is None:
        rows.append(("weights", str(load_weights(model, config.weights, arch=arch, classes=classes))))
    return Network(arch=arch, model=model, preprocess=preprocess, pruning=pruning, rows=tuple(rows))


def plan_training(
    config: Recipe,
    raw: dict[str, Any],
    *,
    ds_source: str,
    batch_size: int,
    world: World,
    images: Images,
    network: Network,
) -> TrainPlan:
    """Decide everything, and check it, before a run folder is made or memory taken."""
    folder, sizes, model, arch, preprocess = (
        images.folder,
        images.sizes,
        network.model,
        network.arch,
        network.preprocess,
    )
    rows = [("data", f"{folder.root}: {len(folder.train.files):,} training images, {len(folder.classes)} classes")]
    rows.append(("validation", f"{len(folder.val.files):,} images"))
    rows += [("", note) for note in images.notes]
    models.check_trainable(model, arch)
    models.check_input_size(model, preprocess.input_size[1], arch, num_classes=len(folder.classes))
    parameters = models.count_parameters(model)
    macs = models.count_macs(model, preprocess.input_size[1])
    side = preprocess.input_size[1]
    name = arch if network.pruning is None else f"{arch}, pruned"
    rows.append(("model", f"{name}: {count_text(parameters)} parameters, {count_text(macs)} MACs at {side}x{side}"))
    rows += network.rows
    if config.gradient_checkpointing:
        blocks = enable_gradient_checkpointing(model)
        rows.append(("", f"activations of {blocks} blocks are computed again in the backward pass"))

    flip = config.flip if config.flip is not None else not is_digits(config)
    size = preprocess.input_size[1:]
    augmentation = Augmentation(name=config.augment, size=size, geometry=geometry_for(size, sizes), flip=flip)
    cache = world.on_rank_zero(
        lambda: plan_cache(
            len(folder.train.files),
            sizes,
            config.cache,
            augmentation=augmentation,
            local_ranks=world.local_size,
        )
    )
    workers = 0 if cache.ram else (decoding_workers(world.local_size) if config.workers is None else config.workers)

    own_optimizer = config.optimizer or "sgd"
    json_block = raw.get("optimizer")
    json_type = json_block.get("type") if isinstance(json_block, dict) else json_block
    named = str(json_type or own_optimizer).lower()
    lr = DEFAULT_LR.get(named, DEFAULT_LR["adamw"]) if config.lr is None else config.lr
    peak = scale_lr(lr, batch_size=batch_size, scaling=config.lr_scaling)
    momentum = DEFAULT_MOMENTUM if config.momentum is None else config.momentum
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
        device=world.device.type,
        has_batchnorm=models.has_batchnorm(model),
        bf16_fast=world.on_rank_zero(lambda: bf16_is_fast(world.device)),
        parameter_count=parameters,
        defaults=StageDefaults(
            batch_size=config.batch_size or DEFAULT_BATCH_SIZE,
            batch_size_given=config.batch_size is not None,
            lr=peak,
            weight_decay=weight_decay,
            momentum=momentum,
            optimizer=config.optimizer,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            gradient_clipping=config.gradient_clipping,
            auto_clipping=0.0 if named == "sgd" else 1.0,
        ),
    )
    assert ds.batch_size == batch_size
    if ds.optimizer is not None:
        weight_decay = float(ds.optimizer["params"].get("weight_decay", config.weight_decay or 0.0))
    schedule = None
    if ds.scheduler is None:
        name = config.schedule or "cosine"
        every = (config.step_epochs or DEFAULT_STEP_EPOCHS) * steps_per_epoch
        milestones = range(every, total_steps, every)
        schedule = Schedule(
            name=name,
            peak=json_lr(ds, default=peak),
            steps=total_steps,
            warmup_steps=warmup_steps,
            milestones=tuple(milestones) if name == "step" else (),
        )
    plan = StepPlan(
        samples=len(folder.train.files),
        micro=ds.micro_batch_size,
        accumulation=ds.accumulation_steps,
        world=world.size,
    )
    if ds.optimizer is None:
        optimizer: OptimizerSpec | None = OptimizerSpec(name=own_optimizer, momentum=momentum)
    else:
        optimizer = _own_optimizer(config, ds.optimizer, offloaded=ds.offload_optimizer and world.device.type == "cuda")
    if optimizer is not None and optimizer.name == "lamb" and importlib.util.find_spec("timm") is None:
        raise ConfigError("the optimizer lamb needs timm: pip install 'dsimg[timm]'")
    memory = estimate_rank_memory(
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        zero_stage=ds.zero_stage,
        world_size=world.size,
        weight_bytes=2 if ds.precision in ("bf16", "fp16") else 4,
        optimizer=named,
        ema=config.ema > 0,
    )
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    per_machine = f", {world.local_size} on this machine" if world.local_size != world.size else ""
    rows.append(("world", f"{world.size} rank{'s' if world.size > 1 else ''} on {device}{per_machine}"))
    rows.append(("DeepSpeed", ds_source))
    rows += [("", f"! {note.text}" if note.kind == "warning" else note.text) for note in ds.notes]
    rows.append(
        (
            "ZeRO",
            f"stage {ds.zero_stage}; bytes per rank: parameters {bytes_text(memory.parameters)}, gradients "
            f"{bytes_text(memory.gradients)}, optimizer states {bytes_text(memory.optimizer)}"
            + (" (in CPU memory)" if ds.offload_optimizer else ""),
        )
    )
    rows.append(("learning rate", _lr_text(config, ds, schedule, given=lr, batch_size=batch_size, named=named)))
    rows.append(("epochs", f"{config.epochs} of {steps_per_epoch} steps"))
    rows.append(("augmentation", _augmentation_text(config, augmentation)))
    rows.append(("cache", cache.text + (f"; {workers} workers per rank" if workers else "")))
    rows.append(("run", str(config.run_path)))
    return TrainPlan(
        folder=folder,
        network=network,
        augmentation=augmentation,
        cache=cache,
        workers=workers,
        ds=ds,
        plan=plan,
        optimizer=optimizer,
        optimizer_name=named,
        weight_decay=weight_decay,
        schedule=schedule,
        rows=rows,
    )


def is_digits(config: Place) -> bool:
    """Tell whether a stage works on the embedded data set."""
    return config.data in (None, "digits")


def data_path(config: Place) -> Path:
    """Return the folder of images; the embedded digits lie beside the run."""
    if config.data is None or config.data == "digits":
        return config.run_path.parent / "data" / "digits"
    return Path(config.data)


def _find_data(config: Recipe, index: Path | None) -> Images:
    root = data_path(config)
    if is_digits(config):
        write_digits(root)
    folder = find_images(root, seed=config.seed, val_share=config.val_share)
    if index is not None:
        try:
            kept = read_index(index)
        except DataError as error:
            raise RunError(
                f"{error} Without it, it cannot be known whether the images are the same. Copy it back; or start "
                f"another run from this one's weights: --weights {index.parent / 'checkpoints'}/step_N."
            ) from error
        changed = difference(kept, folder)
        if changed is not None:
            raise DataError(
                f"the images in {folder.root} are not those that the run began with: {changed}. Put them back to go "
                "on, or train anew: another --out, or --overwrite."
            )
        folder = kept
    notes = list(folder.notes)
    if len(folder.train.files) + len(folder.val.files) <= LEAK_SEARCH_LIMIT:
        leaks = find_leaks(folder)
        if leaks:
            pairs = "; ".join(f"{ours} = {theirs}" for ours, theirs in leaks[:3])
            notes.append(f"{len(leaks)} validation images also in train, byte for byte: {pairs}")
    return Images(folder, sample_sizes(folder.train), notes)


def _are_small(sizes: list[tuple[int, int]]) -> bool:
    return bool(sizes) and max(max(size) for size in sizes) <= 64


def _choose_preprocess(config: NetworkChoice, arch: str, sizes: list[tuple[int, int]]) -> Preprocess:
    """Return how the network takes images: small ones keep their size."""
    image_size, weights = config.image_size, config.weights
    # Named weights and runs say what size they were made for; a file does not.
    says_size = weights is not None and (Path(weights).is_dir() or not models.looks_like_file(weights))
    if image_size is None and _are_small(sizes) and not says_size:
        image_size = collections.Counter(max(size) for size in sizes).most_common(1)[0][0]
    return models.default_preprocess(arch, image_size=image_size, weights=weights)


def _own_optimizer(config: Recipe, block: Mapping[str, Any], *, offloaded: bool) -> OptimizerSpec | None:
    """Return the JSON's optimizer as dsimg builds it, or None where DeepSpeed has to.

    SGD, Adam, AdamW and LAMB are torch's and timm's, so that nothing has to be compiled; only what is `offloaded`
    from a GPU is left to DeepSpeed's CPUAdam, which is much faster there.
    """
    kind = block["type"].lower()
    params = block["params"]
    own = {"lr", "weight_decay", "momentum", "nesterov", "betas", "eps", "torch_adam", "adam_w_mode"}
    if kind not in ("sgd", "adam", "adamw", "lamb") or offloaded or set(params) - own:
        return None
    if kind == "adam" and params.get("adam_w_mode", True):  # DeepSpeed's Adam decays weights as AdamW does
        kind = "adamw"
    betas = params.get("betas", (0.9, 0.999))
    return OptimizerSpec(
        name=kind,
        momentum=float(params.get("momentum", config.momentum or 0.0)),
        nesterov=bool(params.get("nesterov", False)),
        betas=(float(betas[0]), float(betas[1])),
        eps=float(params.get("eps", 1e-8)),
    )


def json_lr(ds: DsConfig, *, default: float) -> float:
    """Return the learning rate of the JSON's optimizer, which is taken as it stands."""
    return float(ds.optimizer["params"].get("lr", default)) if ds.optimizer is not None else default


def _lr_text(
    config: Recipe, ds: DsConfig, schedule: Schedule | None, *, given: float, batch_size: int, named: str
) -> str:
    if schedule is None:
        return f"{named}; by the scheduler {ds.scheduler and ds.scheduler['type']} of the DeepSpeed JSON"
    text = f"{named}; peak {schedule.peak:g}"
    if schedule.peak == scale_lr(given, batch_size=batch_size, scaling=config.lr_scaling):
        text += f" = {given:g} at batch 256, {config.lr_scaling} scaling to {batch_size}"
    if schedule.name == "one_cycle":
        return f"{text}; one cycle"
    every = config.step_epochs or DEFAULT_STEP_EPOCHS
    fall = "cosine to 0" if schedule.name == "cosine" else f"a tenth every {every} epochs"
    return f"{text}; {schedule.warmup_steps} warm-up steps, then {fall}"


def _augmentation_text(config: Recipe, augmentation: Augmentation) -> str:
    text: str = config.augment
    if config.augment != "none":
        text += f", {augmentation.geometry.replace('_', ' ')}, {'with' if augmentation.flip else 'no'} flip"
    for name in ("mixup", "cutmix", "label_smoothing"):
        if getattr(config, name) > 0:
            text += f", {name} {getattr(config, name):g}"
    return text
