"""dsimg.ds_config: what a user's DeepSpeed JSON becomes, and what is said about it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsimg.ds_config import resolve_ds_config
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.errors import ConfigError, DsimgError
from tests.dsimg.ds_cases import installed_deepspeed_config, resolve, stage, texts

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "cases" / "ds_configs"
ROWS: list[dict[str, Any]] = json.loads((CASES / "expect.json").read_text())["rows"] if CASES.is_dir() else []
SHIPPED = ("bf16", "demo", "fp16", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


# ---------------------------------------------------------------- shared/cases beside the checkout


# Mentions that are a sentence about the message and not words of it.
MEANT = {
    "every key that holds it": [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "zero_optimization.reduce_bucket_size",
    ],
}


def answer(row: dict[str, Any], **changes: Any) -> tuple[str, str]:
    """The verdict in the table's words, and all that is said."""
    try:
        result = resolve(read_ds_config(CASES / row["file"]), **changes)
    except DsimgError as error:
        return "error", str(error)
    kinds = {note.kind for note in result.notes}
    verdicts = {"changed": "translate", "warning": "warn", "fact": "accept_note"}
    verdict = next((word for kind, word in verdicts.items() if kind in kinds), "accept")
    return verdict, "\n".join(note.text for note in result.notes)


@pytest.mark.skipif(not ROWS, reason="no shared/cases beside the checkout")
@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_every_shared_case_gets_its_answer(row: dict[str, Any]) -> None:
    verdict, said = answer(row)
    assert verdict in row["front_end"]["verdict"], said
    for mention in row["front_end"]["mention"]:
        words = MEANT.get(mention) or re.findall(r"[\w./'^-]+|[{}]", mention)
        missing = [word for word in words if word.lower() not in said.lower()]
        assert not missing, f"{mention!r}: {missing} not in: {said}"


@pytest.mark.skipif(not ROWS, reason="no shared/cases beside the checkout")
@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_every_shared_case_on_a_cpu_with_batchnorm(row: dict[str, Any]) -> None:
    """Errors stay errors, no other file becomes one, and no bf16 or fp16 block survives BatchNorm."""
    try:
        result = resolve(read_ds_config(CASES / row["file"]), device="cpu", has_batchnorm=True)
    except ConfigError:
        # ZeRO++ is the one thing here that needs a GPU.
        assert "error" in row["front_end"]["verdict"] or row["file"] == "zeropp_quantized.json"
        return
    assert row["front_end"]["verdict"] != ["error"]
    assert result.precision in ("fp32", "bf16 autocast", "fp16 autocast")
    assert {"bf16", "fp16"}.isdisjoint(result.config)
    assert '"auto"' not in json.dumps(result.config)


@pytest.mark.skipif(not ROWS, reason="no shared/cases beside the checkout")
def test_the_best_of_several_verdicts_is_given_where_not_stated_otherwise() -> None:
    second = {
        # A note is due (its `mention`), and a note is not a bare "accept".
        "activation_checkpointing.json",
        "flops_and_clock.json",
        "monitors_all.json",
        "onecycle_adamw.json",
        "bfloat16_old_block.json",
        "zero_stage_string.json",
        # aio is for NVMe, from which dsimg's checkpoints cannot read.
        "aio_inside_zero.json",
        # The stage has a batch size, so there is nothing the user must mend.
        "batch_missing.json",
        # hjson takes it; a comma that is missing may be a line that is missing.
        "missing_comma.json",
    }
    assert {row["file"] for row in ROWS if answer(row)[0] != row["front_end"]["verdict"][0]} == second


# ---------------------------------------------------------------- DeepSpeed and torch


def test_deepspeed_itself_accepts_the_resolved_config() -> None:
    raw = {
        "train_batch_size": "auto",
        "amp": {"enabled": True},
        "zero_optimization": {"stage": "2", "cpu_offload": True, "reduce_bucket_size": 5e8},
        "optimizer": "sgd",
    }
    result = resolve(raw, has_batchnorm=True)
    taken = installed_deepspeed_config().DeepSpeedConfig(result.config)
    assert (taken.train_batch_size, taken.gradient_clipping, taken.optimizer_name) == (48, 1.0, "SGD")
    assert taken.torch_autocast_enabled
    assert not taken.bfloat16_config.enabled
    assert taken.zero_config.offload_optimizer.device == "cpu"


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    heavy = ("torch", "deepspeed", "pydantic")
    code = f"import sys, dsimg.ds_config, dsimg.ds_json; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- "auto" and what is missing


