"""Networks: build one by name, load and save its weights, and what training must know about it.

`--model` is a torchvision classifier, `cifar_resnet20|32|44|56|110`, `timm:NAME`, or
`package.module:function`, a function that takes `num_classes` and returns a module from images (N, 3, H, W)
to logits (N, num_classes).
"""

import argparse
import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
import torchvision
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import GoogLeNetOutputs, InceptionOutputs, VisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from dsimg.cifar_resnet import DEPTHS, CifarResNet
from dsimg.errors import ModelError, near
from dsimg.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from dsimg.run import Run

# Weights of the auxiliary losses: arXiv 1409.4842, section 5, and torchvision's references.
GOOGLENET_AUX_WEIGHT = 0.3
INCEPTION_AUX_WEIGHT = 0.4
# With ImageNet weights torchvision sets `transform_input` on these two, which maps the usual normalisation to
# this one inside the network. Here the preprocess says it instead, so that it is kept with the model.
HALF_NORMALISED = ("googlenet", "inception_v3")
AUX_HEADS = {"GoogLeNet": ("aux1.fc2", "aux2.fc2"), "Inception3": ("AuxLogits.fc",)}

# Where checkpoints keep their state dict, best first: torchvision's references, timm, Lightning, DeepSpeed.
WRAPPERS = ("model_ema", "state_dict_ema", "state_dict", "model_state_dict", "model", "module")
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning
# Names that torchvision's published files still use: DenseNet's layers, the MLPs of its ViTs.
RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"(\.mlp)\.linear_1\."), r"\1.0."),
    (re.compile(r"(\.mlp)\.linear_2\."), r"\1.3."),
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # what a stage of blocks is made of
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
        return _build_timm(arch, input_size=input_size, num_classes=num_classes)
    if ":" in arch:
        return _build_user(arch, num_classes=num_classes)
    if arch in _cifar_resnets():
        return CifarResNet(_cifar_resnets()[arch], num_classes=num_classes)
    names = _torchvision_names()
    if arch not in names:
        raise ModelError(
            f"there is no model '{arch}'{near(arch, [*names, *_cifar_resnets()]) or '.'} --model takes a "
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

    From `weights` where they say it (a torchvision name, a run folder), else from the network: timm's
    `pretrained_cfg`, 32 px for a cifar_resnet, 299 px for inception_v3, 224 px and crop_pct 0.875 otherwise.
    `image_size` replaces the size only; up to 64 px the whole image is used (crop_pct 1), as small images
    have no margin to spare.
    """
    if weights is not None and Path(weights).is_dir():
        preprocess = Preprocess.from_dict(Run.open(Path(weights)).model["preprocess"])
    elif arch in _cifar_resnets():
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
    elif arch in _torchvision_names() and weights is not None and not _looks_like_file(weights):
        transforms = _torchvision_weights(arch, weights).transforms()
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


def _cifar_resnets() -> dict[str, int]:
    return {f"cifar_resnet{depth}": depth for depth in DEPTHS}


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
            f"timm has no model '{name}'{near(name, timm.list_models()) or '.'} timm.list_models() lists its names."
        )
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = timm.list_pretrained(name.split(".")[0])
        raise ModelError(f"timm has no weights '{name}'{near(name, tags) or '.'} It has: {', '.join(tags)}.") from error


def _build_timm(arch: str, *, input_size: int | None, **options: Any) -> nn.Module:
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
    except Exception as error:  # whatever the user's file raises
        raise ModelError(
            f"--model {arch}: importing '{module_name}' failed: {type(error).__name__}: {error}. Give a "
            f"module that `python -c 'import {module_name}'` can import, from this folder or installed."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(
            f"--model {arch}: '{module_name}' has no function '{function_name}'"
            f"{near(function_name, vars(module)) or '.'} Write package.module:function."
        )
    try:
        model = function(num_classes=num_classes)
    except Exception as error:
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


# --- Weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_weights` did; `str()` is one paragraph for the user."""

    source: str  # where the weights came from
    loaded: int  # tensors copied
    skipped: tuple[tuple[str, str], ...]  # (name in the source, reason)
    new: tuple[str, ...]  # tensors of the network that keep their fresh values
    head: str  # what became of the classifier, e.g. "new (1000 classes there, 7 here)"

    def __str__(self) -> str:
        text = f"{self.source}: {self.loaded} tensors loaded; head {self.head}"
        if self.skipped:
            text += f"; skipped {_some([f'{name} ({reason})' for name, reason in self.skipped])}"
        if self.new:
            text += f"; new {_some(self.new)}"
        return text + "."


def load_weights(model: nn.Module, weights: str, *, arch: str, classes: Sequence[str]) -> LoadReport:
    """Copy into `model` what fits of `weights`, in place, and say what was loaded, skipped and left new.

    `weights` is a name of torchvision's ("IMAGENET1K_V2", "DEFAULT", "ResNet50_Weights.IMAGENET1K_V2"),
    "DEFAULT" for a timm model, a .safetensors file, a .pth or .pt file (tensors only: no code in it is run),
    or a finished run folder of the same arch. `classes` are the new run's, in the order of its logits. The
    head is kept when the source has the same classes, its rows are put in order when it names them in another
    order, and it stays new otherwise. A file that names no classes but has as many keeps its head, and the
    report says so. Positions of torchvision's ViTs are resampled to the size of `model`.

    Raises ModelError: no such weights, another arch, nothing fits, a pickle that needs code, no network.
    """
    path = Path(weights)
    source_classes: Sequence[str] | None = None
    if path.is_dir():
        run = Run.open(path)
        if run.model["arch"] != arch:
            raise ModelError(
                f"--weights {weights} holds a {run.model['arch']}, but --model is {arch}. Give --model "
                f"{run.model['arch']}, or other weights."
            )
        state = read_weights(run.file("weights"))
        source_classes = run.model["classes"]
    elif path.is_file():
        state = read_weights(path) if path.suffix == ".safetensors" else _read_pickle(path)
    elif _looks_like_file(weights):
        raise ModelError(
            f"--weights {weights}: no such file or folder. Give a .safetensors or .pth file, a run folder, "
            "or a torchvision weights name such as DEFAULT."
        )
    elif arch.startswith("timm:"):
        state = _timm_state(model, weights, arch=arch)
    else:
        entry = _torchvision_weights(arch, weights)
        state = _download(entry)
        source_classes = entry.meta["categories"]
    return _copy_what_fits(model, state, source=weights, source_classes=source_classes, classes=classes)


def restore_weights(model: nn.Module, state: Mapping[str, Tensor], *, source: str) -> None:
    """Copy `state` into `model`, in place: exactly the same names and shapes.

    For a network read back from its own run. Unlike `load_state_dict` it needs no version metadata, which
    safetensors does not keep and torchvision's MNASNet asks for. Raises ModelError that lists what differs.
    """
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    problems += [
        f"{name} has shape {tuple(state[name].shape)} instead of {tuple(target.shape)}"
        for name, target in own.items()
        if name in state and state[name].shape != target.shape
    ]
    if problems:
        raise ModelError(
            f"{source} does not fit the network: {_some(problems)}. Give the weights that were saved from this one."
        )
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(state[name])


def save_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict as safetensors, atomically (temporary file, fsync, rename).

    Tensors may be on any device, of any layout, and share memory; each name is written whole. Raises
    ModelError when the disk refuses.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        # safetensors refuses tensors that overlap in memory, as parts of one storage may.
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ModelError(f"cannot write {path}: {error}. Free some space there or choose another --out.") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU. Raises ModelError when missing or damaged."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist. Give the path of a .safetensors file.") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}). Copy it again from its source.") from error


