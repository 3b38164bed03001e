"""Find, read, lint and resolve a DeepSpeed JSON for this model, world and device. No torch, no deepspeed.

The JSON owns batch sizes, precision, ZeRO, clipping and communication. DeepSpeed itself ignores unknown
top-level keys, dies on `"auto"` and refuses BatchNorm in its own bf16; here each of these is an error that
names the key, or a translation that is printed. The tables below were read in deepspeed 0.19.8; a test
compares them with the installed release.
"""

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsimg.errors import ConfigError, near


def _table(kinds: dict[str, str]) -> dict[str, str]:
    """Turn `{kind: "key key"}` into `{key: kind}`."""
    return {key: kind for kind, keys in kinds.items() for key in keys.split()}


# The keys of each block by kind: bool, int, float (any number), str, list, dict (unchecked inside), block
# (has its own table), any, or a|b|c (one of these words). `>=N` bounds a number. In the file null means
# "absent" and "auto" means "fill it in".
BLOCKS: dict[str, dict[str, str]] = {
    "": _table(
        {
            "int>=1": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
            "bool": "managed_gradient_accumulation zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
            "prescale_gradients disable_allgather wall_clock_breakdown memory_breakdown dump_state "
            "disable_python_gc dataloader_drop_last use_data_before_expert_parallelism",
            "float>=0": "gradient_clipping",
            "block": "optimizer scheduler fp16 bf16 torch_autocast data_types zero_optimization "
            "flops_profiler comms_logger timers tensorboard csv_monitor wandb comet activation_checkpointing "
            "aio checkpoint compile",
            "fp16|bf16|fp32": "communication_data_type seq_parallel_communication_data_type",
            "float": "gradient_predivide_factor",
            "mean|sum": "gradient_allreduce_op",
            "str": "log_level",
            "int": "vocabulary_size sequence_parallel_size",
            "dict": "data_efficiency hybrid_engine pipeline autotuning datastates_ckpt weight_quantization "
            "expert_parallel tensor_parallel",
        }
    ),
    "optimizer": _table({"str": "type", "dict": "params", "bool": "legacy_fusion"}),
    "scheduler": _table({"str": "type", "dict": "params"}),
    "fp16": _table(
        {
            "bool": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
            "float>=0": "loss_scale",
            "int>=0": "initial_scale_power",
            "int>=1": "loss_scale_window hysteresis min_loss_scale",
        }
    ),
    "bf16": _table(
        {
            "bool": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
            "bf16_optimizer_states"
        }
    ),
    "torch_autocast": _table(
        {
            "bool": "enabled",
            "bfloat16|float16|bf16|fp16|half|torch.bfloat16|torch.float16": "dtype",
            "list": "lower_precision_safe_modules",
        }
    ),
    "data_types": _table(
        {"fp32|fp16|bf16": "grad_accum_dtype param_dtype buffer_dtype", "any": "keep_in_fp32_modules"}
    ),
    "zero_optimization": _table(
        {
            "int": "stage module_granularity_threshold stage3_module_granularity_threshold",
            "bool": "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce "
            "allgather_partitions overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint "
            "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
            "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
            "allgather_sequential stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
            "round_robin_gradients parameter_alignment zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
            "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
            "enable_sanity_checks save_muon_momentum_buffer_in_memory",
            "int>=1": "reduce_bucket_size zero_hpz_partition_size",
            "int>=0": "allgather_bucket_size sub_group_size prefetch_bucket_size stage3_prefetch_bucket_size "
            "param_persistence_threshold stage3_param_persistence_threshold "
            "model_persistence_threshold stage3_model_persistence_threshold max_live_parameters "
            "stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance",
            "block": "offload_param offload_optimizer",
            "dict": "zenflow leaf_module",
        }
    ),
    "zero_optimization.offload_param": _table(
        {
            "cpu|nvme|none": "device",
            "str": "nvme_path",
            "int>=0": "buffer_count buffer_size max_in_cpu",
            "bool": "pin_memory",
        }
    ),
    "zero_optimization.offload_optimizer": _table(
        {
            "cpu|nvme|none": "device",
            "str": "nvme_path",
            "int>=0": "buffer_count",
            "bool": "pin_memory pipeline_read pipeline_write fast_init super_offload",
            "float>=0": "ratio cpuadam_cores_perc",
        }
    ),
    "flops_profiler": _table(
        {
            "bool": "enabled detailed",
            "float>=0": "recompute_fwd_factor",
            "int>=1": "profile_step top_modules",
            "int": "module_depth",
            "str": "output_file",
        }
    ),
    "comms_logger": _table({"bool": "enabled prof_all verbose debug", "list": "prof_ops"}),
    "timers": _table({"block": "throughput"}),
    "timers.throughput": _table({"bool": "enabled synchronized"}),
    "tensorboard": _table({"bool": "enabled", "str": "output_path job_name"}),
    "csv_monitor": _table({"bool": "enabled", "str": "output_path job_name"}),
    "wandb": _table({"bool": "enabled", "str": "group team project"}),
    "comet": _table(
        {
            "bool": "enabled online",
            "int>=1": "samples_log_interval",
            "str": "project workspace api_key experiment_name experiment_key mode",
        }
    ),
    "activation_checkpointing": _table(
        {
            "bool": "partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary "
            "profile cpu_checkpointing",
            "int>=1": "number_checkpoints",
        }
    ),
    "aio": _table(
        {
            "int>=1": "block_size queue_depth intra_op_parallelism",
            "bool": "single_submit overlap_events use_gds",
        }
    ),
    "checkpoint": _table(
        {
            "ignore|warn|fail": "tag_validation",
            "bool": "checkpoint_serialization load_universal use_node_local_storage",
            "dict": "parallel_write writer",
        }
    ),
    "compile": _table(
        {
            "bool": "deepcompile autoep_non_moe free_activation offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory "
            "debug_log offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
            "sync_after_allgather keep_int_input_tensors keep_all_input_tensors",
            "int>=0": "free_activation_threshold",
            "list": "passes",
        }
    ),
}

