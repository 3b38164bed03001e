"""The files that serving shares must not load torch."""

import subprocess
import sys

import pytest

FREE = [
    "errors",
    "console",
    "run",
    "cli",
    "preprocess",
    "metrics",
    "ds_config",
    "ds_json",
    "folder",
    "digits",
    "evaluation",
    "evaluate",
    "pictures",
    "predict",
    "prediction_table",
    "show",
    "machine",
    "runtime",
    "schedule",
    "memory",
    "stop",
    "doctor",
    "recipe",
    "__main__",
]


@pytest.mark.parametrize("module", FREE)
def test_a_torch_free_file_loads_no_torch(module: str) -> None:
    heavy = "{'torch', 'torchvision', 'deepspeed'}"
    code = f"import sys, dsimg.{module}; found = {heavy} & sys.modules.keys(); assert not found, found"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
