"""Networks: build one by name, and what training must know of it: preprocess, outputs, sizes, parameter groups.

`--model` is a torchvision classifier, `cifar_resnet20|32|44|56|110`, `timm:NAME`, or
`package.module:function`, a function that takes `num_classes` and returns a module from images (N, 3, H, W)
to logits (N, num_classes).
"""

import copy
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from dsimg.cifar_resnet import DEPTHS, CifarResNet
from dsimg.errors import ModelError, near
from dsimg.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from dsimg.shards import saved_model

CIFAR_RESNETS = {f"cifar_resnet{depth}": depth for depth in DEPTHS}
# Weights of the auxiliary losses: arXiv 1409.4842, section 5, and torchvision's references.
GOOGLENET_AUX_WEIGHT = 0.3
INCEPTION_AUX_WEIGHT = 0.4
# With ImageNet weights torchvision sets `transform_input` on these two, which maps the usual normalisation to
# this one inside the network. Here the preprocess says it instead, so that it is kept with the model.
HALF_NORMALISED = ("googlenet", "inception_v3")
AUX_HEADS = {"GoogLeNet": ("aux1.fc2", "aux2.fc2"), "Inception3": ("AuxLogits.fc",)}

# Arrays that are not matrices of a linear map, though they have two or more dimensions.
NO_DECAY = frozenset(
    (
        *("class_token", "pos_embedding", "cls_token", "pos_embed", "dist_token", "reg_token"),
        *("relative_position_bias_table", "positional_encoding", "layer_scale", "logit_scale"),
    )
)


# --- Building -----------------------------------------------------------------------------------------------


def build_model(arch: str, *, num_classes: int, input_size: int | None = None) -> nn.Module:
    """Return the network `arch` with fresh weights and `num_classes` logits, in train mode.

    `input_size` is the side of its images in pixels; only networks that fix it at construction (ViT, MaxViT,
    Swin of timm) use it. GoogLeNet and Inception have their auxiliary heads (see `split_outputs`).

    Raises ModelError: unknown name, timm missing, a user's function that fails, a size that does not fit.
    """
    if arch.startswith("timm:"):
        return build_timm(arch, input_size=input_size, num_classes=num_classes)
    if ":" in arch:
        return _build_user(arch, num_classes=num_classes)
    if arch in CIFAR_RESNETS:
        return CifarResNet(CIFAR_RESNETS[arch], num_classes=num_classes)
    names = _torchvision_names()
    if arch not in names:
        raise ModelError(
            f"there is no model '{arch}'{near(arch, [*names, *CIFAR_RESNETS])} --model takes a "
            "torchvision classifier such as resnet50, cifar_resnet20|32|44|56|110, timm:NAME or "
            "package.module:function."
        )
    options: dict[str, Any] = {}
    if arch in HALF_NORMALISED:
        options = {"init_weights": True, "aux_logits": True}  # unset, init_weights gives a FutureWarning
    elif input_size and arch.startswith("vit_"):
        options = {"image_size": input_size}
    elif input_size and arch.startswith("maxvit"):
        options = {"input_size": (input_size, input_size)}
    try:
        model: nn.Module = torchvision.models.get_model(arch, weights=None, num_classes=num_classes, **options)
    except (ValueError, AssertionError) as error:
        if input_size is None:
            raise
        raise ModelError(_size_message(arch, input_size, error)) from error
    return model


