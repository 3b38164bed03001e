"""Gradient checkpointing: blocks recompute their activations in the backward pass, to save memory."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsimg.errors import ModelError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # what a stage of blocks is made of


def enable_gradient_checkpointing(model: nn.Module) -> int:
    """Make the blocks of `model` recompute their activations in the backward pass; return how many they are.

    Blocks are the members of its stages (Sequential, ModuleList, ModuleDict) that hold at least two layers
    with weights, or, where there are no stages (GoogLeNet, Inception), such members of the network itself.
    Gradients, random numbers and the names in the state dict stay the same. Buffers change once a step: the
    recomputation works on copies, so that BatchNorm does not count its batch twice (pytorch #96136). timm's
    own switch does count twice, and is not used.

    Raises ModelError when there is no such block.
    """
    blocks = _stage_blocks(model) or [
        child for child in model.children() if not isinstance(child, CONTAINERS) and _is_composite(child)
    ]
    if not blocks:
        raise ModelError(
            f"--gradient_checkpointing: {type(model).__name__} has no stages of blocks to recompute. Leave "
            "the flag out, or use a smaller batch with accumulation."
        )
    for block in blocks:
        assert "forward" not in vars(block), "already checkpointed"
        # On the instance, so that module names, hooks and copies of the model stay as they are.
        block.forward = functools.partial(_recomputed_forward, block, block.forward)
    return len(blocks)


def _stage_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks of all stages below `module`, in order."""
    blocks: list[nn.Module] = []
    for child in module.children():
        is_block = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and _is_composite(child)
        if is_block and not _holds_stage(child):
            blocks.append(child)
        else:
            blocks += _stage_blocks(child)
    return blocks


def _is_composite(module: nn.Module) -> bool:
    """Tell whether recomputing `module` saves anything: it holds two or more layers with weights."""
    layers = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    return sum(isinstance(part, layers) for part in module.modules()) >= 2


def _holds_stage(module: nn.Module) -> bool:
    """Tell whether `module` is itself a stage: it has a list with two composite members of one type."""
    for part in module.modules():
        if isinstance(part, CONTAINERS):
            types = [type(child) for child in part.children() if _is_composite(child)]
            if len(types) > len(set(types)) and not any(issubclass(kind, CONTAINERS) for kind in types):
                return True
    return False


def _recomputed_forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    # DenseNet hands every layer one list, to which it then appends: the recomputation needs it as it was.
    args = tuple(list(value) if isinstance(value, list) else value for value in args)
    contexts = functools.partial(_forward_and_recomputation, block)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _forward_and_recomputation(
    block: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _copied_buffers(block)


@contextlib.contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    """Let `block` work on copies of its buffers. In train mode BatchNorm's result does not depend on them."""
    kept = [
        (module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