# Keys that DeepSpeed 0.19 refuses, and what to do instead.
REMOVED: dict[str, str] = {
    "compression_training": "removed from DeepSpeed 0.19; use dsimg prune / dsimg export and dsimg quantize",
    "quantize_training": "removed from DeepSpeed 0.19; use dsimg quantize",
    "eigenvalue": "removed from DeepSpeed 0.19 together with its quantization; delete the block",
    "elasticity": "removed from DeepSpeed 0.19; delete the block and set the batch sizes directly "
    "(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)",
    "nebula": "removed from DeepSpeed 0.19; delete the block, dsimg writes its own checkpoints",
    "sparse_gradients": "removed from DeepSpeed 0.19; delete the key",
    "sparse_attention": "removed from DeepSpeed 0.19; delete the block",
    "graph_harvesting": "removed from DeepSpeed 0.19; delete the key",
    "curriculum_learning": "removed from DeepSpeed 0.19; delete the block",
    "progressive_layer_drop": "removed from DeepSpeed 0.19; delete the block",
    "zero_optimization.mics_shard_size": "removed from DeepSpeed 0.19; see zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "removed from DeepSpeed 0.19; delete the key",
    "zero_optimization.zeropp_loco_param": "removed from DeepSpeed 0.19; delete the key",
    "session_params": "DeepSpeed's help text shows this wrapper, but DeepSpeed ignores it; move what it "
    "holds to the top level",
    "tensor_parallel": "dsimg trains data-parallel only; delete the block",
    "sequence_parallel_size": "dsimg trains data-parallel only; delete the key",
}
# Names DeepSpeed still reads, or that everybody once wrote; `_modernise` turns them into today's.
OLD_ZERO_KEYS = (
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "stage3_gather_fp16_weights_on_model_save",
)
OLD_TOP_KEYS = ("allgather_size", "bfloat16", "amp")
# Known to DeepSpeed, without effect on what dsimg does.
IDLE: dict[str, str] = {
    "data_efficiency": "it works through DeepSpeed's data loader, and dsimg has its own",
    "dataloader_drop_last": "it works through DeepSpeed's data loader, and dsimg has its own",
    "hybrid_engine": "it is for language models",
    "pipeline": "dsimg's models are not pipelines",
    "expert_parallel": "dsimg's models have no experts",
    "use_data_before_expert_parallelism": "dsimg's models have no experts",
    "vocabulary_size": "an image classifier has none",
    "weight_quantization": "it is for inference",
    "datastates_ckpt": "dsimg writes its own checkpoints",
    "autotuning": "it needs the `deepspeed --autotuning` launcher",
}
SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "beta": "betas",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "max_grad_norm": "gradient_clipping (at the top level)",
    "grad_clip": "gradient_clipping",
    "mixed_precision": "bf16",
    "zero": "zero_optimization",
    "name": "type",
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
}