@pytest.mark.parametrize(
    ("raw", "flag", "expected", "plan"),
    [
        ({}, None, 1.0, "gradients clipped to norm 1 (DeepSpeed's default"),
        ({}, 0.5, 0.5, "gradients clipped to norm 0.5"),
        ({"gradient_clipping": "auto"}, None, 1.0, "gradients clipped to norm 1"),
        ({"gradient_clipping": "auto"}, 0.0, 0.0, "no clipping"),
        ({"gradient_clipping": 0.0}, None, 0.0, "no clipping"),
        ({"gradient_clipping": 0}, 0.0, 0.0, "no clipping"),
    ],
)
def test_gradient_clipping_is_always_written(raw: Any, flag: float | None, expected: float, plan: str) -> None:
    result = resolve(raw, defaults=stage(gradient_clipping=flag))
    assert result.config["gradient_clipping"] == expected
    assert any(text.startswith(plan) for text in texts(result, "plan"))


def test_auto_is_filled_everywhere_and_said_in_one_line() -> None:
    raw = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": "auto"},
    }
    result = resolve(raw, world_size=2)
    assert '"auto"' not in json.dumps(result.config)
    assert result.optimizer == {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}}
    assert result.scheduler == {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 5000},
    }
    assert result.config["zero_optimization"] == {"stage": 3}
    assert texts(result, "changed")[0] == (
        '"auto" or missing, filled in by dsimg: train_batch_size = 48, gradient_clipping = 1, '
        "optimizer.params.lr = 0.05, optimizer.params.weight_decay = 0.0001, optimizer.params.momentum = 0.9, "
        "scheduler.params.warmup_num_steps = 100, scheduler.params.total_num_steps = 5000"
    )
    assert (
        '"auto" buckets set to DeepSpeed\'s defaults: zero_optimization.reduce_bucket_size, '
        "zero_optimization.stage3_max_live_parameters"
    ) in texts(result, "fact")


def test_a_missing_rate_is_the_stages_and_not_a_thousandth() -> None:
    result = resolve({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": {}}})
    assert result.optimizer == {"type": "AdamW", "params": {"lr": 0.05}}
    assert result.scheduler == {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_max_lr": 0.05}}


def test_the_word_auto_stays_where_it_is_a_value() -> None:
    result = resolve({"data_types": {"keep_in_fp32_modules": "auto"}})
    assert result.config["data_types"] == {"keep_in_fp32_modules": "auto"}


# ---------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    ("scheduler", "kind", "text"),
    [
        (
            {"type": "CosineAnnealingLR", "params": {"T_max": 90}},
            "warning",
            "scheduler CosineAnnealingLR is stepped every optimizer step, not every epoch; "
            "T_max 90 counts steps, and this run has 5000",
        ),
        ({"type": "CosineAnnealingLR"}, "fact", "T_max 5000 counts steps"),
        ({"type": "MultiStepLR", "params": {"milestones": [30, 60]}}, "warning", "milestones [30, 60] counts steps"),
        ({"type": "StepLR", "params": {"step_size": 2000}}, "fact", "step_size 2000 counts steps"),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "plan",
            "scheduler WarmupLR: peak learning rate 0.05 after 10 steps",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 6000}},
            "warning",
            "after 6000 steps, but the run has only 5000",
        ),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.001}},
            "fact",
            "the cycle's learning rates replace the optimizer's: 0.001 to 0.05",
        ),
    ],
)
def test_what_a_scheduler_will_do_is_said(scheduler: dict[str, Any], kind: str, text: str) -> None:
    result = resolve({"scheduler": scheduler})
    assert any(text in line for line in texts(result, kind)), result.notes


