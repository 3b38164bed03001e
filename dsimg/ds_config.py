"""Resolve a DeepSpeed JSON for this model, world and device. No torch, no deepspeed.

The JSON owns batch sizes, precision, ZeRO, clipping and communication. DeepSpeed itself dies on `"auto"` and refuses
BatchNorm in its own bf16; here the first is filled in from the stage, and the second translated, with a note.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsimg.ds_batch import BatchSizes, batch_sizes, gpus
from dsimg.ds_keys import BLOCKS, DEEPSPEED_SCHEDULERS, IDLE, SCHEDULER_FILLS, SCHEDULER_NEEDS, ZERO_TESTED_OPTIMIZERS
from dsimg.ds_lint import Note, checked_config, enabled, show, zero_stage
from dsimg.ds_precision import choose_precision
from dsimg.errors import ConfigError

# DeepSpeed's monitors that need a package: the module it imports, and what pip calls it.
MONITORS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41'"),
}
# Below this, what ZeRO-3 and offloading save is small beside what they cost in every step.
SMALL_MODEL = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class StageDefaults:
    """What the stage wants where the JSON says "auto" or nothing."""

    batch_size: int  # global batch, in images
    lr: float  # the final rate: already scaled by the batch that `lint_ds_config` returned
    weight_decay: float
    momentum: float
    optimizer: str | None  # the --optimizer flag; None: not given
    total_steps: int  # optimizer steps in the whole run
    warmup_steps: int
    gradient_clipping: float | None  # the --gradient_clipping flag; None: not given
    auto_clipping: float = 1.0  # what "auto" means without that flag
    batch_size_given: bool = False  # True: the user asked for batch_size, so another one in the JSON contradicts


@dataclass(frozen=True, kw_only=True)
class DsConfig:
    """A resolved config: pass `config` to `deepspeed.initialize(config=...)`, print `notes`."""

    config: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def batch_size(self) -> int:
        """Images per optimizer step over all ranks."""
        return int(self.config["train_batch_size"])

    @property
    def micro_batch_size(self) -> int:
        """Images per rank and forward pass."""
        return int(self.config["train_micro_batch_size_per_gpu"])

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return int(self.config["gradient_accumulation_steps"])

    @property
    def zero_stage(self) -> int:
        """0, 1, 2 or 3."""
        return zero_stage(self.config)

    @property
    def precision(self) -> str:
        """`fp32`, `bf16`, `fp16` (weights in 16 bits), `bf16 autocast`, `fp16 autocast` (weights in fp32)."""
        autocast = self.config.get("torch_autocast", {})
        if autocast.get("enabled"):
            return f"{'bf16' if autocast['dtype'] == 'bfloat16' else 'fp16'} autocast"
        return next((mode for mode in ("bf16", "fp16") if self.config.get(mode, {}).get("enabled")), "fp32")

    @property
    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0.0 means no clipping."""
        return float(self.config["gradient_clipping"])

    @property
    def offload_optimizer(self) -> bool:
        """Whether optimizer states live in CPU memory."""
        return _offloads(self.config, "offload_optimizer")

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """`{"type": ..., "params": {...}}` from the JSON, or None: the stage's own."""
        return self.config.get("optimizer")

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """`{"type": ..., "params": {...}}` from the JSON, or None: the stage's own."""
        return self.config.get("scheduler")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def resolve_ds_config(
    raw: Mapping[str, Any],
    *,
    source: str,
    world_size: int,
    device: str,
    has_batchnorm: bool,
    bf16_fast: bool,
    parameter_count: int | None,
    defaults: StageDefaults,
    installed: Callable[[str], bool] = _is_installed,
) -> DsConfig:
    """Turn a JSON as read into the one DeepSpeed gets, with a note for all that is filled or changed.

    `bf16_fast`: whether the device computes in bf16 natively (CUDA from Ampere on, a CPU with AVX512-BF16).
    `parameter_count`: parameters of the model, None where not known yet.
    `installed`: whether a Python module can be imported here.
    Raises ConfigError as `lint_ds_config` does, for what this device or world cannot do, and for a monitor whose
    package is missing.
    """
    config, notes = checked_config(
        raw, source=source, optimizer=defaults.optimizer, gradient_clipping=defaults.gradient_clipping
    )
    _check_monitors(config, source=source, installed=installed)
    sizes = batch_sizes(
        config,
        source=source,
        world_size=world_size,
        batch_size=defaults.batch_size,
        batch_size_given=defaults.batch_size_given,
    )
    filled: dict[str, Any] = {}
    plan = [_fill_batch(config, sizes, filled)]
    clipping = _fill_clipping(config, defaults, filled)
    _fill_optimizer(config, defaults, filled)
    _fill_scheduler(config, defaults, filled, notes)
    plan += [
        choose_precision(config, notes, device=device, has_batchnorm=has_batchnorm, bf16_fast=bf16_fast),
        clipping,
    ]
    dropped = _drop_auto(config, "")
    if filled:
        text = ", ".join(f"{path} = {show(value)}" for path, value in filled.items())
        notes.append(Note(kind="changed", text=f'"auto" or missing, filled in by dsimg: {text}'))
    buckets = [path for path in dropped if path.startswith("zero_optimization.")]
    if buckets:
        notes.append(Note(kind="fact", text=f'"auto" buckets set to DeepSpeed\'s defaults: {", ".join(buckets)}'))
    others = [path for path in dropped if path not in buckets]
    if others:
        notes.append(Note(kind="fact", text=f'"auto" left to its own default: {", ".join(others)}'))
    _settle_optimizer(config, defaults, notes, device=device, source=source)
    _settle_offload(config, notes, world_size=world_size, device=device, parameter_count=parameter_count)
    _settle_zeropp(config, notes, world_size=world_size, device=device, source=source)
    _settle_promises(config, notes)
    _remark(config, notes)
    notes = sorted([*plan, *notes], key=lambda note: note.kind != "plan")
    return DsConfig(config=config, notes=tuple(notes))