_ADAM = (
    "lr betas eps weight_decay amsgrad bias_correction adam_w_mode torch_adam foreach fused set_grad_none "
    "fp32_optimizer_states"
)
_MUON = "lr muon_lr adam_lr momentum weight_decay betas eps ns_method per_head_muon adam_w_mode torch_adam"
_TORCH = "foreach maximize capturable differentiable"
# name -> its parameters. DeepSpeed's own names are read in any case, torch.optim's exactly as written here.
OPTIMIZERS: dict[str, str] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps foreach maximize fused",
    "Lamb": "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad",
    "Lion": "lr betas weight_decay set_grad_none",
    "Muon": _MUON,
    "SGD": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
    "RMSprop": f"lr alpha eps weight_decay momentum centered {_TORCH}",
    "NAdam": f"lr betas eps weight_decay momentum_decay decoupled_weight_decay {_TORCH}",
    "RAdam": f"lr betas eps weight_decay decoupled_weight_decay {_TORCH}",
    "Adadelta": f"lr rho eps weight_decay {_TORCH}",
    "Adamax": f"lr betas eps weight_decay {_TORCH}",
    "ASGD": f"lr lambd alpha t0 weight_decay {_TORCH}",
    "Rprop": f"lr etas step_sizes {_TORCH}",
    "Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
}
DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon")
# What DeepSpeed's ZeRO takes without `zero_allow_untested_optimizer` (runtime/zero/utils.py).
ZERO_TESTED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
OPTIMIZER_CLASS_NAMES = {
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "CPUAdam": "Adam",
    "FusedAdamW": "AdamW",
    "FusedLamb": "Lamb",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
    "DeepSpeedCPUAdagrad": "Adagrad",
}
REMOVED_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
REFUSED_OPTIMIZERS = {
    "MuAdam": "it needs the mup package and a model with its base shapes; use Adam",
    "MuAdamW": "it needs the mup package and a model with its base shapes; use AdamW",
    "MuSGD": "it needs the mup package and a model with its base shapes; use SGD",
    "LBFGS": "it needs a closure, which DeepSpeed does not pass; use SGD or AdamW",
    "SparseAdam": "it is for sparse gradients; use AdamW",
}
_BOOLEANS = (
    "amsgrad bias_correction adam_w_mode torch_adam foreach fused set_grad_none fp32_optimizer_states "
    "per_head_muon eps_inside_sqrt nesterov centered decoupled_weight_decay maximize capturable "
    "differentiable lr_range_test_staircase cycle_momentum three_phase"
)
_WHOLE = (
    "warmup_num_steps total_num_steps cycle_first_step_size cycle_second_step_size decay_step_size "
    "lr_range_test_step_size T_max T_0 T_mult step_size total_iters total_steps epochs steps_per_epoch "
    "step_size_up step_size_down cycle_first_stair_count cycle_second_stair_count"
)
# Kinds of optimizer.params and scheduler.params by name; all that is not here is a number.
PARAM_KINDS: dict[str, str] = {
    **dict.fromkeys(_BOOLEANS.split(), "bool"),
    **dict.fromkeys(_WHOLE.split(), "int>=0"),
    **dict.fromkeys(["betas", "etas", "step_sizes", "milestones"], "list"),
    **dict.fromkeys(["lr", "weight_decay", "muon_lr", "adam_lr"], "float>=0"),
    "ns_method": "str",
    "mode": "triangular|triangular2|exp_range",
    "scale_mode": "cycle|iterations",
    "anneal_strategy": "cos|linear",
    "warmup_type": "log|linear",
    # Adafactor's eps is a pair and lr schedules take one rate per group; DeepSpeed checks these itself.
    **dict.fromkeys(
        ["eps", "warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "max_lr", "base_lr"],
        "any number",
    ),
}

_CYCLE = "cycle_momentum base_momentum max_momentum"
SCHEDULERS: dict[str, str] = {
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
    "cycle_max_mom decay_mom_rate",
    "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "WarmupDecayLR": "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    "CosineAnnealingLR": "T_max eta_min",
    "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min",
    "StepLR": "step_size gamma",
    "MultiStepLR": "milestones gamma",
    "ExponentialLR": "gamma",
    "ConstantLR": "factor total_iters",
    "LinearLR": "start_factor end_factor total_iters",
    "PolynomialLR": "total_iters power",
    "OneCycleLR": f"max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy {_CYCLE} div_factor "
    "final_div_factor three_phase",
    "CyclicLR": f"base_lr max_lr step_size_up step_size_down mode gamma scale_mode {_CYCLE}",
}
DEEPSPEED_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "it needs a metric, which DeepSpeed does not pass",
    "LambdaLR": "it needs a Python function",
    "MultiplicativeLR": "it needs a Python function",
    "SequentialLR": "it needs Python objects",
    "ChainedScheduler": "it needs Python objects",
}
# What "auto" becomes, and what is filled in even where the key is absent.
SCHEDULER_FILLS: dict[str, str] = {
    "warmup_num_steps": "warmup",
    "total_num_steps": "steps",
    "total_steps": "steps",
    "T_max": "steps",
    "total_iters": "steps",
    "warmup_max_lr": "lr",
    "cycle_max_lr": "lr",
    "max_lr": "lr",
    "warmup_min_lr": "zero",
    "cycle_min_lr": "lr/25",
    "cycle_first_step_size": "steps/2",
}
SCHEDULER_NEEDS: dict[str, tuple[str, ...]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    # Without warmup_max_lr DeepSpeed overrides the optimizer's rate with a peak of 0.001.
    "WarmupDecayLR": ("total_num_steps", "warmup_max_lr"),
    "WarmupCosineLR": ("total_num_steps",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "StepLR": ("step_size",),
    "MultiStepLR": ("milestones",),
    "ExponentialLR": ("gamma",),
    "OneCycleLR": ("max_lr", "total_steps"),
    "CyclicLR": ("base_lr", "max_lr"),
}
FP16_ONLY_KEYS = tuple(key for key in BLOCKS["fp16"] if key not in BLOCKS["bf16"])
# Below this, what ZeRO-3 and offloading save is small beside what they cost in every step.
SMALL_MODEL = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line to print. `plan`: always there; `fact`: worth knowing; `warning`: probably not what was meant;
    `changed`: DeepSpeed is given something else than the file says."""

    kind: Literal["plan", "fact", "warning", "changed"]
    text: str


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """batch_size = micro_batch_size x accumulation_steps x world_size, in images."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int


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
        return _zero_stage(self.config)

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
        """Whether optimizer states live in CPU memory or on NVMe."""
        return _offloads(self.config, "offload_optimizer")

    @property
    def offload_param(self) -> bool:
        """Whether parameters live in CPU memory or on NVMe."""
        return _offloads(self.config, "offload_param")

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """`{"type": ..., "params": {...}}` from the JSON, or None: the stage's own."""
        return self.config.get("optimizer")

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """`{"type": ..., "params": {...}}` from the JSON, or None: the stage's own."""
        return self.config.get("scheduler")


# ---------------------------------------------------------------- finding and reading


def find_ds_config(name: str) -> Path:
    """Return the file for `--deepspeed_config`: a path, or the bare name of a shipped one (`zero2`).

    Raises ConfigError when it is a folder or is nowhere, with the names that exist.
    """
    path = Path(name)
    if path.is_file():
        return path
    here = Path(__file__).resolve().parent
    folder = next((f for f in (here / "ds_configs", here.parent / "ds_configs") if f.is_dir()), None)
    shipped = {file.stem: file for file in sorted(folder.glob("*.json"))} if folder else {}
    stem = path.name.removesuffix(".json")
    if path.parent == Path() and stem in shipped:
        return shipped[stem]
    names = f"the ones that come with dsimg are {', '.join(shipped)}" if shipped else "give the path of a JSON file"
    if path.is_dir():
        raise ConfigError(f"--deepspeed_config {name} is a folder, not a file; {names}")
    raise ConfigError(f"--deepspeed_config {name} does not exist{near(stem, shipped)}; {names}")


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON as people write them.

    Comments (`#`, `//`, `/* */`), trailing commas and a byte order mark are fine. DeepSpeed's own reader
    (hjson) also takes unquoted words as text, so that `False,` is true; here they are errors.

    Raises ConfigError with the line number for duplicate keys, NaN, Infinity, and whatever else is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    value = _Reader(path, text).document()
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else json.dumps(value)
        raise ConfigError(f"{path} holds {found}; a DeepSpeed config is one block: {{ ... }}")
    return value


_BLANK = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\s,:{}\[\]]+")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class _Reader:
    """A recursive-descent reader that knows the line it is on."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.at = path, text, 0

    def document(self) -> Any:
        value = self.value()
        if self.peek():
            raise self.error(f"{self.word()!r} after the end of the config; delete it")
        return value

    def error(self, what: str, at: int | None = None) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.line(self.at if at is None else at)}: {what}")

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def peek(self) -> str:
        blank = _BLANK.match(self.text, self.at)
        assert blank is not None  # the pattern matches the empty string
        self.at = blank.end()
        if self.text.startswith("/*", self.at):
            raise self.error("a comment opened with /* is never closed with */")
        return self.text[self.at : self.at + 1]

    def word(self) -> str:
        found = _WORD.match(self.text, self.at)
        return found.group() if found else self.text[self.at : self.at + 1]

    def value(self) -> Any:
        char = self.peek()
        if char == "{":
            return self.block()
        if char == "[":
            return self.list_()
        if char == '"':
            return self.string()
        if not char:
            raise self.error("unexpected end of the file; the rest of the config is missing")
        if number := _NUMBER.match(self.text, self.at):
            parsed = float(number.group())
            if not math.isfinite(parsed):
                raise self.error(f"{number.group()} is too large for a number")
            self.at = number.end()
            return int(number.group()) if number.group().lstrip("-").isdigit() else parsed
        word = self.word()
        if word in _WORDS:
            self.at += len(word)
            return _WORDS[word]
        raise self.error(_not_json(word))

    def string(self) -> str:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.error(f"bad text in quotes ({error.msg})") from None
        return str(value)

    def list_(self) -> list[Any]:
        start, items = self.at, []
        self.at += 1
        while self.peek() != "]":
            items.append(self.value())
            self.separator("]", start)
        self.at += 1
        return items

    def block(self) -> dict[str, Any]:
        start, items, lines = self.at, {}, dict[str, int]()
        self.at += 1
        while (char := self.peek()) != "}":
            if not char:
                raise self.unclosed("}", start)
            if char != '"':
                raise self.error(f"{self.word()!r} is not a key; keys stand in double quotes")
            line = self.line(self.at)
            key = self.string()
            if key in lines:
                raise self.error(f"{key!r} stands twice, on lines {lines[key]} and {line}; keep one of them")
            lines[key] = line
            if self.peek() != ":":
                raise self.error(f"a colon is missing after {key!r}")
            self.at += 1
            items[key] = self.value()
            self.separator("}", start)
        self.at += 1
        return items

    def separator(self, closing: str, start: int) -> None:
        end, char = self.at, self.peek()
        if char == ",":
            self.at += 1
        elif not char:
            raise self.unclosed(closing, start)
        elif char != closing:
            raise self.error(f"a comma is missing at the end, before {self.word()}", at=end)

    def unclosed(self, closing: str, start: int) -> ConfigError:
        opening = self.text[start]
        return self.error(
            f"unexpected end of the file; {opening} of line {self.line(start)} is never closed by {closing}"
        )


def _not_json(word: str) -> str:
    if word.lstrip("+-").lower() in ("nan", "inf", "infinity"):
        return f"{word} is not a number JSON or DeepSpeed can use (NaN, Infinity); write a finite number"
    if word.lower() in (*_WORDS, "none"):
        return f"{word} is not JSON; write {'null' if word.lower() == 'none' else word.lower()}"
    return f"{word} is neither a number, true, false, null nor text in double quotes"


# ---------------------------------------------------------------- linting: no model, no device


def lint_ds_config(
    raw: Mapping[str, Any],
    *,
    source: str,
    world_size: int,
    batch_size: int,
    batch_size_given: bool = False,
    optimizer: str | None = None,
    gradient_clipping: float | None = None,
) -> BatchSizes:
    """Check all that needs neither model, data nor device, and return the batch sizes the run will have.

    `source` names the file in messages; `batch_size` is the global batch the stage wants where the JSON
    leaves it open; `optimizer` and `gradient_clipping` are the flags, None where not given.
    Raises ConfigError that lists every problem of the file at once.
    """
    return _lint(
        raw,
        source=source,
        world_size=world_size,
        batch_size=batch_size,
        batch_size_given=batch_size_given,
        optimizer=optimizer,
        gradient_clipping=gradient_clipping,
    )[2]


def _lint(
    raw: Mapping[str, Any],
    *,
    source: str,
    world_size: int,
    batch_size: int,
    batch_size_given: bool,
    optimizer: str | None,
    gradient_clipping: float | None,
) -> tuple[dict[str, Any], list[Note], BatchSizes]:
    """Return the config in today's names and types ("auto" still in it), what changed, the batch sizes."""
    config: dict[str, Any] = copy.deepcopy(dict(raw))
    problems: list[str] = []
    notes: list[Note] = []
    _modernise(config, problems, notes)
    _check_block(config, "", problems, notes)
    _check_named(config, "optimizer", OPTIMIZERS, problems, notes)
    _check_named(config, "scheduler", SCHEDULERS, problems, notes)
    _check_together(config, problems)
    if optimizer is not None and "optimizer" in config:
        found = config["optimizer"].get("type") if isinstance(config["optimizer"], dict) else config["optimizer"]
        problems.append(
            f"optimizer is {_show(found)} in this file and --optimizer {optimizer} on the command line; "
            "keep one of them"
        )
    clipping = config.get("gradient_clipping")
    if gradient_clipping is not None and clipping not in (None, "auto", gradient_clipping):
        problems.append(
            f"gradient_clipping is {_show(clipping)} in this file and --gradient_clipping "
            f"{gradient_clipping} on the command line; keep one of them"
        )
    if problems:
        _raise(source, problems)
    sizes = _batch_sizes(config, source=source, world_size=world_size, batch_size=batch_size)
    if batch_size_given and sizes.batch_size != batch_size:
        raise ConfigError(
            f"{source}: its batch sizes make {sizes.batch_size} images per step and the command line asks "
            f'for {batch_size}; keep one of them, or write "auto" in the file'
        )
    return config, notes, sizes


