"""dsimg.ds_keys: the tables against the installed DeepSpeed."""

from typing import Any, ClassVar

import pytest

from dsimg.ds_keys import BLOCKS, OPTIMIZERS, REMOVED, SCHEDULERS, ZERO_TESTED_OPTIMIZERS
from tests.dsimg.ds_cases import installed_deepspeed_config

# Names that DeepSpeed still reads, and that `ds_lint` turns into today's.
OLD_ZERO_KEYS = (
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "stage3_gather_fp16_weights_on_model_save",
)
OLD_TOP_KEYS = ("allgather_size", "bfloat16", "amp")


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
    return installed_deepspeed_config()


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
