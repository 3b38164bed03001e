"""Helpers of the tests of a DeepSpeed JSON: resolve it for a usual case, look at what was said."""

import functools
import warnings
from typing import Any

import pytest

from dsimg.ds_config import DsConfig, StageDefaults, resolve_ds_config
from dsimg.ds_lint import lint_ds_config
from dsimg.errors import ConfigError


def stage(**changes: Any) -> StageDefaults:
    """Return a stage's values, `changes` among them."""
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
    """Resolve for one GPU that is fast in bf16, a ResNet-50-sized network without BatchNorm, and every package."""
    values: dict[str, Any] = {
        "source": "user.json",
        "world_size": 1,
        "device": "cuda",
        "has_batchnorm": False,
        "bf16_fast": True,
        "parameter_count": 25_600_000,
        "defaults": defaults or stage(),
        "installed": lambda module: True,
    }
    return resolve_ds_config(raw, **{**values, **changes})


def lint_error(raw: dict[str, Any], **changes: Any) -> str:
    """Return what the linter refuses `raw` with, on one GPU, unless `changes` say otherwise."""
    values: dict[str, Any] = {"source": "user.json", "world_size": 1, "batch_size": 48}
    with pytest.raises(ConfigError) as caught:
        lint_ds_config(raw, **{**values, **changes})
    return str(caught.value)


def texts(result: DsConfig, kind: str) -> list[str]:
    """Return the notes of one kind."""
    return [note.text for note in result.notes if note.kind == kind]


@functools.cache
def installed_deepspeed_config() -> Any:
    """Return the module deepspeed.runtime.config; importing it warns of much that is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.runtime.config as module
    return module
