"""dsimg.ds_precision: fp32, bf16 or fp16, as DeepSpeed's own or as autocast."""

from typing import Any

import deepspeed
import pytest
import torch

from dsimg.world import start_world
from tests.dsimg.ds_cases import resolve, texts


@pytest.mark.parametrize(
    ("raw", "device", "batchnorm", "fast", "precision"),
    [
        ({}, "cuda", True, True, "fp32"),
        ({"bf16": {"enabled": True}}, "cuda", False, True, "bf16"),
        ({"bf16": {"enabled": True}}, "cuda", True, True, "bf16 autocast"),
        ({"bf16": {"enabled": True}}, "cpu", False, True, "bf16"),
        ({"bf16": {"enabled": True}}, "cpu", True, True, "bf16 autocast"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "cuda", False, True, "fp16"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}, "cuda", True, True, "fp16 autocast"),
        ({"fp16": {"enabled": True}}, "cuda", False, True, "fp16 autocast"),
        ({"fp16": {"enabled": True}}, "cuda", True, True, "fp16 autocast"),
        ({"fp16": {"enabled": True}}, "cpu", False, True, "fp16 autocast"),
        ({"bf16": {"enabled": "auto"}}, "cpu", False, True, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "cpu", True, True, "bf16 autocast"),
        ({"bf16": {"enabled": "auto"}}, "cpu", True, False, "fp32"),
        ({"bf16": {"enabled": "auto"}}, "cuda", True, False, "fp32"),
        ({"fp16": {"enabled": "auto"}}, "cuda", False, True, "fp16 autocast"),
        ({"fp16": {"enabled": "auto"}}, "cpu", False, True, "fp32"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "cuda", False, True, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "cuda", False, False, "fp16 autocast"),
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
    asked = any(raw.get(key, {}).get("enabled") is True for key in ("bf16", "fp16"))
    translated = [note.text for note in result.notes if "is run as torch_autocast" in note.text]
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


def test_fp16_at_stage_0_is_autocast_as_deepspeed_does_not_scale_its_loss() -> None:
    raw: dict[str, Any] = {"train_batch_size": 8, "fp16": {"enabled": True, "hysteresis": 4}}
    why = "at ZeRO stage 0 DeepSpeed divides fp16 gradients by a loss scale that the loss was never multiplied by"
    result = resolve(raw)
    assert result.config["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    assert "fp16" not in result.config
    line = f"fp16 is run as torch_autocast float16 with weights in fp32: {why} (hysteresis dropped: "
    assert f"{line}autocast has its own loss scaler)" in texts(result, "plan")
    assert texts(result, "changed") == []
    automatic = resolve({"train_batch_size": 8, "fp16": {"enabled": "auto"}})
    assert any(text.endswith(f"; in this form as {why})") for text in texts(automatic, "plan"))


@pytest.mark.parametrize(("level", "step"), [(0, 1 / 256), (1, 1.0)])
def test_deepspeeds_own_fp16_divides_by_a_scale_that_stage_0_never_applied(
    level: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the translation: when stage 0 fails here, it can have DeepSpeed's own fp16 again."""
    world = start_world()
    # DeepSpeed refuses fp16 on a CPU, which for one matrix product is able to do it.
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", lambda: True)
    net = torch.nn.Linear(4, 1, bias=False)
    before = net.weight.detach().clone()
    engine, *_ = deepspeed.initialize(
        model=net.to("cpu"),
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        dist_init_required=False,
        config={
            "train_batch_size": world.size,
            "gradient_clipping": 0.0,
            "fp16": {"enabled": True, "loss_scale": 256},
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
        },
    )
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).float().sum())
    engine.step()
    moved = before - engine.module.weight.detach().float()
    assert moved.flatten().tolist() == pytest.approx([step] * 4, abs=2e-3)


def test_keys_of_a_translated_bf16_are_named() -> None:
    result = resolve(
        {"train_batch_size": 8, "bf16": {"enabled": True, "check_grad_overflow": False}}, has_batchnorm=True
    )
    assert texts(result, "changed") == [
        "bf16 is run as torch_autocast bfloat16 with weights in fp32: DeepSpeed casts BatchNorm's weights to bf16 but "
        "not its running statistics, which fails (check_grad_overflow dropped: autocast has no such key)"
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
    raw = {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 32, "loss_scale": "auto"}}
    assert texts(resolve({**raw, "zero_optimization": {"stage": 1}}), "fact")[0] == (
        "fp16: initial_scale_power 32 starts the loss scale at 2^32, so the first steps will be skipped, until it has "
        "fallen to about 2^16 (the default)"
    )
    assert texts(resolve(raw), "fact") == [
        "fp16: initial_scale_power 32 is not used, as autocast's loss scale starts at 2^16; where DeepSpeed's own fp16 "
        "takes it the first steps will be skipped"
    ]
    assert texts(resolve({**raw, "fp16": {"enabled": True, "initial_scale_power": "auto"}}), "fact") == []
