"""dsimg.ds_lint: what is wrong in a DeepSpeed JSON, and old forms in today's."""

import json
from typing import Any

import pytest

from dsimg.errors import ConfigError
from tests.dsimg.ds_cases import lint_error, resolve, stage, texts


def test_all_wrong_keys_of_a_file_are_in_one_message() -> None:
    raw = {
        "gradient_clipp1ng": 1.0,
        "zero_optimization": {"stage": 1, "overlap_com": True},
        "optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3, "weigth_decay": 0.05}},
    }
    assert lint_error(raw).splitlines() == [
        "user.json: 4 problems",
        "  - gradient_clipp1ng: unknown key, did you mean 'gradient_clipping'?",
        "  - zero_optimization.overlap_com: unknown key, did you mean 'overlap_comm'?",
        "  - optimizer.params.learning_rate: unknown key, did you mean 'lr'?",
        "  - optimizer.params.weigth_decay: unknown key, did you mean 'weight_decay'?",
    ]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: it must be 0, 1, 2 or 3"),
        ({"overlap_comm": True}, "overlap_comm: unknown key; it belongs in zero_optimization"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "unknown key; it belongs at the top level"),
        ({"train_batch_size": True}, "train_batch_size is true: it must be a whole number, at least 1"),
        ({"train_batch_size": 0}, "train_batch_size is 0: it must be a whole number, at least 1"),
        ({"train_batch_size": 8.5}, "train_batch_size is 8.5: it must be a whole number, at least 1"),
        ({"train_batch_size": "many"}, 'train_batch_size is "many": it must be a whole number'),
        ({"fp16": {"enabled": 1}}, "fp16.enabled is 1: it must be true or false"),
        ({"fp16": "yes"}, 'fp16 is "yes": it must be a block, { ... }, of enabled'),
        ({"zero_optimization": "auto"}, 'zero_optimization is "auto": it must be a block'),
        ({"communication_data_type": "fp64"}, 'is "fp64": it must be fp16, bf16 or fp32'),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}},
            "optimizer.params.betas is 0.9: it must be a list",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type, so DeepSpeed would ignore it"),
        ({"optimizer": {"type": "AdmaW"}}, 'optimizer.type "AdmaW" is unknown, did you mean \'Ada'),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "ZeroOneAdam was removed from DeepSpeed 0.19; alternatives: AdamW"),
        ({"optimizer": {"type": "LBFGS"}}, "LBFGS does not work with DeepSpeed: it needs a closure"),
        ({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1}}}, "did you mean 'gradient_clipping (at the top"),
        ({"scheduler": {"type": "cosine"}}, "scheduler.type \"cosine\" is unknown, did you mean 'WarmupCosineLR'?"),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "it needs a metric"),
        ({"scheduler": {"type": "StepLR"}}, "scheduler StepLR needs step_size in its params"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are enabled together; choose one"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e-10}}, "min_loss_scale is 1e-10: it must be a whole number"),
        ({"elasticity": {"enabled": True}}, "elasticity: removed from DeepSpeed 0.19; delete the block and set"),
        ({"session_params": {"fp16": {}}}, "move what it holds to the top level (fp16)"),
        ({"tensor_parallel": {"autotp_size": 2}}, "dsimg trains data-parallel only"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "mics_shard_size: removed from DeepSpeed 0.19"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param: device is nvme (and nvme_path is missing), and dsimg's checkpoints "
            'cannot read states that are swapped to NVMe; write "device": "cpu"',
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "NVMe", "nvme_path": "/disk"}}},
            "zero_optimization.offload_optimizer: device is nvme, and dsimg's checkpoints cannot read states",
        ),
        (
            {"zero_optimization": {"stage": 3, "aio": {"queue_depth": 32}}},
            "zero_optimization.aio: its place is the top level, but it is for NVMe, where dsimg cannot offload to",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(raw: dict[str, Any], message: str) -> None:
    assert message in lint_error(raw)


def test_removed_blocks_are_all_named_at_once() -> None:
    message = lint_error({"nebula": {}, "compression_training": {}, "eigenvalue": {}})
    assert [key in message for key in ("nebula", "compression_training", "eigenvalue")] == [True] * 3


@pytest.mark.parametrize(
    ("raw", "key", "value", "note"),
    [
        (
            {"fp16": True, "zero_optimization": {"stage": 1}},
            "fp16",
            {"enabled": True},
            'fp16: true is read as {"enabled": true}',
        ),
        ({"bfloat16": {"enabled": True}}, "bf16", {"enabled": True}, "bfloat16 is the old name of bf16"),
        ({"amp": {"enabled": True}}, "bf16", {"enabled": True}, "amp: Apex removed from DeepSpeed; bf16 is used"),
        (
            {"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}},
            "bf16",
            {"enabled": True},
            "dropped, as each belongs to fp16: loss_scale, hysteresis",
        ),
        ({"zero_optimization": False}, "zero_optimization", {"stage": 0}, 'false is read as {"stage": 0}'),
        (
            {"zero_optimization": {"stage": "2"}},
            "zero_optimization",
            {"stage": 2},
            'zero_optimization.stage: number in quotes, "2", read as 2',
        ),
        (
            {"optimizer": {"type": "FusedAdam", "params": {"lr": "1e-1"}}},
            "optimizer",
            {"type": "Adam", "params": {"lr": 0.1}},
            "optimizer.type FusedAdam is read as Adam",
        ),
        ({"wall_clock_breakdown": "False"}, "wall_clock_breakdown", False, "true or false in quotes"),
    ],
)
def test_old_forms_are_translated_with_a_note(raw: dict[str, Any], key: str, value: Any, note: str) -> None:
    result = resolve(raw)
    assert result.config[key] == value
    assert any(note in text for text in texts(result, "changed")), result.notes


def test_null_is_absent_and_whole_floats_are_whole() -> None:
    result = resolve({"fp16": None, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": None}})
    assert "fp16" not in result.config
    assert result.config["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 500_000_000}
    assert isinstance(result.config["zero_optimization"]["reduce_bucket_size"], int)


def test_the_raw_config_is_left_alone() -> None:
    raw = {"zero_optimization": {"stage": "2", "cpu_offload": True}, "optimizer": "AdamW"}
    before = json.dumps(raw)
    resolve(raw)
    assert json.dumps(raw) == before


def test_what_both_the_file_and_the_command_line_say_is_an_error() -> None:
    raw = {"optimizer": {"type": "AdamW"}, "gradient_clipping": 0.5}
    message = lint_error(raw, optimizer="sgd", gradient_clipping=1.0)
    assert 'optimizer is "AdamW" in this file and --optimizer sgd on the command line' in message
    assert "gradient_clipping is 0.5 in this file and --gradient_clipping 1.0 on the command line" in message
    with pytest.raises(ConfigError, match="--optimizer sgd on the command line"):
        resolve({"optimizer": {"type": "AdamW"}}, defaults=stage(optimizer="sgd"))
    with pytest.raises(ConfigError, match="make 64 images per step and the command line asks for 48"):
        resolve({"train_batch_size": 64}, defaults=stage(batch_size_given=True))
    assert resolve({"train_batch_size": 48}, defaults=stage(batch_size_given=True)).batch_size == 48
    assert resolve({"gradient_clipping": 0.5}, defaults=stage(gradient_clipping=0.5)).gradient_clipping == 0.5
