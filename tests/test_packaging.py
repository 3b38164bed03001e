"""What the built package asks of pip."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

MACHINES = {
    "a Linux server": ({"sys_platform": "linux", "platform_machine": "x86_64"}, "onnxruntime-gpu"),
    "ARM Linux": ({"sys_platform": "linux", "platform_machine": "aarch64"}, "onnxruntime"),
    "a Mac": ({"sys_platform": "darwin", "platform_machine": "arm64"}, "onnxruntime"),
}


def asked(extra: str, machine: dict[str, str]) -> set[str]:
    """Return the names of what an extra installs on a machine."""
    found = map(Requirement, importlib.metadata.requires("dsimg") or [])
    environment = {**machine, "extra": extra}
    return {one.name for one in found if one.marker is None or one.marker.evaluate(environment)}


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_brings_one_onnx_runtime(machine: str) -> None:
    """The two packages install the same module: the CPU's would hide the GPU's."""
    environment, runtime = MACHINES[machine]
    found = asked("all", environment)
    assert {name for name in found if name.startswith("onnxruntime")} == {runtime}
    assert {"torch", "deepspeed", "onnx", "safetensors"} <= found


def test_a_host_that_serves_gets_no_torch() -> None:
    environment, _ = MACHINES["a Linux server"]
    found = asked("serve", environment)
    assert {"onnxruntime", "onnx", "safetensors", "numpy", "pillow"} <= found
    assert not {"torch", "torchvision", "deepspeed"} & found
