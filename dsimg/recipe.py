"""What a user asks of `dsimg train`: its flags, their defaults and their checks."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsimg.errors import ConfigError


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
    """Start from these: a torchvision weights name, a .safetensors or .pth file, a run folder, or one of a run's
    checkpoints."""
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
            "image_size": self.image_size,
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

    @property
    def run_path(self) -> Path:
        """Where the run goes."""
        return self.out or Path("runs") / Path(self.data).resolve().name