def _offloads(config: dict[str, Any], block: str) -> bool:
    return bool(config.get("zero_optimization", {}).get(block, {}).get("device") == "cpu")


def _check_monitors(config: dict[str, Any], *, source: str, installed: Callable[[str], bool]) -> None:
    missing = [key for key, (module, _) in MONITORS.items() if enabled(config, key) is True and not installed(module)]
    if missing:
        verb, package = ("is", "its package is") if len(missing) == 1 else ("are", "their packages are")
        raise ConfigError(
            f"{source}: {', '.join(missing)} {verb} enabled and {package} not installed; "
            f"pip install {' '.join(MONITORS[key][1] for key in missing)}, or disable what is not wanted"
        )


def _fill_batch(config: dict[str, Any], sizes: BatchSizes, filled: dict[str, Any]) -> Note:
    values = {
        "train_batch_size": sizes.batch_size,
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": sizes.accumulation_steps,
    }
    open_batch = "train_batch_size" not in config and "train_micro_batch_size_per_gpu" not in config
    for key, value in values.items():
        if config.get(key) == "auto" or (open_batch and key not in config):
            filled[key] = value
        config[key] = value
    return Note(
        kind="plan",
        text=f"batch: {sizes.batch_size} = {sizes.micro_batch_size} images x {sizes.accumulation_steps} "
        f"accumulated x {sizes.world_size} rank{'s' if sizes.world_size > 1 else ''}",
    )


def _fill_clipping(config: dict[str, Any], defaults: StageDefaults, filled: dict[str, Any]) -> Note:
    # Written always: DeepSpeed's default is 1.0 since its PR #8068 and was 0.0 before.
    wanted = config.get("gradient_clipping")
    value = wanted
    if wanted is None or wanted == "auto":
        value = defaults.gradient_clipping
    if value is None:
        value = defaults.auto_clipping if wanted == "auto" else 1.0
    if wanted == "auto":
        filled["gradient_clipping"] = value
    config["gradient_clipping"] = float(value or 0)
    text = f"gradients clipped to norm {value:g}" if value else "no clipping of gradients"
    if wanted is None and defaults.gradient_clipping is None:
        text += ' (DeepSpeed\'s default; "gradient_clipping": 0.0 turns it off)'
    return Note(kind="plan", text=text)


def _fill_optimizer(config: dict[str, Any], defaults: StageDefaults, filled: dict[str, Any]) -> None:
    if "optimizer" not in config:
        return
    params = config["optimizer"]["params"]
    stage_values = {"lr": defaults.lr, "weight_decay": defaults.weight_decay, "momentum": defaults.momentum}
    # Without a rate the optimizer would silently take its own 0.001.
    params.setdefault("lr", "auto")
    for key, value in stage_values.items():
        if params.get(key) == "auto":
            params[key] = filled[f"optimizer.params.{key}"] = value