def _looks_like_file(weights: str) -> bool:
    return "/" in weights or Path(weights).suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")


def _torchvision_weights(arch: str, weights: str) -> Any:
    """Return the member of torchvision's weights enum. Raises ModelError that lists the choices."""
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
            f"{arch} has no weights '{weights}'{near(name, choices) or '.'} torchvision has for it: "
            f"{', '.join(choices)}."
        )
    return members[name]


def _download(entry: Any) -> dict[str, Tensor]:
    """Return the state dict of torchvision's weights, from torch hub's cache or the network."""
    try:
        state: dict[str, Tensor] = entry.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except OSError as error:  # URLError is one
        raise ModelError(
            f"cannot download {entry.url} ({error}). Fetch it on a machine with a network and give the file "
            f"to --weights, or put it into {torch.hub.get_dir()}/checkpoints."
        ) from error
    except (RuntimeError, UnpicklingError) as error:
        raise ModelError(
            f"the download of {entry.url} is damaged ({_first_line(error)}). Delete its file in "
            f"{torch.hub.get_dir()}/checkpoints and try again."
        ) from error
    return state


def _timm_state(model: nn.Module, weights: str, *, arch: str) -> dict[str, Tensor]:
    """Return the pretrained weights of timm:NAME[.TAG], resampled by timm to the size of `model`."""
    if weights != "DEFAULT":
        raise ModelError(
            f"--weights {weights}: no such file, and timm weights are chosen by the model's name "
            "(timm:resnet50.a1_in1k). Give --weights DEFAULT with it."
        )
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    try:
        pretrained = _build_timm(arch, input_size=size[0] if size else None, pretrained=True)
    except Exception as error:  # no network: the hub's client raises a dozen types
        raise ModelError(
            f"timm cannot get weights for {arch} ({_first_line(error)}). Check the network, or fetch the "
            "file elsewhere and give it to --weights."
        ) from error
    return pretrained.state_dict()


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a .pth file. Tensors and plain containers only: nothing in it is executed."""
    try:
        # Training programs store their parsed arguments beside the weights; a Namespace only holds values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        if needed is None:
            raise ModelError(f"{path} is not a whole PyTorch file. Copy it again from its source.") from error
        raise ModelError(
            f"{path} needs code to be run on loading ({needed[1]}), which is refused. Where you trust it, "
            "save its state dict alone: torch.save(torch.load(PATH, weights_only=False)['model'], NEW_PATH), "
            "with the key that holds it."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} is not a whole PyTorch file ({_first_line(error)}). Copy it again from its source."
        ) from error
    state = _find_state(content)
    if not state:
        here = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
        raise ModelError(
            f"{path} holds no state dict (found: {here or 'nothing'}). Save model.state_dict(), alone or "
            f"under one of: {', '.join(WRAPPERS)}."
        )
    return state


def _find_state(content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    for key in WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _find_state(content[key])
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _copy_what_fits(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    source: str,
    source_classes: Sequence[str] | None,
    classes: Sequence[str],
) -> LoadReport:
    own = model.state_dict()
    head_tensors = {name for name in own if name.rpartition(".")[0] in head_names(model)}
    skipped: list[tuple[str, str]] = []
    loaded: set[str] = set()
    head = "not in the source"
    for original, tensor in state.items():
        name = _name_in(own, original)
        if name not in own:
            skipped.append((original, "not in this network"))
            continue
        target = own[name]
        if name in head_tensors and tensor.ndim:
            rows, head = _head_rows(len(tensor), len(target), source_classes, classes)
            if rows is None:
                skipped.append((original, "head"))
                continue
            tensor = tensor[rows]
        if name == "encoder.pos_embedding" and isinstance(model, VisionTransformer):
            tensor = _resample_positions(model, tensor)
        if tensor.shape != target.shape:
            skipped.append((original, f"shape {tuple(tensor.shape)} there, {tuple(target.shape)} here"))
            if name in head_tensors:
                head = "new (of another shape there)"
            continue
        with torch.no_grad():
            target.copy_(tensor)
        loaded.add(name)
    if not loaded:
        raise ModelError(
            f"--weights {source}: nothing in it fits this network. It holds {_some(list(state), 3)}; the "
            f"network has {_some(list(own), 3)}. Give weights of the same --model."
        )
    new = tuple(name for name in own if name not in loaded)
    return LoadReport(source=source, loaded=len(loaded), skipped=tuple(skipped), new=new, head=head)


def _name_in(own: Mapping[str, Tensor], name: str) -> str:
    """Return `name` without a wrapper's prefix and in today's spelling, where only that is in `own`."""
    while name not in own and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    if name not in own:
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
    return name


def _head_rows(
    rows_there: int, rows_here: int, source_classes: Sequence[str] | None, classes: Sequence[str]
) -> tuple[list[int] | slice | None, str]:
    """Return the source's head rows to take, in the order of `classes` (None: none), and a word on it."""
    if rows_there != rows_here:
        return None, f"new ({rows_there} classes there, {rows_here} here)"
    if source_classes is None:
        return slice(None), f"kept ({rows_here} classes; the source does not name them, so check their order)"
    if list(source_classes) == list(classes):
        return slice(None), "kept (the same classes)"
    if len(set(classes)) == len(set(source_classes)) == rows_here and set(classes) == set(source_classes):
        return [list(source_classes).index(name) for name in classes], "kept, in this run's order of classes"
    # torchvision names ImageNet's classes in words, the folders are WordNet ids; both are sorted by id.
    if (
        rows_here == 1000
        and all(re.fullmatch(r"n\d{8}", name) for name in classes)
        and sorted(classes) == list(classes)
    ):
        return slice(None), "kept (ImageNet's classes)"
    return None, f"new ({rows_here} classes with other names there)"


