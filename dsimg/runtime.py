"""Which runtime a run needs, torch or ONNX Runtime, and whether it is here; neither is loaded."""

import importlib.util
from typing import Literal

from dsimg.errors import ConfigError
from dsimg.run import Run

Provider = Literal["cpu", "cuda", "tensorrt"]  # where ONNX Runtime runs a file
Runtime = Literal["onnxruntime", "torch"]
SERVE = "pip install 'dsimg[serve-gpu]', or 'dsimg[serve]' on a machine without a GPU."


def require_onnxruntime(what: str) -> None:
    """Raise ConfigError where ONNX Runtime is not installed; `what` needs it."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(f"{what} needs onnxruntime: {SERVE}")


def require_torch(what: str) -> None:
    """Raise ConfigError where torch is not installed; `what` needs it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{what} needs torch: pip install 'dsimg[train]'.")


def choose_runtime(run: Run, *, threads: int | None, provider: Provider) -> Runtime:
    """Return what runs a run: ONNX Runtime, with these threads and provider, where it has an ONNX file, else torch.

    Raises ConfigError: the runtime is not installed, or `threads` and `provider` say something to torch.
    """
    if run.has("model"):
        require_onnxruntime(f"{run.path} has an ONNX file, which")
        return "onnxruntime"
    if threads is not None or provider != "cpu":
        raise ConfigError(
            f"--threads and --provider are ONNX Runtime's, and {run.path} has no ONNX file. Leave them out, or "
            "export the run first: dsimg export."
        )
    require_torch(f"the network of {run.path}, which is not exported,")
    return "torch"
