"""dsimg.ds_config: what a user's DeepSpeed JSON becomes, and what is said about it."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dsimg.ds_config import (
    BLOCKS,
    OLD_TOP_KEYS,
    OLD_ZERO_KEYS,
    OPTIMIZERS,
    REMOVED,
    SCHEDULERS,
    ZERO_TESTED_OPTIMIZERS,
    DsConfig,
    StageDefaults,
    find_ds_config,
    lint_ds_config,
    read_ds_config,
    resolve_ds_config,
)
from dsimg.errors import ConfigError, DsimgError

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "cases" / "ds_configs"
ROWS: list[dict[str, Any]] = json.loads((CASES / "expect.json").read_text())["rows"] if CASES.is_dir() else []
SHIPPED = ("bf16", "demo", "fp16", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


def stage(**changes: Any) -> StageDefaults:
    values: dict[str, Any] = {
        "batch_size": 48,
        "lr": 0.05,
        "weight_decay": 1e-4,
        "momentum": 0.9,
        "optimizer": None,
        "total_steps": 5000,
        "warmup_steps": 100,
        "gradient_clipping": None,
    }
    return StageDefaults(**{**values, **changes})


def resolve(raw: dict[str, Any], *, defaults: StageDefaults | None = None, **changes: Any) -> DsConfig:
    """Resolve for one GPU that is fast in bf16 and a ResNet-50-sized network without BatchNorm."""
    values: dict[str, Any] = {
        "source": "user.json",
        "world_size": 1,
        "device": "cuda",
        "has_batchnorm": False,
        "bf16_fast": True,
        "parameter_count": 25_600_000,
        "defaults": defaults or stage(),
    }
    return resolve_ds_config(raw, **{**values, **changes})


def lint_error(raw: dict[str, Any], **changes: Any) -> str:
    values: dict[str, Any] = {"source": "user.json", "world_size": 1, "batch_size": 48}
    with pytest.raises(ConfigError) as caught:
        lint_ds_config(raw, **{**values, **changes})
    return str(caught.value)


def texts(result: DsConfig, kind: str) -> list[str]:
    return [note.text for note in result.notes if note.kind == kind]


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "user.json"
    path.write_text(text, encoding="utf-8")
    return read_ds_config(path)


def read_error(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path) + "/", "")


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
        # The stage has a batch size, so there is nothing the user must mend.
        "batch_missing.json",
        # hjson takes it; a comma that is missing may be a line that is missing.
        "missing_comma.json",
    }
    assert {row["file"] for row in ROWS if answer(row)[0] != row["front_end"]["verdict"][0]} == second


# ---------------------------------------------------------------- the tables against the installed DeepSpeed


class Recorder(dict[str, Any]):
    """A config that remembers which keys it was asked for."""

    asked: ClassVar[set[str]] = set()

    def keys(self) -> Any:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def fields(model: Any) -> set[str]:
    names = set(model.model_fields)
    return names | {field.alias for field in model.model_fields.values() if field.alias}


@pytest.fixture(scope="module")
def deepspeed_config() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.runtime.config as module
    return module


def test_block_tables_are_those_of_the_installed_deepspeed(deepspeed_config: Any) -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }
    for name, model in models.items():
        assert set(BLOCKS[name]) == fields(model), name
    assert set(BLOCKS["zero_optimization"]) | set(OLD_ZERO_KEYS) == fields(DeepSpeedZeroConfig)


def test_top_level_table_is_what_deepspeed_asks_for(deepspeed_config: Any) -> None:
    # The class, as DeepSpeed copies the config before it reads it.
    Recorder.asked = set()
    deepspeed_config.DeepSpeedConfig(Recorder(train_batch_size=8, zero_optimization=True))
    removed = {key for key in REMOVED if "." not in key}
    known = set(BLOCKS[""]) | removed | set(OLD_TOP_KEYS)
    assert Recorder.asked - known == set()
    # `pipeline` and the like are asked for only in some setups; what dsimg itself relies on is asked for always.
    assert {"bf16", "torch_autocast", "gradient_clipping", "managed_gradient_accumulation"} <= Recorder.asked
    assert set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= removed | {"amp"}
    zero = {f"zero_optimization.{key}" for key in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS}
    assert zero <= set(REMOVED)


def test_plain_blocks_are_what_deepspeed_asks_for(deepspeed_config: Any) -> None:
    from deepspeed.runtime.activation_checkpointing import config as activation
    from deepspeed.runtime.swap_tensor import aio_config

    assert set(BLOCKS["activation_checkpointing"]) == set(activation.ACT_CHKPT_DEFAULT)
    assert set(BLOCKS["aio"]) == set(aio_config.AIO_DEFAULT_DICT)
    profiler = deepspeed_config.DeepSpeedFlopsProfilerConfig({})
    assert set(BLOCKS["flops_profiler"]) == set(vars(profiler))


def test_optimizer_and_scheduler_tables_are_those_of_the_installed_packages(deepspeed_config: Any) -> None:
    import inspect

    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.zero import utils

    names = {name.lower() for name in OPTIMIZERS}
    assert set(deepspeed_config.DEEPSPEED_OPTIMIZERS) - names == {"muadam", "muadamw", "musgd"}
    for name in ("SGD", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop", "Adafactor"):
        wanted = set(inspect.signature(getattr(torch.optim, name)).parameters) - {"params"}
        assert set(OPTIMIZERS[name].split()) == wanted, name
    for name, params in SCHEDULERS.items():
        home = lr_schedules if hasattr(lr_schedules, name) else torch.optim.lr_scheduler
        wanted = set(inspect.signature(getattr(home, name)).parameters)
        wanted -= {"optimizer", "last_epoch", "last_batch_iteration", "scale_fn"}
        assert set(params.split()) == wanted, name
    tested = {kind.__name__ for kind in utils.ZERO_SUPPORTED_OPTIMIZERS}
    assert {"Adam", "AdamW", "Adagrad", "FusedLion"} <= tested
    assert {"SGD", "RMSprop", "FusedLamb"}.isdisjoint(tested | set(ZERO_TESTED_OPTIMIZERS))


def test_deepspeed_itself_accepts_the_resolved_config(deepspeed_config: Any) -> None:
    raw = {
        "train_batch_size": "auto",
        "amp": {"enabled": True},
        "zero_optimization": {"stage": "2", "cpu_offload": True, "reduce_bucket_size": 5e8},
        "optimizer": "sgd",
    }
    result = resolve(raw, has_batchnorm=True)
    taken = deepspeed_config.DeepSpeedConfig(result.config)
    assert (taken.train_batch_size, taken.gradient_clipping, taken.optimizer_name) == (48, 1.0, "SGD")
    assert taken.torch_autocast_enabled
    assert not taken.bfloat16_config.enabled
    assert taken.zero_config.offload_optimizer.device == "cpu"


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    code = "import sys, dsimg.ds_config; print([m for m in ('torch', 'deepspeed', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- finding


def test_a_bare_name_finds_the_shipped_file_and_a_path_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_ds_config("zero2").name == "zero2.json"
    assert find_ds_config("zero2.json") == find_ds_config("zero2")
    Path("zero2.json").write_text("{}")
    assert find_ds_config("zero2.json") == Path("zero2.json")
    assert find_ds_config("./zero2.json") == Path("zero2.json")


def test_a_missing_file_names_the_near_one_and_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero22 does not exist, did you mean 'zero2'\?; the ones .* bf16, demo"):
        find_ds_config("zero22")
    with pytest.raises(ConfigError, match=r"nowhere/zero3.json does not exist, did you mean 'zero3'"):
        find_ds_config("nowhere/zero3.json")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        find_ds_config(str(tmp_path))


# ---------------------------------------------------------------- reading


def test_comments_trailing_commas_and_a_bom_are_read(tmp_path: Path) -> None:
    text = '﻿{\n# a\n"a": 1, // b\n/* c\n */ "b": [1, 2.5e3, -1,], "c": {"d": "# // no comment",},\n}\n# end'
    assert read(tmp_path, text) == {"a": 1, "b": [1, 2500.0, -1], "c": {"d": "# // no comment"}}
    assert read(tmp_path, '{"a": true, "b": null, "c": false}') == {"a": True, "b": None, "c": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"a": 1,\n"a": 2\n}', "user.json, line 3: 'a' stands twice, on lines 2 and 3; keep one of them"),
        ('{\n"a": NaN}', "user.json, line 2: NaN is not a number JSON or DeepSpeed can use (NaN, Infinity)"),
        ('{"a": -Infinity}', "user.json, line 1: -Infinity is not a number"),
        ('{"a": 1e999}', "user.json, line 1: 1e999 is too large for a number"),
        ('{\n"a": False,\n}', "user.json, line 2: False is not JSON; write false"),
        ('{"a": None}', "user.json, line 1: None is not JSON; write null"),
        ('{\n"a": 1\n"b": 2}', 'user.json, line 2: a comma is missing at the end, before "b"'),
        ('{\n"a": {\n"b": 1,\n', "user.json, line 4: unexpected end of the file; { of line 2 is never closed by }"),
        ('{"a":', "user.json, line 1: unexpected end of the file"),
        ("", "user.json, line 1: unexpected end of the file"),
        ('{"a": [1, 2', "user.json, line 1: unexpected end of the file; [ of line 1 is never closed by ]"),
        ('{"a" 1}', "user.json, line 1: a colon is missing after 'a'"),
        ("{a: 1}", "user.json, line 1: 'a' is not a key; keys stand in double quotes"),
        ('{"a": AdamW}', "user.json, line 1: AdamW is neither a number, true, false, null nor text"),
        ('{"a": 1.}', "user.json, line 1: 1. is neither a number"),
        ('{"a": "x}', "user.json, line 1: bad text in quotes"),
        ('{"a": 1} {', "user.json, line 1: '{' after the end of the config"),
        ('{ /* "a": 1}', "user.json, line 1: a comment opened with /* is never closed"),
        ('[{"a": 1}]', "user.json holds a list; a DeepSpeed config is one block: { ... }"),
    ],
)
def test_what_is_not_json_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert read_error(tmp_path, text).startswith(message)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "user.json"
    path.write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"user.json is not UTF-8 text .* save it as UTF-8"):
        read_ds_config(path)


# ---------------------------------------------------------------- keys and types


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
            'zero_optimization.offload_param: device is nvme and nvme_path is missing; add "nvme_path"',
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
        ({"fp16": True}, "fp16", {"enabled": True}, 'fp16: true is read as {"enabled": true}'),
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
            {"zero_optimization": {"stage": 3, "aio": {"queue_depth": 32}}},
            "aio",
            {"queue_depth": 32},
            "zero_optimization.aio belongs at the top level",
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


# ---------------------------------------------------------------- batch algebra

AUTO = "auto"


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (None, None, None, 2, (48, 24, 1)),
        (AUTO, AUTO, AUTO, 3, (48, 16, 1)),
        (None, None, 4, 2, (48, 6, 4)),
        (None, 32, None, 2, (64, 32, 1)),
        (None, 32, 8, 1, (256, 32, 8)),
        (AUTO, 8, AUTO, 2, (48, 8, 3)),
        (AUTO, 8, 2, 2, (32, 8, 2)),
        (64, None, None, 4, (64, 16, 1)),
        (64, 8, None, 2, (64, 8, 4)),
        (64, AUTO, 2, 4, (64, 8, 2)),
        (8, 2, 1, 4, (8, 2, 1)),
    ],
)
def test_batch_algebra(train: Any, micro: Any, steps: Any, world: int, expected: tuple[int, int, int]) -> None:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    raw = {key: value for key, value in given.items() if value is not None}
    sizes = lint_ds_config(raw, source="user.json", world_size=world, batch_size=48)
    assert (sizes.batch_size, sizes.micro_batch_size, sizes.accumulation_steps) == expected
    result = resolve(raw, world_size=world)
    assert (result.batch_size, result.micro_batch_size, result.accumulation_steps) == expected
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    assert f"batch: {expected[0]} = {expected[1]} images x {expected[2]} accumulated x {ranks}" in texts(result, "plan")


def test_batch_mismatch_says_the_numbers_and_the_ways_out() -> None:
    raw = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert lint_error(raw) == (
        "user.json: train_batch_size 8 is not 2 (train_micro_batch_size_per_gpu) x 1 (gradient_accumulation_steps) x "
        "1 (GPUs found); 4 GPUs would fit, start with so many, or set train_batch_size to 2, or set "
        "gradient_accumulation_steps to 4"
    )


@pytest.mark.parametrize(
    ("raw", "world", "message"),
    [
        (
            {},
            5,
            "the stage's batch size 48 cannot be split into 1 (gradient_accumulation_steps) x 5 GPUs; "
            "45 or 50 would fit as the batch size",
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 24},
            1,
            "train_batch_size 64 cannot be split into 24 (train_micro_batch_size_per_gpu) x 1 GPU; "
            "48 or 72 would fit as the batch size",
        ),
        ({"train_batch_size": 2}, 3, "x 3 GPUs; 3 would fit as the batch size"),
    ],
)
def test_a_batch_that_does_not_divide_names_those_that_do(raw: dict[str, Any], world: int, message: str) -> None:
    assert message in lint_error(raw, world_size=world)


# ---------------------------------------------------------------- the command line and the file


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


# ---------------------------------------------------------------- "auto"


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


# ---------------------------------------------------------------- precision


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
    assert (result.offload_optimizer, result.offload_param) == (True, False)
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
    autocast = batchnorm or (name == "fp16" and device == "cpu")
    assert result.precision == (f"{expected} autocast" if autocast else expected)
    assert texts(result, "warning") == []
    assert result.offload_optimizer == name.endswith("offload")