def test_a_name_in_the_wrong_case_is_read_as_the_right_one() -> None:
    result = resolve({"optimizer": "sgd", "scheduler": {"type": "warmuplr"}})
    assert result.optimizer is not None
    assert result.scheduler is not None
    assert (result.optimizer["type"], result.scheduler["type"]) == ("SGD", "WarmupLR")
    # DeepSpeed reads its own names in any case, so this is no change.
    assert (
        resolve({"train_batch_size": 8, "optimizer": {"type": "adamw", "params": {"lr": 1}}}).notes[-1].kind == "plan"
    )


# ---------------------------------------------------------------- ZeRO and optimizers


@pytest.mark.parametrize(
    ("optimizer", "level", "flag", "kind"),
    [
        ("SGD", 1, True, "changed"),
        ("SGD", 0, None, None),
        ("RMSprop", 2, True, "changed"),
        ("AdamW", 2, None, None),
        ("Lion", 1, None, None),
        (None, 2, True, "plan"),
        (None, 0, None, None),
    ],
)
def test_the_untested_optimizer_flag(optimizer: str | None, level: int, flag: bool | None, kind: str | None) -> None:
    raw: dict[str, Any] = {"zero_optimization": {"stage": level}}
    if optimizer:
        raw["optimizer"] = {"type": optimizer, "params": {"lr": 0.1}}
    result = resolve(raw)
    assert result.config.get("zero_allow_untested_optimizer") is flag
    assert [note.kind for note in result.notes if "zero_allow_untested_optimizer" in note.text] == [kind] * bool(kind)


def test_lamb_is_refused_where_zero_flattens_its_layers() -> None:
    raw = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match=r"one trust ratio for all weights.*use ds_configs/zero0.json"):
        resolve(raw)
    with pytest.raises(ConfigError, match="LAMB at ZeRO stage 2"):
        resolve({"zero_optimization": {"stage": 2}}, defaults=stage(optimizer="lamb"))
    assert resolve({**raw, "zero_optimization": {"stage": 0}}).zero_stage == 0
    assert "one trust ratio" in texts(resolve({**raw, "zero_allow_untested_optimizer": True}), "warning")[0]


def test_offloading() -> None:
    raw: dict[str, Any] = {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}}
    result = resolve(raw)
    assert result.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert result.offload_optimizer
    assert result.config["zero_force_ds_cpu_optimizer"] is False
    assert "slower for a model of this size (25.6 M parameters)" in " ".join(texts(result, "fact"))
    large = resolve(raw, parameter_count=3_000_000_000)
    assert not any("slower" in text for text in texts(large, "fact"))
    assert any("offload on a CPU moves nothing" in text for text in texts(resolve(raw, device="cpu"), "fact"))
    by_deepspeed = resolve({**raw, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    assert "zero_force_ds_cpu_optimizer" not in by_deepspeed.config
    stage_0 = resolve({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}})
    assert not stage_0.offload_optimizer
    assert "it needs stage 1, 2 or 3, and this is stage 0" in texts(stage_0, "changed")[-1]


def test_zeropp_partition_against_the_world() -> None:
    raw = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    facts = " ".join(texts(resolve(raw), "fact"))
    assert "zero_hpz_partition_size 8 needs 8 GPUs; on 1 GPU it is 1" in facts
    with pytest.raises(ConfigError, match="zero_hpz_partition_size 8 does not divide the 12 GPUs found"):
        resolve(raw, world_size=12)
    assert not any("hpz" in text for text in texts(resolve(raw, world_size=16), "fact"))
    quantized = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
    with pytest.raises(ConfigError, match="zero_quantized_gradients: DeepSpeed has this on GPUs only"):
        resolve(quantized, device="cpu")
    early = resolve({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}})
    assert "without effect at ZeRO stage 2, only stage 3 reads it" in texts(early, "warning")[0]
    weights = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}, "bf16": {"enabled": True}}
    assert "zero_quantized_weights" not in resolve(weights, has_batchnorm=True).config["zero_optimization"]


