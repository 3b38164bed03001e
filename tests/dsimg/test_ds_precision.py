"""dsimg.ds_precision: fp32, bf16 or fp16, as DeepSpeed's own or as autocast."""

from typing import Any

import pytest

from tests.dsimg.ds_cases import resolve, texts


@pytest.mark.parametrize(
    ("raw", "device", "batchnorm", "fast", "precision"),
    [
        ({}, "cuda", True, True, "fp32"),
        ({"bf16": {"enabled": True}}, "cuda", False, True, "bf16"),
        ({"bf16": {"enabled": True}}, "cuda", True, True, "bf16 autocast"),
        ({"bf16": {"enabled": True}}, "cpu", False, True, "bf16"),
        ({"bf16": {"enabled": True}}, "cpu", True, True, "bf16 autocast"),
        ({"fp16": {"enabled": True}}, "cuda", False, True, "fp16"),
        ({"fp16": {"enabled": True}}, "cuda", True, True, "fp16 autocast"),
        ({"fp16": {"enabled": True}}, "cpu", False, True, "fp16 autocast"),
        ({"bf16": {"enabled": "auto"}}, "cpu", False, True, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "cpu", True, True, "bf16 autocast"),
        ({"bf16": {"enabled": "auto"}}, "cpu", True, False, "fp32"),
        ({"bf16": {"enabled": "auto"}}, "cuda", True, False, "fp32"),
        ({"fp16": {"enabled": "auto"}}, "cuda", False, True, "fp16"),
        ({"fp16": {"enabled": "auto"}}, "cpu", False, True, "fp32"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "cuda", False, True, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "cuda", False, False, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "cuda", False, True, "fp32"),
        ({"torch_autocast": {"enabled": True}}, "cuda", False, True, "bf16 autocast"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "cpu", True, True, "fp16 autocast"),
    ],
)
def test_precision(raw: dict[str, Any], device: str, batchnorm: bool, fast: bool, precision: str) -> None:
    result = resolve(raw, device=device, has_batchnorm=batchnorm, bf16_fast=fast)
    assert result.precision == precision
    assert [text.startswith(f"precision: {precision}") for text in texts(result, "plan")].count(True) == 1
    enabled = [key for key in ("bf16", "fp16", "torch_autocast") if result.config.get(key, {}).get("enabled")]
    assert len(enabled) == (precision != "fp32")
    asked = any(block.get("enabled") is True for key, block in raw.items() if key != "torch_autocast")
    translated = [text for text in texts(result, "changed") if "is run as torch_autocast" in text]
    assert len(translated) == (asked and precision.endswith("autocast"))


def test_a_translated_fp16_says_why_and_what_it_drops() -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
    raw = {"train_batch_size": 8, "fp16": fp16, "data_types": {"param_dtype": "fp16"}}
    result = resolve(raw, has_batchnorm=True)
    assert result.config["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    assert result.config["data_types"] == {}
    assert texts(result, "changed") == [
        "fp16 is run as torch_autocast float16 with weights in fp32: DeepSpeed casts BatchNorm's weights to fp16 but "
        "not its running statistics, which fails (loss_scale, initial_scale_power dropped: autocast has its own loss "
        "scaler)",
        "data_types.param_dtype dropped: torch_autocast float16 keeps weights and gradients in fp32",
    ]


def test_fp32_accumulation_at_stage_0_works_although_deepspeed_refuses_the_mix() -> None:
    raw = {"train_batch_size": 8, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    one = resolve(raw)
    assert (one.precision, one.config["data_types"], texts(one, "changed")) == ("bf16", {}, [])
    several = resolve({**raw, "gradient_accumulation_steps": 4})
    assert several.precision == "bf16 autocast"
    assert "cannot accumulate bf16 gradients in fp32 at ZeRO stage 0" in " ".join(texts(several, "changed"))
    sharded = resolve({**raw, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}})
    assert (sharded.precision, sharded.config["data_types"]) == ("bf16", {"grad_accum_dtype": "fp32"})


def test_slow_bf16_and_a_huge_loss_scale_are_remarked() -> None:
    slow = resolve({"bf16": {"enabled": True}}, bf16_fast=False)
    assert texts(slow, "warning") == ["bf16 is emulated on this device and slow; fp16 is faster here"]
    huge = resolve({"fp16": {"enabled": True, "initial_scale_power": 32}})
    assert "the first steps will be skipped" in texts(huge, "fact")[0]