def _raise(source: str, problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(f"{source}: {problems[0]}")
    raise ConfigError("\n".join([f"{source}: {len(problems)} problems", *(f"  - {problem}" for problem in problems)]))


def _modernise(config: dict[str, Any], problems: list[str], notes: list[Note]) -> None:
    """Replace shorthands and old names by today's, in place, each with a note."""

    def changed(text: str) -> None:
        notes.append(Note(kind="changed", text=text))

    if isinstance(config.get("zero_optimization"), bool):
        zero: dict[str, Any] = {"stage": int(config["zero_optimization"])}
        changed(f'zero_optimization: {_show(config["zero_optimization"])} is read as {{"stage": {zero["stage"]}}}')
        if "allgather_size" in config:
            zero["allgather_bucket_size"] = config.pop("allgather_size")
            changed("allgather_size is now zero_optimization.allgather_bucket_size")
        config["zero_optimization"] = zero
    elif "allgather_size" in config:
        del config["allgather_size"]
        problems.append("allgather_size: old name; write allgather_bucket_size in zero_optimization")
    if "bfloat16" in config:
        old = config.pop("bfloat16")
        if "bf16" in config:
            problems.append("bfloat16 is the old name of bf16, and both are there; keep bf16")
        else:
            config["bf16"] = old
            changed("bfloat16 is the old name of bf16; read as bf16")
    for block in ("fp16", "bf16", "torch_autocast"):
        if isinstance(config.get(block), bool):
            config[block] = {"enabled": config[block]}
            changed(f"{block}: {_show(config[block]['enabled'])} is read as {json.dumps(config[block])}")
    if "amp" in config:
        amp = config.pop("amp")
        wanted = amp.get("enabled") is True if isinstance(amp, dict) else amp is True
        if not wanted:
            changed("amp: Apex removed from DeepSpeed; the block was off and is dropped")
        elif any(_enabled(config, block) for block in ("fp16", "bf16", "torch_autocast")):
            changed("amp: Apex removed from DeepSpeed; dropped, as the file also says fp16 or bf16")
        else:
            config["bf16"] = {"enabled": True}
            changed("amp: Apex removed from DeepSpeed; bf16 is used instead (write fp16 or bf16 to choose)")
    if isinstance(config.get("bf16"), dict) and (stray := [key for key in FP16_ONLY_KEYS if key in config["bf16"]]):
        config["bf16"] = {key: value for key, value in config["bf16"].items() if key not in stray}
        changed(f"bf16 needs no loss scale; dropped, as each belongs to fp16: {', '.join(stray)}")
    for block in ("optimizer", "scheduler"):
        if isinstance(config.get(block), str):
            config[block] = {"type": config[block]}
            changed(f"{block}: {_show(config[block]['type'])} is read as {json.dumps(config[block])}")
    if isinstance(config.get("zero_optimization"), dict):
        _modernise_zero(config, config["zero_optimization"], problems, notes)


def _modernise_zero(config: dict[str, Any], zero: dict[str, Any], problems: list[str], notes: list[Note]) -> None:
    def changed(text: str) -> None:
        notes.append(Note(kind="changed", text=f"zero_optimization.{text}"))

    if "aio" in zero and "aio" not in config:
        config["aio"] = zero.pop("aio")
        changed("aio belongs at the top level; moved there")
    pin = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero:
            continue
        wanted = zero.pop(old)
        if new in zero:
            problems.append(f"zero_optimization.{old} is the old name of {new}, and both are there; keep {new}")
        elif wanted is True:
            zero[new] = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
            changed(f"{old}: true is the old form of {new}: {{device: cpu}}; read as such")
        elif wanted is False:
            changed(f"{old}: false is the old form of no {new}; dropped")
        else:
            problems.append(f"zero_optimization.{old} is {_show(wanted)}: write {new}: {{device: cpu}} instead")
    if pin is not None:
        changed("cpu_offload_use_pin_memory is now pin_memory in offload_optimizer, offload_param; read as such")
    if "stage3_gather_fp16_weights_on_model_save" in zero:
        old_value = zero.pop("stage3_gather_fp16_weights_on_model_save")
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", old_value)
        changed("stage3_gather_fp16_weights_on_model_save is now stage3_gather_16bit_weights_on_model_save")


def _check_block(block: dict[str, Any], name: str, problems: list[str], notes: list[Note]) -> None:
    """Check keys and types of a block and its inner ones, in place: null dropped, numbers out of quotes."""
    table = BLOCKS[name]
    prefix = f"{name}." if name else ""
    for key, value in list(block.items()):
        path = prefix + key
        if path in REMOVED:
            inner = f" ({', '.join(value)})" if path == "session_params" and isinstance(value, dict) else ""
            problems.append(f"{path}: {REMOVED[path]}{inner}")
        elif key not in table:
            problems.append(_unknown(path, key, table))
        elif value is None:
            del block[key]
        elif table[key] == "block":
            if isinstance(value, dict):
                _check_block(value, path, problems, notes)
            else:
                keys = ", ".join(BLOCKS[path])
                problems.append(f"{path} is {_show(value)}: it must be a block, {{ ... }}, of {keys}")
        else:
            block[key] = _checked(path, value, table[key], problems, notes)


def _unknown(path: str, key: str, known: Iterable[str]) -> str:
    known = list(known)
    homes = [name for name, table in BLOCKS.items() if key in table and key not in ("enabled", "device", "type")]
    if key in SYNONYMS:
        hint = f", did you mean '{SYNONYMS[key]}'?"
    elif homes:
        hint = f"; it belongs {'at the top level' if '' in homes else f'in {homes[0]}'}"
    else:
        hint = near(key, known) or (f"; known here: {', '.join(known)}" if len(known) < 10 else "; delete it")
    return f"{path}: unknown key{hint}"


def _checked(path: str, value: Any, kind: str, problems: list[str], notes: list[Note]) -> Any:
    """Return `value` in the type of `kind`; what cannot be read as that goes to `problems`."""
    if value == "auto" or kind in ("any", "any number"):
        if kind == "any number" and isinstance(value, str) and value != "auto":
            return _checked(path, value, "float", problems, notes)
        return value
    if "|" in kind:
        words = kind.split("|")
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        problems.append(f"{path} is {_show(value)}: it must be {', '.join(words[:-1])} or {words[-1]}")
        return value
    base, _, least = kind.partition(">=")
    if isinstance(value, str) and base in ("bool", "int", "float"):
        unquoted = _unquoted(value)
        if unquoted is not None:
            quoted = "true or false in quotes" if isinstance(unquoted, bool) else "number in quotes"
            whole = isinstance(unquoted, float) and base == "int" and unquoted.is_integer()
            shown = int(unquoted) if whole else unquoted
            notes.append(Note(kind="changed", text=f'{path}: {quoted}, "{value}", read as {_show(shown)}'))
            value = unquoted
    types: dict[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int, float),
        "float": (int, float),
        "str": (str,),
        "list": (list,),
        "dict": (dict,),
    }
    fits = isinstance(value, types[base]) and (base == "bool" or not isinstance(value, bool))
    if fits and base == "int":
        fits = float(value).is_integer()
        value = int(value) if fits else value
    if not fits or (least and value < float(least)):
        names = {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a number",
            "str": "text in quotes",
            "list": "a list",
            "dict": "a block, { ... }",
        }
        problems.append(f"{path} is {_show(value)}: it must be {names[base]}{f', at least {least}' if least else ''}")
    return value


