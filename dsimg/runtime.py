"""Which runtime a run needs, torch or ONNX Runtime, and whether it is here; neither is loaded."""

import importlib.util
from typing import Literal

from dsimg.errors import ConfigError
from dsimg.run import Run

Provider = Literal["cpu", "cuda", "tensorrt"]  # where ONNX Runtime runs a file
SERVE = "pip install 'dsimg[serve-gpu]', or 'dsimg[serve]' on a machine without a GPU."


def require_onnxruntime(what: str) -> None:
    """Raise ConfigError where ONNX Runtime is not installed; `what` needs it."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(f"{what} needs onnxruntime: {SERVE}")


def is_exported(run: Run, *, threads: int | None, provider: Provider) -> bool:
    """Tell whether a run has an ONNX file, which ONNX Runtime is to run so; else torch runs its network.

    Raises ConfigError: the runtime that it needs is not installed, or `threads` and `provider` say something to torch.
    """
    if run.has("model"):
        require_onnxruntime(f"{run.path} has an ONNX file, which")
        return True
    if threads is not None or provider != "cpu":
        raise ConfigError(
            f"--threads and --provider are ONNX Runtime's, and {run.path} has no ONNX file. Leave them out, or "
            "export the run first: dsimg export."
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{run.path} is a network of torch's: pip install 'dsimg[train]', or export it first.")
    return False
