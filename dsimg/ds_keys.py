"""The keys of a DeepSpeed JSON, its optimizers and schedulers: which there are, their types, and those that are gone.

Read in deepspeed 0.19.8; a test compares the tables with the installed release.
"""


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
    "zero_optimization.aio": "its place is the top level, but it is for NVMe, where dsimg cannot offload to; "
    "delete the block",
    "session_params": "DeepSpeed's help text shows this wrapper, but DeepSpeed ignores it; move what it "
    "holds to the top level",
    "tensor_parallel": "dsimg trains data-parallel only; delete the block",
    "sequence_parallel_size": "dsimg trains data-parallel only; delete the key",
}
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
    "aio": "it is for NVMe, where dsimg cannot offload to",
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