def _unquoted(text: str) -> bool | float | None:
    """Return the number or truth value that `text` spells, or None."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a block" if isinstance(value, dict) else "a list"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _check_named(
    config: dict[str, Any], block: str, table: dict[str, str], problems: list[str], notes: list[Note]
) -> None:
    """Check the `optimizer` or `scheduler` block: its type, then the names and types of its params."""
    named = config.get(block)
    if not isinstance(named, dict):
        return
    kind = named.get("type")
    if not isinstance(kind, str):
        problems.append(f"{block} has no type, so DeepSpeed would ignore it; known: {', '.join(table)}")
        return
    refused = REFUSED_OPTIMIZERS if block == "optimizer" else REFUSED_SCHEDULERS
    exact = {name.lower(): name for name in (*table, *refused)}
    name = OPTIMIZER_CLASS_NAMES.get(kind) or exact.get(kind.lower())
    if kind.lower() in (removed.lower() for removed in REMOVED_OPTIMIZERS):
        problems.append(
            f"optimizer {kind} was removed from DeepSpeed 0.19; alternatives: AdamW or Lamb, and "
            "communication_data_type for less communication"
        )
        return
    if name is None:
        hint = f", did you mean '{SYNONYMS[kind]}'?" if kind in SYNONYMS else near(kind, table)
        problems.append(f"{block}.type {_show(kind)} is unknown{hint} Known: {', '.join(table)}")
        return
    if name in refused:
        problems.append(f"{block}.type {name} does not work with DeepSpeed: {refused[name]}")
        return
    if name != kind and not (name in DEEPSPEED_OPTIMIZERS and kind.lower() == name.lower()):
        notes.append(Note(kind="changed", text=f"{block}.type {kind} is read as {name}"))
    named["type"] = name
    params = named.setdefault("params", {})
    if not isinstance(params, dict):
        return  # _check_block has said so
    known = table[name].split()
    for key, value in list(params.items()):
        if value is None:
            del params[key]
        elif key not in known:
            problems.append(_unknown(f"{block}.params.{key}", key, known))
        else:
            kind_of = PARAM_KINDS.get(key, "float")
            params[key] = _checked(f"{block}.params.{key}", value, kind_of, problems, notes)
    if block == "scheduler":
        for need in SCHEDULER_NEEDS.get(name, ()):
            if need not in SCHEDULER_FILLS and params.get(need, "auto") == "auto":
                problems.append(f"scheduler {name} needs {need} in its params (steps count optimizer steps)")


def _check_together(config: dict[str, Any], problems: list[str]) -> None:
    """Keys that are right one by one and wrong together."""
    on = [block for block in ("fp16", "bf16", "torch_autocast") if _enabled(config, block) is True]
    if len(on) > 1:
        problems.append(f"{' and '.join(on)} are enabled together; choose one")
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    stage = zero.get("stage", 0)
    if isinstance(stage, int | float) and stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage is {_show(stage)}: it must be 0, 1, 2 or 3")
    for block in ("offload_optimizer", "offload_param"):
        offload = zero.get(block)
        if isinstance(offload, dict) and offload.get("device") == "nvme" and not offload.get("nvme_path"):
            problems.append(
                f'zero_optimization.{block}: device is nvme and nvme_path is missing; add "nvme_path": "/a/fast/disk"'
            )


def _enabled(config: dict[str, Any], block: str) -> Any:
    value = config.get(block)
    return value.get("enabled", False) if isinstance(value, dict) else False


def _batch_sizes(config: dict[str, Any], *, source: str, world_size: int, batch_size: int) -> BatchSizes:
    """Solve batch = micro x accumulation x world for what the JSON leaves open, as DeepSpeed would.

    A batch that is absent beside a fixed micro batch follows from it; one that is absent or "auto" otherwise
    is the stage's `batch_size`.
    """

    def fixed(key: str) -> int | None:
        value = config.get(key, "auto")
        return None if value == "auto" else int(value)

    train = fixed("train_batch_size")
    micro = fixed("train_micro_batch_size_per_gpu")
    steps = fixed("gradient_accumulation_steps")
    if train is None and (micro is None or (steps is None and config.get("train_batch_size") == "auto")):
        train, whose = batch_size, "the stage's batch size"
    else:
        whose = "train_batch_size"
    gpus = _gpus(world_size)
    if train is None:
        assert micro is not None
        steps = steps or 1
        return _sizes(micro * steps * world_size, micro, steps, world_size)
    if micro is not None and steps is not None:
        if train != micro * steps * world_size:
            ways = [f"set train_batch_size to {micro * steps * world_size}"]
            if train % (micro * world_size) == 0:
                ways.append(f"set gradient_accumulation_steps to {train // (micro * world_size)}")
            elif train % (steps * world_size) == 0:
                ways.append(f"set train_micro_batch_size_per_gpu to {train // (steps * world_size)}")
            else:
                ways.append('set two of the three to "auto"')
            if train % (micro * steps) == 0:
                ways.insert(0, f"{_gpus(train // (micro * steps))} would fit, start with so many")
            raise ConfigError(
                f"{source}: train_batch_size {train} is not {micro} (train_micro_batch_size_per_gpu) x "
                f"{steps} (gradient_accumulation_steps) x {world_size} (GPUs found); "
                f"{', or '.join(ways)}"
            )
        return _sizes(train, micro, steps, world_size)
    known, name = (micro, "train_micro_batch_size_per_gpu") if micro else (steps or 1, "gradient_accumulation_steps")
    unit = known * world_size
    if train % unit:
        fits = " or ".join(str(size) for size in (train // unit * unit, (train // unit + 1) * unit) if size)
        raise ConfigError(
            f"{source}: {whose} {train} cannot be split into {known} ({name}) x {gpus}; "
            f"{fits} would fit as the batch size"
        )
    other = train // unit
    return _sizes(train, known, other, world_size) if micro else _sizes(train, other, known, world_size)


def _sizes(batch: int, micro: int, steps: int, world: int) -> BatchSizes:
    return BatchSizes(batch_size=batch, micro_batch_size=micro, accumulation_steps=steps, world_size=world)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


# ---------------------------------------------------------------- resolving: this model, world and device


def resolve_ds_config(
    raw: Mapping[str, Any],
    *,
    source: str,
    world_size: int,
    device: Literal["cuda", "cpu"],
    has_batchnorm: bool,
    bf16_fast: bool,
    parameter_count: int | None,
    defaults: StageDefaults,
) -> DsConfig:
    """Turn a JSON as read into the one DeepSpeed gets, with a note for all that is filled or changed.

    `bf16_fast`: whether the device computes in bf16 natively (CUDA from Ampere on, a CPU with AVX512-BF16).
    `parameter_count`: parameters of the model, None where not known yet.
    Raises ConfigError as `lint_ds_config` does, and for what this device or world cannot do.
    """
    config, notes, sizes = _lint(
        raw,
        source=source,
        world_size=world_size,
        batch_size=defaults.batch_size,
        batch_size_given=defaults.batch_size_given,
        optimizer=defaults.optimizer,
        gradient_clipping=defaults.gradient_clipping,
    )
    stage = _zero_stage(config)
    filled: dict[str, Any] = {}
    plan = [_fill_batch(config, sizes, filled)]
    clipping = _fill_clipping(config, defaults, filled)
    _fill_optimizer(config, defaults, filled)
    _fill_scheduler(config, defaults, filled, notes)
    plan += [
        _choose_precision(config, notes, device=device, has_batchnorm=has_batchnorm, bf16_fast=bf16_fast),
        clipping,
    ]
    dropped = _drop_auto(config, "")
    if filled:
        text = ", ".join(f"{path} = {_show(value)}" for path, value in filled.items())
        notes.append(Note(kind="changed", text=f'"auto" or missing, filled in by dsimg: {text}'))
    for what, paths in (
        (
            "buckets set to DeepSpeed's defaults",
            [path for path in dropped if path.startswith("zero_optimization.")],
        ),
        ("left to its own default", [path for path in dropped if not path.startswith("zero_optimization.")]),
    ):
        if paths:
            notes.append(Note(kind="fact", text=f'"auto" {what}: {", ".join(paths)}'))
    _settle_optimizer(config, defaults, stage, device, source, notes)
    _settle_zero(config, stage, world_size, device, parameter_count, source, notes)
    _remark(config, notes)
    notes = sorted([*plan, *notes], key=lambda note: note.kind != "plan")
    return DsConfig(config=config, notes=tuple(notes))


def _zero_stage(config: dict[str, Any]) -> int:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return 0 if stage == "auto" else int(stage)


def _offloads(config: dict[str, Any], block: str) -> bool:
    return config.get("zero_optimization", {}).get(block, {}).get("device", "none") in ("cpu", "nvme")


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


def _choose_precision(
    config: dict[str, Any], notes: list[Note], *, device: str, has_batchnorm: bool, bf16_fast: bool
) -> Note:
    """Decide fp32, bf16 or fp16 and the form in which DeepSpeed can train this model so, in place."""
    wanted = {block: _enabled(config, block) for block in ("bf16", "fp16", "torch_autocast")}
    blocks = {block: config.pop(block, {}) for block in ("bf16", "fp16")}
    autocast = config.pop("torch_autocast", {})
    if wanted["torch_autocast"] is True or (wanted["torch_autocast"] == "auto" and bf16_fast):
        half = autocast.get("dtype", "auto") in ("float16", "fp16", "half", "torch.float16")
        config["torch_autocast"] = {**autocast, "enabled": True, "dtype": "float16" if half else "bfloat16"}
        _drop_for_autocast(config, "float16" if half else "bfloat16", notes)
        return Note(kind="plan", text=f"precision: {'fp16' if half else 'bf16'} autocast, weights in fp32")
    if wanted["bf16"] is True or wanted["fp16"] is True:
        mode, why = ("bf16" if wanted["bf16"] is True else "fp16"), "as the file asks"
    elif wanted["bf16"] == "auto" and bf16_fast:
        mode, why = "bf16", 'bf16 is "auto" and this device is fast in it'
    elif wanted["fp16"] == "auto" and device == "cuda":
        mode, why = "fp16", 'fp16 is "auto" and this is a GPU'
    else:
        autos = [block for block, value in wanted.items() if value == "auto"]
        because = (
            f'{" and ".join(autos)} is "auto" and this device is not fast in it'
            if autos
            else "the file asks for nothing else"
        )
        return Note(kind="plan", text=f"precision: fp32 ({because})")
    if mode == "bf16" and not bf16_fast:
        remedy = "fp16 is faster here" if device == "cuda" else "fp32 is faster here"
        notes.append(Note(kind="warning", text=f"bf16 is emulated on this device and slow; {remedy}"))
    reason = _why_autocast(config, mode, device, has_batchnorm)
    block = {**blocks[mode], "enabled": True}
    if reason is None:
        config[mode] = block
        return Note(kind="plan", text=f"precision: {mode} ({why})")
    dtype = "bfloat16" if mode == "bf16" else "float16"
    config["torch_autocast"] = {"enabled": True, "dtype": dtype}
    lost = [key for key in block if key != "enabled"]
    if wanted[mode] == "auto":
        why += f"; in this form as {reason}"
    if wanted[mode] is True or lost:
        tail = f" ({', '.join(lost)} dropped: autocast has its own loss scaler)" if lost else ""
        text = f"{mode} is run as torch_autocast {dtype} with weights in fp32: {reason}{tail}"
        notes.append(Note(kind="changed", text=text))
    _drop_for_autocast(config, dtype, notes)
    return Note(kind="plan", text=f"precision: {mode} autocast, weights in fp32 ({why})")


def _why_autocast(config: dict[str, Any], mode: str, device: str, has_batchnorm: bool) -> str | None:
    """Why DeepSpeed's own bf16 or fp16 cannot train this model here, or None where it can."""
    if has_batchnorm:
        # PR #8066, in releases from 0.19.2 on: parameters are cast, buffers are not.
        return f"DeepSpeed casts BatchNorm's weights to {mode} but not its running statistics, which fails"
    if mode == "fp16" and device == "cpu":
        return "DeepSpeed has no fp16 on CPU"
    types = config.get("data_types", {})
    if _zero_stage(config) == 0 and types.get("grad_accum_dtype", mode) not in (mode, "auto"):
        if config["gradient_accumulation_steps"] > 1:
            return f"DeepSpeed cannot accumulate {mode} gradients in fp32 at ZeRO stage 0"
        # The engine raises "unsupported mix" all the same, though one micro batch a step accumulates nothing.
        del types["grad_accum_dtype"]
    return None