def _fill_scheduler(config: dict[str, Any], defaults: StageDefaults, filled: dict[str, Any], notes: list[Note]) -> None:
    if "scheduler" not in config:
        return
    name, params = config["scheduler"]["type"], config["scheduler"]["params"]
    lr = config.get("optimizer", {}).get("params", {}).get("lr", defaults.lr)
    values = {
        "warmup": max(1, defaults.warmup_steps),
        "steps": defaults.total_steps,
        "steps/2": max(1, defaults.total_steps // 2),
        "lr": lr,
        "lr/25": lr / 25,
        "zero": 0.0,
    }
    needs = SCHEDULER_NEEDS.get(name, ())
    if name == "OneCycleLR" and "epochs" in params:
        needs = ("max_lr",)
    for key in needs:
        params.setdefault(key, "auto")
    for key, value in params.items():
        if value == "auto" and key in SCHEDULER_FILLS:
            params[key] = filled[f"scheduler.params.{key}"] = values[SCHEDULER_FILLS[key]]
    if name == "OneCycle":
        text = (
            f"scheduler OneCycle: the cycle's learning rates replace the optimizer's: "
            f"{params['cycle_min_lr']} to {params['cycle_max_lr']}"
        )
        notes.append(Note(kind="fact", text=text))
    elif name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        warmup = params.get("warmup_num_steps", 1000)
        text = f"scheduler {name}: peak learning rate {params.get('warmup_max_lr', lr)} after {warmup} steps"
        late = isinstance(warmup, int) and warmup >= defaults.total_steps
        late_text = f"{text}, but the run has only {defaults.total_steps}"
        notes.append(Note(kind="warning" if late else "plan", text=late_text if late else text))
    elif name not in DEEPSPEED_SCHEDULERS:
        notes.append(_torch_scheduler_note(name, params, defaults.total_steps))


def _torch_scheduler_note(name: str, params: dict[str, Any], total_steps: int) -> Note:
    """torch's schedulers are written for epochs; DeepSpeed steps every scheduler once an optimizer step."""
    counts = {key: params[key] for key in ("T_max", "T_0", "step_size", "total_iters", "milestones") if key in params}
    text = f"scheduler {name} is stepped every optimizer step, not every epoch"
    short = False
    for key, value in counts.items():
        last = max(value, default=0) if isinstance(value, list) else value
        text += f"; {key} {value} counts steps, and this run has {total_steps}"
        # A cosine past T_max rises again; the others look like epochs when they end in the first twentieth.
        short = short or (last < total_steps if key == "T_max" else last * 20 < total_steps)
    return Note(kind="warning" if short else "fact", text=text)


def _drop_auto(config: dict[str, Any], name: str) -> list[str]:
    """Delete each "auto" that is left, so that DeepSpeed's default applies; return their paths."""
    gone = []
    for key, value in list(config.items()):
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict) and (path in BLOCKS or path in ("optimizer.params", "scheduler.params")):
            gone += _drop_auto(value, path)
        elif value == "auto" and path != "data_types.keep_in_fp32_modules":
            del config[key]
            gone.append(path)
    return gone


def _settle_optimizer(
    config: dict[str, Any], defaults: StageDefaults, notes: list[Note], *, device: str, source: str
) -> None:
    """Set the two flags without which DeepSpeed refuses optimizers under ZeRO."""
    stage = zero_stage(config)
    in_json = config.get("optimizer", {}).get("type")
    name = in_json or defaults.optimizer or ""
    if stage > 0 and name.lower() == "lamb":
        text = (
            f"LAMB at ZeRO stage {stage} takes one trust ratio for all weights, as ZeRO flattens them, "
            "and not one per layer; use ds_configs/zero0.json, or AdamW"
        )
        if config.get("zero_allow_untested_optimizer") is not True:
            raise ConfigError(f"{source}: {text}")
        notes.append(Note(kind="warning", text=text))
    tested = name.lower() in (known.lower() for known in ZERO_TESTED_OPTIMIZERS)
    if stage > 0 and not tested and "zero_allow_untested_optimizer" not in config:
        config["zero_allow_untested_optimizer"] = True
        whose = in_json or defaults.optimizer or "the stage's own optimizer"
        text = f"zero_allow_untested_optimizer is set to true, so that ZeRO stage {stage} takes {whose}"
        notes.append(Note(kind="changed" if in_json else "plan", text=text))
    by_deepspeed = device == "cuda" and in_json in ("Adam", "AdamW", "Lion")
    offloaded = stage > 0 and _offloads(config, "offload_optimizer")
    if offloaded and not by_deepspeed and "zero_force_ds_cpu_optimizer" not in config:
        config["zero_force_ds_cpu_optimizer"] = False
        text = "zero_force_ds_cpu_optimizer is set to false, so that offloading takes PyTorch's optimizer"
        notes.append(Note(kind="fact", text=text))


