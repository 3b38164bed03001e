"""Running a network through DeepSpeed without training it, and what both ways share: precisions in and out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsimg.world import World

# isort: split
import deepspeed  # after dsimg.world, which tells it the device
from deepspeed.runtime import torch_autocast


def inference_forward(
    model: nn.Module, *, config: Mapping[str, Any] | None, world: World, dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Any]:
    """Return the network's forward in evaluation mode: normalised images (N, 3, H, W) -> outputs in fp32.

    With a resolved DeepSpeed JSON the network runs in its precision, sharded over the ranks at ZeRO-3; stages 1 and 2
    shard nothing that inference has. Without one, every rank holds the whole network in `dtype`.
    """
    model = model.to(world.device).eval()
    if config is None:
        model.to(dtype)
        return lambda images: to_float(model(images.to(dtype)))
    zero = dict(config.get("zero_optimization", {}))
    if int(zero.get("stage", 0)) in (1, 2):
        zero = {"stage": 0}
    zero.pop("offload_optimizer", None)
    settings = {**config, "zero_optimization": zero}
    forget_autocast()
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    engine.eval()
    dtype = input_dtype(engine)
    return lambda images: to_float(engine(images.to(dtype)))


def forget_autocast() -> None:
    """Reset DeepSpeed's autocast flags: they are module globals, and an earlier engine's would leak into the next."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def input_dtype(engine: Any) -> torch.dtype:
    """Return what DeepSpeed's engine wants its inputs in: autocast takes fp32, its own 16-bit modes their type."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def to_float(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float()
    if isinstance(output, tuple):
        parts = [to_float(part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    return output