def _drop_for_autocast(config: dict[str, Any], dtype: str, notes: list[Note]) -> None:
    """Take out, in place, what DeepSpeed asserts against beside torch_autocast."""
    lost = []
    types = config.get("data_types", {})
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        if types.get(key, "fp32") not in ("fp32", "auto"):
            del types[key]
            lost.append(f"data_types.{key}")
    zero = config.get("zero_optimization", {})
    if zero.get("zero_quantized_weights") is True:
        del zero["zero_quantized_weights"]
        lost.append("zero_optimization.zero_quantized_weights")
    if lost:
        text = f"{', '.join(lost)} dropped: torch_autocast {dtype} keeps weights and gradients in fp32"
        notes.append(Note(kind="changed", text=text))


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
    config: dict[str, Any], defaults: StageDefaults, stage: int, device: str, source: str, notes: list[Note]
) -> None:
    """Set the two flags without which DeepSpeed refuses optimizers under ZeRO."""
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


def _settle_zero(
    config: dict[str, Any],
    stage: int,
    world_size: int,
    device: str,
    parameter_count: int | None,
    source: str,
    notes: list[Note],
) -> None:
    zero = config.get("zero_optimization", {})
    small = parameter_count is None or parameter_count < SMALL_MODEL
    size = "" if parameter_count is None else f" ({parameter_count / 1e6:.1f} M parameters)"
    lost = [block for block, least in (("offload_optimizer", 1), ("offload_param", 3)) if stage < least]
    for block in (block for block in lost if _offloads(config, block)):
        # Stage 0 would demand DeepSpeed's CPU optimizer and then offload nothing.
        del zero[block]
        needed = "1, 2 or 3" if block == "offload_optimizer" else "3"
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
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(key) is True]
    if quantized and device == "cpu":
        raise ConfigError(f"{source}: {', '.join(quantized)}: DeepSpeed has this on GPUs only; delete it")
    partition = zero.get("zero_hpz_partition_size", 1)
    used = min(partition, world_size)
    if world_size % used:
        raise ConfigError(
            f"{source}: zero_hpz_partition_size {partition} does not divide the {_gpus(world_size)} found; "
            "use a divisor"
        )
    if partition > world_size:
        text = f"zero_hpz_partition_size {partition} needs {partition} GPUs; on {_gpus(world_size)} it is {used}"
        notes.append(Note(kind="fact", text=text))
    if (quantized or partition > 1) and stage < 3:
        keys = ", ".join([*quantized, *(["zero_hpz_partition_size"] if partition > 1 else [])])
        notes.append(Note(kind="warning", text=f"{keys}: without effect at ZeRO stage {stage}, only stage 3 reads it"))


