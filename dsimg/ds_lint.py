"""Check a DeepSpeed JSON as read: what needs neither model, data nor device. No torch, no deepspeed.

DeepSpeed itself ignores unknown top-level keys and takes many values that fail much later. Here each of these is an
error that names the key, and old names and shorthands are translated, with a note.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsimg.ds_batch import BatchSizes, batch_sizes
from dsimg.ds_keys import (
    BLOCKS,
    DEEPSPEED_OPTIMIZERS,
    FP16_ONLY_KEYS,
    OPTIMIZER_CLASS_NAMES,
    OPTIMIZERS,
    PARAM_KINDS,
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    REMOVED,
    REMOVED_OPTIMIZERS,
    SCHEDULER_FILLS,
    SCHEDULER_NEEDS,
    SCHEDULERS,
    SYNONYMS,
)
from dsimg.errors import ConfigError, near


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line to print. `plan`: always there; `fact`: worth knowing; `warning`: probably not what was meant;
    `changed`: DeepSpeed is given something else than the file says."""

    kind: Literal["plan", "fact", "warning", "changed"]
    text: str


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
    config, _ = checked_config(raw, source=source, optimizer=optimizer, gradient_clipping=gradient_clipping)
    return batch_sizes(
        config, source=source, world_size=world_size, batch_size=batch_size, batch_size_given=batch_size_given
    )


def checked_config(
    raw: Mapping[str, Any], *, source: str, optimizer: str | None, gradient_clipping: float | None
) -> tuple[dict[str, Any], list[Note]]:
    """Return a copy of the config in today's names and types, "auto" still in it, and notes of what changed.

    Raises ConfigError as `lint_ds_config` does, but for the batch sizes.
    """
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
            f"optimizer is {show(found)} in this file and --optimizer {optimizer} on the command line; keep one of them"
        )
    clipping = config.get("gradient_clipping")
    if gradient_clipping is not None and clipping not in (None, "auto", gradient_clipping):
        problems.append(
            f"gradient_clipping is {show(clipping)} in this file and --gradient_clipping "
            f"{gradient_clipping} on the command line; keep one of them"
        )
    if problems:
        lines = problems if len(problems) == 1 else [f"{len(problems)} problems", *(f"  - {text}" for text in problems)]
        raise ConfigError(f"{source}: " + "\n".join(lines))
    return config, notes


def _modernise(config: dict[str, Any], problems: list[str], notes: list[Note]) -> None:
    """Replace shorthands and old names by today's, in place, each with a note."""

    def changed(text: str) -> None:
        notes.append(Note(kind="changed", text=text))

    if isinstance(config.get("zero_optimization"), bool):
        zero: dict[str, Any] = {"stage": int(config["zero_optimization"])}
        changed(f'zero_optimization: {show(config["zero_optimization"])} is read as {{"stage": {zero["stage"]}}}')
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
            changed(f"{block}: {show(config[block]['enabled'])} is read as {json.dumps(config[block])}")
    if "amp" in config:
        amp = config.pop("amp")
        wanted = amp.get("enabled") is True if isinstance(amp, dict) else amp is True
        if not wanted:
            changed("amp: Apex removed from DeepSpeed; the block was off and is dropped")
        elif any(enabled(config, block) for block in ("fp16", "bf16", "torch_autocast")):
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
            changed(f"{block}: {show(config[block]['type'])} is read as {json.dumps(config[block])}")
    if isinstance(config.get("zero_optimization"), dict):
        _modernise_zero(config, config["zero_optimization"], problems, notes)


def _modernise_zero(config: dict[str, Any], zero: dict[str, Any], problems: list[str], notes: list[Note]) -> None:
    def changed(text: str) -> None:
        notes.append(Note(kind="changed", text=f"zero_optimization.{text}"))

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
            problems.append(f"zero_optimization.{old} is {show(wanted)}: write {new}: {{device: cpu}} instead")
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
                problems.append(f"{path} is {show(value)}: it must be a block, {{ ... }}, of {keys}")
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
        hint = near(key, known)
        if hint == ".":
            hint = f"; known here: {', '.join(known)}" if len(known) < 10 else "; delete it"
    return f"{path}: unknown key{hint}"


# What a value of each kind is in Python, and in words.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "text in quotes"),
    "list": (list, "a list"),
    "dict": (dict, "a block, { ... }"),
}


def _checked(path: str, value: Any, kind: str, problems: list[str], notes: list[Note]) -> Any:
    """Return `value` in the type of `kind`; what cannot be read as that goes to `problems`."""
    if value == "auto" or kind == "any":
        return value
    if kind == "any number":
        return _checked(path, value, "float", problems, notes) if isinstance(value, str) else value
    if "|" in kind:
        words = kind.split("|")
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        problems.append(f"{path} is {show(value)}: it must be {', '.join(words[:-1])} or {words[-1]}")
        return value
    base, _, least = kind.partition(">=")
    if isinstance(value, str) and base in ("bool", "int", "float"):
        unquoted = _unquoted(value)
        if unquoted is not None:
            quoted = "true or false in quotes" if isinstance(unquoted, bool) else "number in quotes"
            text, value = value, _whole(unquoted) if base == "int" else unquoted
            notes.append(Note(kind="changed", text=f'{path}: {quoted}, "{text}", read as {show(value)}'))
    if base == "int":
        value = _whole(value)
    types, name = _KINDS[base]
    fits = isinstance(value, types) and (base == "bool" or not isinstance(value, bool))
    if not fits or (least and value < float(least)):
        problems.append(f"{path} is {show(value)}: it must be {name}{f', at least {least}' if least else ''}")
    return value


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an int, all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unquoted(text: str) -> bool | float | None:
    """Return the number or truth value that `text` spells, or None."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def show(value: Any) -> str:
    """Return a value as the file would have it; blocks and lists by their kind only."""
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
        problems.append(f"{block}.type {show(kind)} is unknown{hint} Known: {', '.join(table)}")
        return
    if name in refused:
        problems.append(f"{block}.type {name} does not work with DeepSpeed: {refused[name]}")
        return
    if name != kind and not (name in DEEPSPEED_OPTIMIZERS and kind.lower() == name.lower()):
        notes.append(Note(kind="changed", text=f"{block}.type {kind} is read as {name}"))
    named["type"] = name
    if named.get("params") == "auto":
        named["params"] = {}  # each is filled where the stage knows it
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
    on = [block for block in ("fp16", "bf16", "torch_autocast") if enabled(config, block) is True]
    if len(on) > 1:
        problems.append(f"{' and '.join(on)} are enabled together; choose one")
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    stage = zero.get("stage", 0)
    if isinstance(stage, int | float) and stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage is {show(stage)}: it must be 0, 1, 2 or 3")
    for block in ("offload_optimizer", "offload_param"):
        offload = zero.get(block)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            path = "" if offload.get("nvme_path") else " (and nvme_path is missing)"
            problems.append(
                f"zero_optimization.{block}: device is nvme{path}, and dsimg's checkpoints cannot read states "
                'that are swapped to NVMe; write "device": "cpu"'
            )


def enabled(config: dict[str, Any], block: str) -> Any:
    """Return a block's `enabled`: true, false, "auto", or whatever an unchecked config has there."""
    value = config.get(block)
    return value.get("enabled", False) if isinstance(value, dict) else False


def zero_stage(config: dict[str, Any]) -> int:
    """Return a checked config's ZeRO stage, 0 where it is absent or still "auto"."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return 0 if stage == "auto" else int(stage)