def default_preprocess(arch: str, *, image_size: int | None, weights: str | None = None) -> Preprocess:
    """Return how `arch` wants its images when the user says nothing but, perhaps, `image_size` and `weights`.

    From `weights` where they say it (a torchvision name, a run folder, a checkpoint), else from the network: timm's
    `pretrained_cfg`, 32 px for a cifar_resnet, 299 px for inception_v3, 224 px and crop_pct 0.875 otherwise.
    `image_size` replaces the size only; up to 64 px the whole image is used (crop_pct 1), as small images
    have no margin to spare.
    """
    if weights is not None and Path(weights).is_dir():
        preprocess = Preprocess.from_dict(saved_model(Path(weights))["preprocess"])
    elif arch in CIFAR_RESNETS:
        preprocess = _preprocess(32, crop_pct=1.0)
    elif arch.startswith("timm:"):
        cfg = _timm_cfg(arch)
        preprocess = Preprocess(
            input_size=tuple(cfg.input_size),
            mean=tuple(cfg.mean),
            std=tuple(cfg.std),
            interpolation=cfg.interpolation,
            crop_pct=cfg.crop_pct,
        )
    elif arch in _torchvision_names() and weights is not None and not looks_like_file(weights):
        transforms = published_weights(arch, weights).transforms()
        preprocess = Preprocess(
            input_size=(3, transforms.crop_size[0], transforms.crop_size[0]),
            mean=tuple(transforms.mean),
            std=tuple(transforms.std),
            interpolation=transforms.interpolation.value,
            crop_pct=transforms.crop_size[0] / transforms.resize_size[0],
        )
    else:
        preprocess = _preprocess(299 if arch == "inception_v3" else 224, crop_pct=0.875)
    if arch in HALF_NORMALISED:
        preprocess = replace(preprocess, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    if image_size is not None:
        crop_pct = 1.0 if image_size <= 64 else preprocess.crop_pct
        preprocess = replace(preprocess, input_size=(3, image_size, image_size), crop_pct=crop_pct)
    return preprocess


def _preprocess(size: int, *, crop_pct: float) -> Preprocess:
    return Preprocess(input_size=(3, size, size), mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_pct=crop_pct)


def _torchvision_names() -> list[str]:
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _timm() -> Any:
    try:
        import timm  # an optional extra, three seconds to import
    except ModuleNotFoundError as error:
        raise ModelError("a timm: model needs timm: pip install 'dsimg[timm]'") from error
    return timm


def _timm_cfg(arch: str) -> Any:
    """Return the pretrained_cfg of timm:NAME[.TAG]. Raises ModelError for an unknown name or tag."""
    timm, name = _timm(), arch.removeprefix("timm:")
    if not timm.is_model(name):
        raise ModelError(
            f"timm has no model '{name}'{near(name, timm.list_models())} timm.list_models() lists its names."
        )
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = timm.list_pretrained(name.split(".")[0])
        raise ModelError(f"timm has no weights '{name}'{near(name, tags)} It has: {', '.join(tags)}.") from error


def build_timm(arch: str, *, input_size: int | None, **options: Any) -> nn.Module:
    """Return the network timm:NAME[.TAG]; `options` are those of timm.create_model. Raises ModelError."""
    cfg = _timm_cfg(arch)
    if input_size and cfg.fixed_input_size:
        options["img_size"] = input_size
    try:
        model: nn.Module = _timm().create_model(arch.removeprefix("timm:"), **options)
    except (ValueError, AssertionError) as error:
        if input_size is None:
            raise
        raise ModelError(_size_message(arch, input_size, error)) from error
    return model


def _build_user(arch: str, *, num_classes: int) -> nn.Module:
    """Call package.module:function. The current folder counts as importable, as it does for `python -m`."""
    module_name, _, function_name = arch.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ModelError(
            f"--model {arch}: importing '{module_name}' failed: {type(error).__name__}: {error}. Give a "
            f"module that `python -c 'import {module_name}'` can import, from this folder or installed."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(
            f"--model {arch}: '{module_name}' has no function '{function_name}'"
            f"{near(function_name, vars(module))} Write package.module:function."
        )
    try:
        model = function(num_classes=num_classes)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"--model {arch}: {function_name}(num_classes={num_classes}) failed: {type(error).__name__}: "
            f"{error}. It must take num_classes and return a torch.nn.Module."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"--model {arch}: {function_name} returned {type(model).__name__}, not a torch.nn.Module. Return "
            "the network."
        )
    return model


def looks_like_file(weights: str) -> bool:
    """Tell whether `--weights` means a path, there or not, and not a name of torchvision's."""
    return "/" in weights or Path(weights).suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")


def published_weights(arch: str, weights: str) -> Any:
    """Return the member of torchvision's weights enum for `arch`. Raises ModelError that lists the choices."""
    if arch not in _torchvision_names():
        raise ModelError(
            f"{arch} has no published weights called '{weights}'. Give --weights a .safetensors or .pth "
            "file, or a run folder, or leave it out to train from scratch."
        )
    members = torchvision.models.get_model_weights(arch)
    owner, _, name = weights.rpartition(".")
    if owner not in ("", members.__name__) or name not in members.__members__:
        choices = list(members.__members__)
        raise ModelError(
            f"{arch} has no weights '{weights}'{near(name, choices)} torchvision has for it: {', '.join(choices)}."
        )
    return members[name]


def arch_of_weights(weights: str) -> tuple[str, Any]:
    """Return the architecture that weights such as ResNet50_Weights.IMAGENET1K_V2 are for, and the enum's member.

    Raises ModelError.
    """
    owner = weights.partition(".")[0]
    for name in torchvision.models.list_models(module=torchvision.models):
        if torchvision.models.get_model_weights(name).__name__ == owner:
            return str(name), published_weights(str(name), weights)
    raise ModelError(f"torchvision has no weights '{owner}'. They are called like ResNet50_Weights.IMAGENET1K_V2.")


# --- Outputs and heads --------------------------------------------------------------------------------------


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that produce logits: the classifier, then auxiliary ones.

    timm says which (`get_classifier`); elsewhere it is the last linear or convolution in order of definition.
    """
    names = {module: name for name, module in model.named_modules()}
    get_classifier: Any = getattr(model, "get_classifier", None)
    if get_classifier is not None:
        classifier = get_classifier()
        heads = classifier if isinstance(classifier, tuple) else (classifier,)
        return tuple(names[head] for head in heads if head in names)
    layers = [name for module, name in names.items() if isinstance(module, nn.Linear | nn.Conv2d)]
    aux = AUX_HEADS.get(type(model).__name__, ())
    return (*layers[-1:], *(name for name in aux if name in layers))


def split_outputs(output: object) -> tuple[Tensor, tuple[tuple[Tensor, float], ...]]:
    """Split what a network returned into logits (N, C) and auxiliary (logits (N, C), loss weight) pairs.

    GoogLeNet and Inception return auxiliary logits in train mode only. Raises ModelError for anything that is
    not a tensor or one of those two.
    """
    if isinstance(output, Tensor):
        return output, ()
    if isinstance(output, GoogLeNetOutputs):
        aux = [(output.aux_logits1, GOOGLENET_AUX_WEIGHT), (output.aux_logits2, GOOGLENET_AUX_WEIGHT)]
    elif isinstance(output, InceptionOutputs):
        aux = [(output.aux_logits, INCEPTION_AUX_WEIGHT)]
    else:
        raise ModelError(
            f"the network returned {type(output).__name__} instead of a tensor of logits (N, classes). Make "
            "its forward return the logits alone."
        )
    return output.logits, tuple((logits, weight) for logits, weight in aux if logits is not None)


def primary_logits(output: object) -> Tensor:
    """Return the logits (N, C) of a network's output, without auxiliary ones. Raises as `split_outputs`."""
    return split_outputs(output)[0]


# --- Sizes --------------------------------------------------------------------------------------------------


def check_input_size(model: nn.Module, size: int, arch: str, *, num_classes: int | None = None) -> None:
    """Raise ModelError unless `model` turns images (2, 3, size, size) into logits (2, num_classes).

    Both in eval and in train mode, where auxiliary heads may need more pixels. The forward runs on the meta
    device, where it costs nothing, and on the model's own only when that fails, because some networks read
    values. Neither weights, buffers nor the random state change.
    """
    try:
        shape = _probe(model, size, device="meta")
    except ModelError:
        raise
    except Exception:  # the network's own code: any type
        try:
            shape = _probe(model, size, device=None)
        except ModelError:
            raise
        except Exception as error:
            larger = (candidate for candidate in (32, 64, 96, 128, 160, 192, 224, 256, 299) if candidate > size)
            works = next((candidate for candidate in larger if _passes(model, candidate)), None)
            raise ModelError(_size_message(arch, size, error, works=works)) from error
    if len(shape) != 2 or (num_classes is not None and shape[1] != num_classes):
        raise ModelError(
            f"{arch} returns {tuple(shape)} for two images instead of (2, {num_classes or 'classes'}). Its "
            "last layer must give one logit a class."
        )


def _size_message(arch: str, size: int, error: Exception, *, works: int | None = None) -> str:
    advice = f"--image_size {works}" if works else "another --image_size"
    return (
        f"{arch} cannot take {size}x{size} images ({first_line(error)}). Use {advice}, or a network for "
        "small images such as cifar_resnet20."
    )


def _probe(model: nn.Module, size: int, *, device: str | None) -> torch.Size:
    """Return the shape of the logits for two images; runs in train mode too, for auxiliary heads."""
    shape = torch.Size()
    for training in (True, False):
        shape = primary_logits(dry_forward(model, (2, 3, size, size), device=device, training=training)).shape
    return shape


def _passes(model: nn.Module, size: int) -> bool:
    try:
        _probe(model, size, device="meta")
    except Exception:
        return False
    return True


def dry_forward(model: nn.Module, shape: Sequence[int], *, device: str | None, training: bool) -> object:
    """Run the model on images of this shape without changing it; on its own device when `device` is None."""
    first = next(iter(model.parameters()), torch.empty(0))
    place = torch.device(device or first.device)
    # A copy, because BatchNorm in train mode writes to its buffers. Its tensors are given, so that the large ones are
    # not copied to be thrown away, and tensors and modules with several names keep them.
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        moved = tensor.detach().to(place) if device else tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    twin = copy.deepcopy(model, memo).train(training)
    random_devices = [place] if place.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=random_devices):
        return twin(torch.zeros(shape, device=place))