def _settle_offload(
    config: dict[str, Any], notes: list[Note], *, world_size: int, device: str, parameter_count: int | None
) -> None:
    """Drop offloading that the ZeRO stage does not have, and say what ZeRO-3 and offloading cost here."""
    stage = zero_stage(config)
    small = parameter_count is None or parameter_count < SMALL_MODEL
    size = "" if parameter_count is None else f" ({parameter_count / 1e6:.1f} M parameters)"
    for block, least, needed in (("offload_optimizer", 1, "1, 2 or 3"), ("offload_param", 3, "3")):
        if stage < least and _offloads(config, block):
            # Stage 0 would demand DeepSpeed's CPU optimizer and then offload nothing.
            del config["zero_optimization"][block]
            text = f"zero_optimization.{block} is dropped: it needs stage {needed}, and this is stage {stage}"
            notes.append(Note(kind="changed", text=text))
    offloads = [block for block in ("offload_optimizer", "offload_param") if _offloads(config, block)]
    if stage == 3 and small:
        gain = "with 1 GPU there is nothing to split" if world_size == 1 else "weights are gathered in every pass"
        text = f"ZeRO stage 3 is slower for a model of this size{size}: {gain}; zero1 or zero0 is faster"
        notes.append(Note(kind="fact", text=text))
    if offloads and device == "cpu":
        text = f"{' and '.join(offloads)}: offload on a CPU moves nothing and is slower"
        notes.append(Note(kind="fact", text=text))
    elif offloads and small:
        text = f"{' and '.join(offloads)}: offload saves little and is slower for a model of this size{size}"
        notes.append(Note(kind="fact", text=text))


def _settle_zeropp(config: dict[str, Any], notes: list[Note], *, world_size: int, device: str, source: str) -> None:
    """Check the keys of ZeRO++ against the ranks and the device."""
    zero, stage = config.get("zero_optimization", {}), zero_stage(config)
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(key) is True]
    if quantized and device == "cpu":
        raise ConfigError(f"{source}: {', '.join(quantized)}: DeepSpeed has this on GPUs only; delete it")
    partition = zero.get("zero_hpz_partition_size", 1)
    used = min(partition, world_size)
    if world_size % used:
        raise ConfigError(
            f"{source}: zero_hpz_partition_size {partition} does not divide the {gpus(world_size)} found; use a divisor"
        )
    if partition > world_size:
        text = f"zero_hpz_partition_size {partition} needs {partition} GPUs; on {gpus(world_size)} it is {used}"
        notes.append(Note(kind="fact", text=text))
    keys = [*quantized, *(["zero_hpz_partition_size"] if partition > 1 else [])]
    if keys and stage < 3:
        text = f"{', '.join(keys)}: without effect at ZeRO stage {stage}, only stage 3 reads it"
        notes.append(Note(kind="warning", text=text))


def _settle_promises(config: dict[str, Any], notes: list[Note]) -> None:
    """Turn on what dsimg's own training loop relies on, where the file turns it off."""
    for block, key, why in (
        ("", "managed_gradient_accumulation", "dsimg itself says where a step ends"),
        ("zero_optimization", "compute_grad_norm", "the norm is shown, and tells which steps are not finite"),
        ("bf16", "check_grad_overflow", "a step whose gradient is not finite is to be skipped"),
    ):
        values = config.get(block, {}) if block else config
        if values.get(key) is False:
            values[key] = True
            text = f"{f'{block}.' if block else ''}{key}: false is set to true: {why}"
            notes.append(Note(kind="changed", text=text))


def _remark(config: dict[str, Any], notes: list[Note]) -> None:
    """What is right and still deserves a word."""
    if "activation_checkpointing" in config:
        text = "activation_checkpointing has no effect, it needs a model that calls it; "
        text += "--gradient_checkpointing does what is meant"
        notes.append(Note(kind="fact", text=text))
    slow = [key for key in ("wall_clock_breakdown", "memory_breakdown") if config.get(key) is True]
    slow += [key for key in ("flops_profiler", "comms_logger") if enabled(config, key) is True]
    if slow:
        notes.append(Note(kind="fact", text=f"{', '.join(slow)}: profiling slows the run"))
    monitors = {
        key: config[key].get("output_path") or "its default place"
        for key in ("csv_monitor", *MONITORS)
        if enabled(config, key) is True
    }
    if monitors:
        text = ", ".join(f"{key} to {place}" for key, place in monitors.items())
        notes.append(Note(kind="fact", text=f"DeepSpeed's monitors write {text}; a resumed run appends"))
    notes += [Note(kind="warning", text=f"{key} has no effect: {why}") for key, why in IDLE.items() if key in config]