def _resample_positions(model: nn.Module, positions: Tensor) -> Tensor:
    """Return torchvision's ViT position embeddings resampled to the image size of `model`."""
    state = {"encoder.pos_embedding": positions}
    resampled = interpolate_embeddings(model.image_size, model.patch_size, state)
    result: Tensor = resampled["encoder.pos_embedding"]
    return result


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
        f"{arch} cannot take {size}x{size} images ({_first_line(error)}). Use {advice}, or a network for "
        "small images such as cifar_resnet20."
    )


def _probe(model: nn.Module, size: int, *, device: str | None) -> torch.Size:
    """Return the shape of the logits for two images; runs in train mode too, for auxiliary heads."""
    shape = torch.Size()
    for training in (True, False):
        shape = primary_logits(_dry_forward(model, (2, 3, size, size), device=device, training=training)).shape
    return shape


def _passes(model: nn.Module, size: int) -> bool:
    try:
        _probe(model, size, device="meta")
    except Exception:
        return False
    return True


def _dry_forward(model: nn.Module, shape: Sequence[int], *, device: str | None, training: bool) -> object:
    """Run the model on images of this shape without changing it; on its own device when `device` is None."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # Copies, because BatchNorm in train mode writes to its buffers.
    copies = {
        name: tensor.detach().to(device) if device else tensor.detach().clone() for name, tensor in tensors.items()
    }
    first = next(iter(tensors.values()), torch.empty(0))
    place = torch.device(device or first.device)
    random_devices = [place] if place.type == "cuda" else []
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=random_devices):
            return functional_call(model, copies, (torch.zeros(shape, device=place),))
    finally:
        for module, mode in modes.items():
            module.training = mode


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
        _dry_forward(model, (1, *shape), device=device, training=False)
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


# --- Text ---------------------------------------------------------------------------------------------------


def _some(items: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