def _remark(config: dict[str, Any], notes: list[Note]) -> None:
    """What is right and still deserves a word."""
    if "activation_checkpointing" in config:
        text = "activation_checkpointing has no effect, it needs a model that calls it; "
        text += "--gradient_checkpointing does what is meant"
        notes.append(Note(kind="fact", text=text))
    fp16 = config.get("fp16", {})
    power = fp16.get("initial_scale_power", 16)
    if power > 20 and fp16.get("loss_scale", 0) == 0:
        text = f"fp16: initial_scale_power {power} starts the loss scale at 2^{power}, so the first steps "
        text += "will be skipped, until it has fallen to about 2^16 (the default)"
        notes.append(Note(kind="fact", text=text))
    slow = [key for key in ("wall_clock_breakdown", "memory_breakdown") if config.get(key) is True]
    slow += [key for key in ("flops_profiler", "comms_logger") if _enabled(config, key) is True]
    if slow:
        notes.append(Note(kind="fact", text=f"{', '.join(slow)}: profiling slows the run"))
    monitors = {
        key: config[key].get("output_path") or "its default place"
        for key in ("tensorboard", "csv_monitor", "wandb", "comet")
        if _enabled(config, key) is True
    }
    if monitors:
        text = ", ".join(f"{key} to {place}" for key, place in monitors.items())
        notes.append(Note(kind="fact", text=f"DeepSpeed's monitors write {text}; a resumed run appends"))
    for key in (key for key in IDLE if key in config):
        notes.append(Note(kind="warning", text=f"{key} has no effect: {IDLE[key]}"))
