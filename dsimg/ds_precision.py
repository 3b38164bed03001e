"""Choose fp32, bf16 or fp16, and the form in which DeepSpeed can train this model so: its own or torch_autocast."""

from typing import Any

from dsimg.ds_lint import Note, enabled, zero_stage

_UNSCALED = "at ZeRO stage 0 DeepSpeed divides fp16 gradients by a loss scale that the loss was never multiplied by"


def choose_precision(
    config: dict[str, Any], notes: list[Note], *, device: str, has_batchnorm: bool, bf16_fast: bool
) -> Note:
    """Write the choice into a checked config whose batch is filled in, in place, and return the plan's line for it."""
    wanted = {block: enabled(config, block) for block in ("bf16", "fp16", "torch_autocast")}
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
    block = {**blocks[mode], "enabled": True}
    power = block.get("initial_scale_power", "auto")
    huge = mode == "fp16" and power != "auto" and power > 20 and block.get("loss_scale", 0) in (0, "auto")
    reason = _why_autocast(config, mode, device, has_batchnorm)
    if reason is None:
        config[mode] = block
        if huge:
            text = f"fp16: initial_scale_power {power} starts the loss scale at 2^{power}, so the first steps "
            text += "will be skipped, until it has fallen to about 2^16 (the default)"
            notes.append(Note(kind="fact", text=text))
        return Note(kind="plan", text=f"precision: {mode} ({why})")
    dtype = "bfloat16" if mode == "bf16" else "float16"
    config["torch_autocast"] = {"enabled": True, "dtype": dtype}
    lost = [key for key in block if key != "enabled"]
    if wanted[mode] == "auto":
        why += f"; in this form as {reason}"
    if wanted[mode] is True or lost:
        instead = "autocast has its own loss scaler" if mode == "fp16" else "autocast has no such key"
        tail = f" ({', '.join(lost)} dropped: {instead})" if lost else ""
        text = f"{mode} is run as torch_autocast {dtype} with weights in fp32: {reason}{tail}"
        # An ordinary fp16 file at stage 0 asks for nothing wrong, and gets the fp16 that it means: a line of the plan.
        notes.append(Note(kind="plan" if reason == _UNSCALED else "changed", text=text))
    if huge:
        text = f"fp16: initial_scale_power {power} is not used, as autocast's loss scale starts at 2^16; where "
        text += "DeepSpeed's own fp16 takes it the first steps will be skipped"
        notes.append(Note(kind="fact", text=text))
    _drop_for_autocast(config, dtype, notes)
    return Note(kind="plan", text=f"precision: {mode} autocast, weights in fp32 ({why})")


def _why_autocast(config: dict[str, Any], mode: str, device: str, has_batchnorm: bool) -> str | None:
    """Return why DeepSpeed's own bf16 or fp16 cannot train this model here, or None where it can.

    Drops, in place, a `grad_accum_dtype` that alone would stand in the way and means nothing.
    """
    if has_batchnorm:
        # PR #8066, in releases from 0.19.2 on: parameters are cast, buffers are not.
        return f"DeepSpeed casts BatchNorm's weights to {mode} but not its running statistics, which fails"
    if mode == "fp16" and device == "cpu":
        return "DeepSpeed has no fp16 on CPU"
    if mode == "fp16" and zero_stage(config) == 0:
        # The engine's backward (0.19.8) scales for a ZeROOptimizer and for autocast's GradScaler. FP16_Optimizer and
        # FP16_UnfusedOptimizer, which stage 0 has, are neither, and divide by the scale all the same.
        return _UNSCALED
    types = config.get("data_types", {})
    if zero_stage(config) == 0 and types.get("grad_accum_dtype", "bf16") not in ("bf16", "auto"):
        if config["gradient_accumulation_steps"] > 1:
            return "DeepSpeed cannot accumulate bf16 gradients in fp32 at ZeRO stage 0"
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