def check_trainable(model: nn.Module, arch: str) -> None:
    """Raise ModelError for what DeepSpeed or a run folder cannot hold: nothing to train, 0-dim weights, extra state."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ModelError(f"{arch} has no parameter to train. Leave requires_grad on for at least its last layer.")
    scalars = [name for name, parameter in trained.items() if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            f"{arch}: {scalars[0]} has no dimension, which DeepSpeed cannot share out. Give it shape (1,)."
        )
    extra = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        raise ModelError(
            f"{arch}: {extra[0]} is state that is not a tensor, which a run cannot hold. Make it a buffer."
        )


def has_batchnorm(model: nn.Module) -> bool:
    """Tell whether any layer normalises over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def count_parameters(model: nn.Module) -> int:
    """Return the number of scalar parameters, frozen ones too, buffers not."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: int | Sequence[int]) -> int:
    """Return the multiply-adds of one image in eval mode; `input_size` is its side or (3, H, W).

    Counted in convolutions, linear layers and matrix products (attention's too), by torch's own flop counter
    on the meta device: half its flops, which agrees with what torchvision publishes.
    """
    shape = (3, input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    try:
        return _count_flops(model, shape, device="meta") // 2
    except Exception:  # a network that reads values
        return _count_flops(model, shape, device=None) // 2


def _count_flops(model: nn.Module, shape: Sequence[int], *, device: str | None) -> int:
    with FlopCounterMode(display=False) as counter:
        dry_forward(model, (1, *shape), device=device, training=False)
    return int(counter.get_total_flops())


# --- Training -----------------------------------------------------------------------------------------------


def no_decay_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that weight decay must leave alone.

    As timm does: everything with at most one dimension (biases, the scales of norms, layer scale) and what
    the network itself names in `no_weight_decay()`. As torchvision's ViT and Swin recipes do: class tokens,
    position embeddings and tables. Depthwise and other convolutions, linear and attention matrices decay.
    """
    no_weight_decay: Any = getattr(model, "no_weight_decay", None)
    named_by_network = set(no_weight_decay()) if no_weight_decay is not None else set()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1
        or name.endswith("bias")
        or name in named_by_network
        or name.rpartition(".")[2] in NO_DECAY
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as an optimizer's groups: decayed ones, then the rest; none empty."""
    spared = no_decay_names(model)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable if name not in spared], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without its full stop, or its type where it has no text."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