@pytest.mark.parametrize(
    ("raw", "block", "note"),
    [
        (
            {"managed_gradient_accumulation": False},
            "",
            "managed_gradient_accumulation: false is set to true: dsimg itself says where a step ends",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "zero_optimization",
            "zero_optimization.compute_grad_norm: false is set to true: the norm is shown, and tells which steps are "
            "not finite",
        ),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": 1}},
            "bf16",
            "bf16.check_grad_overflow: false is set to true: a step whose gradient is not finite is to be skipped",
        ),
    ],
)
def test_what_dsimg_relies_on_cannot_be_turned_off(raw: dict[str, Any], block: str, note: str) -> None:
    result = resolve({"train_batch_size": 8, **raw})
    key = note.split(":")[0].removeprefix(f"{block}.")
    assert (result.config[block] if block else result.config)[key] is True
    assert texts(result, "changed") == [note]
    assert installed_deepspeed_config().DeepSpeedConfig(result.config).managed_gradient_accumulation


def test_what_dsimg_relies_on_is_not_written_where_the_file_leaves_it_alone() -> None:
    result = resolve({"train_batch_size": 8, "bf16": {"enabled": False, "check_grad_overflow": False}})
    assert texts(result, "changed") == []
    assert result.config == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }


def test_a_monitor_without_its_package_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Any] = {name: {"enabled": True} for name in ("tensorboard", "csv_monitor", "wandb", "comet")}
    asked: list[str] = []

    def only_wandb(module: str) -> bool:
        asked.append(module)
        return module == "wandb"

    with pytest.raises(ConfigError) as caught:
        resolve(raw, installed=only_wandb)
    assert str(caught.value) == (
        "user.json: tensorboard, comet are enabled and their packages are not installed; pip install tensorboard "
        "'comet_ml>=3.41', or disable what is not wanted"
    )
    assert asked == ["tensorboard", "wandb", "comet_ml"]
    assert "comet to its default place" in " ".join(texts(resolve(raw), "fact"))
    off = {"wandb": {"enabled": False}, "csv_monitor": {"enabled": True}}
    assert resolve(off, installed=lambda module: False).config["csv_monitor"] == {"enabled": True}

    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="wandb is enabled and its package is not installed; pip install wandb, or"):
        resolve_ds_config(
            {"wandb": {"enabled": True}},
            source="user.json",
            world_size=1,
            device="cpu",
            has_batchnorm=False,
            bf16_fast=False,
            parameter_count=None,
            defaults=stage(),
        )


def test_what_deserves_a_word_gets_one() -> None:
    raw = {
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": "logs/csv"},
        "wandb": {"enabled": False},
        "activation_checkpointing": {"partition_activations": False},
        "data_efficiency": {"enabled": True},
    }
    result = resolve(raw)
    facts = " ".join(texts(result, "fact"))
    for text in ("wall_clock_breakdown: profiling slows the run", "csv_monitor to logs/csv", "a model that calls it"):
        assert text in facts
    assert "wandb" not in facts
    assert texts(result, "warning")[0].startswith("data_efficiency has no effect")


# ---------------------------------------------------------------- the shipped files


def test_the_shipped_files_are_the_ones_in_the_readme() -> None:
    folder = ROOT / "ds_configs"
    assert tuple(sorted(path.stem for path in folder.glob("*.json"))) == SHIPPED
    rows = re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == list(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batchnorm", [True, False])
def test_each_shipped_file_resolves_everywhere(name: str, world: int, device: str, batchnorm: bool) -> None:
    raw = read_ds_config(find_ds_config(name))
    result = resolve(raw, source=name, world_size=world, device=device, has_batchnorm=batchnorm)
    assert (result.batch_size, result.micro_batch_size * world, result.accumulation_steps) == (48, 48, 1)
    assert '"auto"' not in json.dumps(result.config)
    assert result.zero_stage == (int(name[4]) if name.startswith("zero") else 2 if name == "demo" else 0)
    expected = "fp16" if name == "fp16" else "bf16"
    autocast = batchnorm or name == "fp16"
    assert result.precision == (f"{expected} autocast" if autocast else expected)
    assert texts(result, "warning") == []
    assert result.offload_optimizer == name.endswith("offload")


def test_params_that_are_auto_are_filled_one_by_one() -> None:
    result = resolve({"train_batch_size": 64, "optimizer": {"type": "AdamW", "params": "auto"}})
    assert result.optimizer is not None
    assert result.optimizer["params"]["lr"] == stage().lr
