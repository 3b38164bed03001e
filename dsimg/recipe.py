"""What a user asks of the stages that train: their flags, defaults and checks."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsimg.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Place:
    """What every stage that trains is told of its surroundings."""

    deepspeed_config: str = "zero0"
    """A DeepSpeed JSON: a path, or the name of one that dsimg ships (zero2). Its "auto" values are filled from here."""
    data: str | None = None
    """A folder with train/ and val/ of class folders, or one folder of class folders; or "digits", the embedded set,
    which is the default."""
    out: Path | None = None
    """The run folder to write. Default: runs/ and the name of the data."""

    @property
    def run_path(self) -> Path:
        """Where the run goes."""
        return self.out or Path("runs") / Path(self.data or "digits").resolve().name


@dataclass(frozen=True, kw_only=True)
class NetworkChoice(Place):
    """The network that a stage begins with."""

    model: str | None = None
    """A torchvision name, cifar_resnet20|32|44|56|110, timm:NAME, or package.module:function. Default: that of
    --weights where it is a run, else cifar_resnet20 for images up to 64 pixels and resnet50 for larger ones."""
    weights: str | None = None
    """Start from these: a torchvision weights name, a .safetensors or .pth file, a run folder, or one of a run's
    checkpoints."""
    image_size: int | None = None
    """Height and width of the network's input, in pixels. Default: the images' own size up to 64, else the model's."""

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"--image_size is {self.image_size}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Recipe(Place):
    """How a network is trained. What a DeepSpeed JSON owns (precision, ZeRO, communication) is not here."""

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
    momentum: float | None = None
    """Momentum of sgd. Default: 0.9."""
    weight_decay: float | None = None
    """Weight decay, not applied to norms and biases. Default: 0.0001 for sgd, 0.05 for adamw."""
    schedule: Literal["cosine", "step", "one_cycle"] | None = None
    """Learning rate over the run, unless the DeepSpeed JSON has a scheduler. Default: cosine."""
    warmup_epochs: float | None = None
    """Epochs of linear rise before cosine or step. Default: a twentieth of the run."""
    step_epochs: int | None = None
    """With --schedule step: divide the learning rate by ten every so many epochs. Default: 30."""
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
    save_minutes: float = 10.0
    """Save a checkpoint every so many minutes, besides after each epoch."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; the oldest goes when a new one has been read back."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written. The older ones stay in either case."""
    max_steps: int | None = None
    """Save and stop (exit code 75) after so many optimizer steps of this start; the same command goes on."""
    max_hours: float | None = None
    """Save and stop (exit code 75) after so many hours of this start; the same command goes on."""
    stop_file: Path | None = None
    """Save and stop (exit code 75) when this file appears."""
    grace_seconds: float = 30.0
    """What a launcher or a cloud gives between asking to stop and killing; a warning says when a save takes longer."""
    on_exit: str | None = None
    """A shell command that rank 0 runs at the end, with DSIMG_OUTCOME (done, stopped, failed), DSIMG_EXIT_CODE,
    DSIMG_RUN and DSIMG_MESSAGE in its environment."""
    max_skipped_steps: int = 20
    """Stop when loss or gradients are not finite in more steps in a row than this; such steps are skipped."""
    rank_timeout: float = 300.0
    """Stop when a rank has not been heard of, or has not moved, for so many seconds."""
    seed: int = 0
    """Fixes initial weights, order, augmentation and split."""
    overwrite: bool = False
    """Replace the run that is in --out. Given again before the new one is done, it goes on with that."""

    def __post_init__(self) -> None:
        positive = {"epochs": self.epochs, "batch_size": self.batch_size, "eval_epochs": self.eval_epochs}
        positive |= {
            "log_steps": self.log_steps,
            "step_epochs": self.step_epochs,
            "keep_checkpoints": self.keep_checkpoints,
            "max_steps": self.max_steps,
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
            "momentum": self.momentum,
            "gradient_clipping": self.gradient_clipping,
            "weight_decay": self.weight_decay,
            "warmup_epochs": self.warmup_epochs,
        }.items():
            if rate is not None and not (rate >= 0 and math.isfinite(rate)):
                raise ConfigError(f"--{name} is {rate}; it must be a number of at least 0.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be 0 or more.")
        if self.max_skipped_steps < 0:
            raise ConfigError(f"--max_skipped_steps is {self.max_skipped_steps}; it must be 0 or more.")
        for name, limit in {
            "save_minutes": self.save_minutes,
            "max_hours": self.max_hours,
            "grace_seconds": self.grace_seconds,
        }.items():
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"--{name} is {limit}; it must be a positive number.")
        if not (self.rank_timeout >= 10 and math.isfinite(self.rank_timeout)):
            raise ConfigError(f"--rank_timeout is {self.rank_timeout}; it must be at least 10 seconds.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed is {self.seed}; it must be at least 0 and below 2147483648.")
        if self.step_epochs is not None and self.schedule != "step":
            raise ConfigError("--step_epochs goes with --schedule step. Add that, or leave --step_epochs away.")
        if self.warmup_epochs is not None and self.schedule == "one_cycle":
            raise ConfigError(
                "--schedule one_cycle has a rise of its own, 30 % of the run. Leave --warmup_epochs away."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe, NetworkChoice):
    """The flags of `dsimg train`."""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        NetworkChoice.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class Teaching(Place):
    """How a network learns from another."""

    loss: Literal["kd", "dkd", "dist", "hint"] = "dist"
    """What is asked of the student beside the true labels. dist: the same relations between classes and between images
    as the teacher's; kd: the same softened probabilities; dkd: these, without the true class drowning the others;
    hint: the same features at --hint_layers."""
    temperature: float | None = None
    """Softens both networks' probabilities. Default: 4 for kd and dkd, 1 for dist."""
    alpha: float | None = None
    """Weight of the teacher's term; the true labels' is 1, or 1 - alpha with kd. Default: 0.9 for kd, 1 for dkd, 2 for
    dist, 100 for hint."""
    hint_layers: tuple[str, ...] = ()
    """With --loss hint: layers whose feature maps are compared, as LAYER or STUDENT_LAYER:TEACHER_LAYER."""
    teacher_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What the teacher computes in. auto: bf16 where the device is made for it, else fp32."""
    teacher_shard: Literal["auto", "yes", "no"] = "auto"
    """Share the teacher's weights out over the ranks (ZeRO-3). auto: where they would take half of the free memory."""
    cache_teacher: Path | None = None
    """A folder that keeps the teacher's logits for every view (fp16; of more than 100 classes the best 100), and gives
    them back to later runs of the same teacher, seed and augmentation."""

    def __post_init__(self) -> None:
        if self.temperature is not None and not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"--temperature is {self.temperature}; it must be a positive number.")
        if self.alpha is not None and not (self.alpha >= 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"--alpha is {self.alpha}; it must be a number of at least 0.")
        if self.loss == "kd" and self.alpha is not None and self.alpha > 1:
            raise ConfigError(f"--alpha is {self.alpha}; with --loss kd it is the teacher's share, at most 1.")
        if (self.loss == "hint") != bool(self.hint_layers):
            raise ConfigError(
                "--loss hint and --hint_layers go together: name the layers whose features are compared, such as "
                "--hint_layers layer3, or leave both away."
            )
        if self.loss == "hint" and self.temperature is not None:
            raise ConfigError("--temperature softens probabilities, and --loss hint compares features. Leave it away.")
        if self.loss == "hint" and self.cache_teacher is not None:
            raise ConfigError("--cache_teacher keeps logits, and --loss hint needs features. Leave one of them away.")


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe(Recipe, Teaching):
    """How a network is trained on labels and on what another says."""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        Teaching.__post_init__(self)
        if self.cache_teacher is not None:
            _check_outside(self.run_path, self.cache_teacher, flag="cache_teacher")
        if self.loss == "dkd" and (self.mixup > 0 or self.cutmix > 0):
            raise ConfigError(
                "--loss dkd sets the true class apart, and --mixup and --cutmix make images of two. Use --loss dist or "
                "kd with them, or leave them away."
            )


def _check_outside(run: Path, other: Path, *, flag: str) -> None:
    """Raise ConfigError where a folder lies in a run's, which --overwrite would remove with it."""
    if run.resolve() in (other.resolve(), *other.resolve().parents):
        raise ConfigError(f"--{flag} {other} lies in --out {run}, which --overwrite removes. Choose another folder.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TaughtRecipe, NetworkChoice):
    """The flags of `dsimg distill`."""

    data: str | None = None
    """The images. Default: those that the teacher was trained on."""
    out: Path | None = None
    """The run folder to write. Default: runs/ and the names of teacher and student."""
    source: tuple[str, ...]
    """The teacher: a run, weights of torchvision's (ResNet50_Weights.DEFAULT) or package.module:function. Of several
    the mean of their probabilities teaches."""
    baseline: Path | None = None
    """A run of the same network that learned without a teacher, for the result's table."""

    @property
    def run_path(self) -> Path:
        """Where the run goes."""
        return self.out or Path("runs") / f"{Path(self.source[0]).name}-{(self.model or 'student').split(':')[-1]}"

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("--source names no teacher. Give a run folder.")
        TaughtRecipe.__post_init__(self)
        NetworkChoice.__post_init__(self)
        if self.model is None and self.weights is None:
            raise ConfigError("distill needs the student: --model resnet18, or --weights of a run to go on from.")
        if self.loss == "hint" and len(self.source) > 1:
            raise ConfigError("--loss hint compares the features of one teacher. Give one --source, or --loss dist.")
        if self.baseline is not None:
            _check_outside(self.run_path, self.baseline, flag="baseline")


@dataclass(frozen=True, kw_only=True)
class PruneConfig(TaughtRecipe):
    """The flags of `dsimg prune`."""

    data: str | None = None
    """The images. Default: those that the source was trained on."""
    out: Path | None = None
    """The run folder to write. Default: the source's name and -pruned, beside it."""
    source: Path
    """The run to prune."""
    target_macs: float | None = None
    """The share of the source's multiply-adds that is to be left: 0.5."""
    target_params: float | None = None
    """The share of the source's parameters that is to be left."""
    target_latency: str | None = None
    """What ONNX Runtime takes here for one run: a share of the latency of the source (0.5), or a time (5ms); with one
    thread in processor time."""
    served_as: Literal["fp32", "int8"] = "fp32"
    """The precision that the network will be served in: what --target_latency measures, and what the result is held
    against."""
    latency_batch: int = 1
    """Images a run of the session."""
    latency_threads: int = 1
    """Threads of the session."""
    importance: Literal["group_norm", "taylor", "bn_scale", "lamp", "random"] = "group_norm"
    """What a channel's worth is told by: its weights in every layer it runs through; the loss's first-order change;
    the scales of BatchNorm; weights against those of its layer; nothing."""
    round_to: int = 16
    """Widths stay multiples of this. 16 suits int8 kernels; networks as narrow as a cifar_resnet need less."""
    max_ratio: float = 0.8
    """The share of a layer's channels that may go at most."""
    protect: tuple[str, ...] = ()
    """Modules whose outputs stay as wide as they are."""
    cuts: int = 1
    """Reach the target in so many cuts, with --cut_epochs of fine-tuning between them."""
    cut_epochs: int | None = None
    """Epochs of fine-tuning after each cut but the last, which has --epochs. Default: 2."""
    sparsity_epochs: int = 0
    """Epochs of training before the first cut that drive whole channels to nothing."""
    sparsity: float = 1e-4
    """How strongly they do."""
    teacher: str = "source"
    """What the fine-tuning learns from beside the labels: source, the network before pruning; none; or what distill's
    --source takes."""
    scan: bool = False
    """Prune nothing: cut each group of layers alone by a quarter, a half and three quarters, and write what that does
    to the accuracy into --out, as scan.json and scan.png."""

    @property
    def run_path(self) -> Path:
        """Where the run goes."""
        source = self.source if self.source.name else self.source.resolve()
        return self.out or source.with_name(f"{source.name}-{'scan' if self.scan else 'pruned'}")

    def __post_init__(self) -> None:
        TaughtRecipe.__post_init__(self)
        targets = [
            name for name in ("target_macs", "target_params", "target_latency") if getattr(self, name) is not None
        ]
        if self.scan and targets:
            raise ConfigError(f"--scan prunes nothing, and --{targets[0]} asks for it. Leave one of them away.")
        if not self.scan and len(targets) != 1:
            raise ConfigError(
                "prune needs one target: --target_macs 0.5, --target_params 0.5, or --target_latency 0.5 (or 5ms)."
                + (f" It was given {' and '.join(f'--{name}' for name in targets)}." if targets else "")
            )
        for name in ("target_macs", "target_params"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise ConfigError(f"--{name} is {share}; it is a share of the source's, between 0 and 1.")
        if self.target_latency is not None:
            latency_goal(self.target_latency)
        for name, count in {
            "round_to": self.round_to,
            "cuts": self.cuts,
            "cut_epochs": 1 if self.cut_epochs is None else self.cut_epochs,
            "latency_batch": self.latency_batch,
            "latency_threads": self.latency_threads,
        }.items():
            if count < 1:
                raise ConfigError(f"--{name} is {count}; it must be at least 1.")
        if self.cut_epochs is not None and self.cuts == 1:
            raise ConfigError("--cut_epochs are between two cuts. Give --cuts as well, or leave --cut_epochs away.")
        taught = ("temperature", "alpha", "cache_teacher", "hint_layers")
        given = [name for name in taught if getattr(self, name) not in (None, ())]
        if self.teacher == "none" and given:
            raise ConfigError(f"--teacher none has no use for --{given[0]}. Leave one of them away.")
        if not 0 < self.max_ratio < 1:
            raise ConfigError(f"--max_ratio is {self.max_ratio}; it must be between 0 and 1.")
        if self.sparsity_epochs < 0 or not (self.sparsity > 0 and math.isfinite(self.sparsity)):
            raise ConfigError("--sparsity_epochs must be 0 or more, and --sparsity a positive number.")


def latency_goal(text: str) -> tuple[float, bool]:
    """Return (value, whether it is seconds) of a --target_latency: 0.5, a share of the source's, or 5ms, 0.2s, 800us.

    Raises ConfigError.
    """
    found = re.fullmatch(r"([0-9.]+)\s*(us|ms|s)?", text.strip())
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        value = 0.0
    unit = found[2] if found else None
    if value <= 0 or (unit is None and value >= 1):
        raise ConfigError(
            f"--target_latency is {text}; give a share of the source's latency between 0 and 1 (0.5), or a time (5ms)."
        )
    return (value, False) if unit is None else (value * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit], True)
