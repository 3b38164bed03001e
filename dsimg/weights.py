"""Weights: load what fits into a network from wherever they come, restore them exactly, save and read them."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from dsimg.errors import ModelError
from dsimg.models import build_model, build_timm, first_line, head_names, looks_like_file, published_weights
from dsimg.pruned import Record, rebuild
from dsimg.run import Run, replacing
from dsimg.shards import is_checkpoint, read_model, saved_model

# Where checkpoints keep their state dict, best first: torchvision's references, timm, Lightning, DeepSpeed.
WRAPPERS = ("model_ema", "state_dict_ema", "state_dict", "model_state_dict", "model", "module")
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning
# Names that torchvision's published files still use: DenseNet's layers, the MLPs of its ViTs.
RENAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"(\.mlp)\.linear_1\."), r"\1.0."),
    (re.compile(r"(\.mlp)\.linear_2\."), r"\1.3."),
)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_weights` did; `str()` is one paragraph for the user."""

    source: str  # where the weights came from
    loaded: int  # tensors copied
    skipped: tuple[tuple[str, str], ...]  # (name in the source, reason)
    new: tuple[str, ...]  # tensors of the network that keep their fresh values
    head: str  # what became of the classifier, e.g. "new (1000 classes there, 7 here)"
    head_kept: bool

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
    a finished run folder of the same arch, or a checkpoint in one. `classes` are the new run's, in the order
    of its logits. The head is kept when the source has the same classes, its rows are put in order when it
    names them in another order, and it stays new otherwise. A file that names no classes but has as many keeps
    its head, and the report says so. Positions of torchvision's ViTs are resampled to the size of `model`.

    Raises ModelError: no such weights, another arch, nothing fits, a pickle that needs code, no network.
    """
    path = Path(weights)
    source_classes: Sequence[str] | None = None
    if path.is_dir():
        saved = saved_model(path)
        if saved["arch"] != arch:
            raise ModelError(
                f"--weights {weights} holds a {saved['arch']}, but --model is {arch}. Give --model "
                f"{saved['arch']}, or other weights."
            )
        state = read_model(path) if is_checkpoint(path) else read_weights(Run.open(path).file("weights"))
        source_classes = saved["classes"]
    elif path.is_file():
        state = read_weights(path) if path.suffix == ".safetensors" else _read_pickle(path)
    elif looks_like_file(weights):
        raise ModelError(
            f"--weights {weights}: no such file or folder. Give a .safetensors or .pth file, a run folder, "
            "or a torchvision weights name such as DEFAULT."
        )
    elif arch.startswith("timm:"):
        state = _timm_state(model, weights, arch=arch)
    else:
        entry = published_weights(arch, weights)
        state = _download(entry)
        source_classes = entry.meta["categories"]
    return _copy_what_fits(model, state, source=weights, source_classes=source_classes, classes=classes)


def open_network(run: Run) -> nn.Module:
    """Return the network of a finished run, with its weights: rebuilt from its architecture, narrowed where it was
    pruned. Raises RunError and ModelError."""
    saved = saved_model(run.path)
    side = saved["preprocess"]["input_size"][1]
    model = build_model(saved["arch"], num_classes=len(saved["classes"]), input_size=side)
    if "pruning" in saved:
        rebuild(model, Record.from_dict(saved["pruning"]))
    restore_weights(model, read_weights(run.file("weights")), source=str(run.path))
    return model


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
    try:
        with replacing(path) as temporary:
            safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {path}: {error}. Free some space there or choose another --out.") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU. Raises ModelError when missing or damaged."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist. Give the path of a .safetensors file.") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}). Copy it again from its source.") from error


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
            f"the download of {entry.url} is damaged ({first_line(error)}). Delete its file in "
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
        pretrained = build_timm(arch, input_size=size[0] if size else None, pretrained=True)
    except Exception as error:  # no network: the hub's client raises a dozen types
        raise ModelError(
            f"timm cannot get weights for {arch} ({first_line(error)}). Check the network, or fetch the "
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
            f"{path} is not a whole PyTorch file ({first_line(error)}). Copy it again from its source."
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
    head, head_kept = "not in the source", False
    for original, tensor in state.items():
        name = _name_in(own, original)
        if name not in own:
            skipped.append((original, "not in this network"))
            continue
        target = own[name]
        if name in head_tensors and tensor.ndim:
            rows, head = _head_rows(len(tensor), len(target), source_classes, classes)
            head_kept = rows is not None
            if rows is None:
                skipped.append((original, "head"))
                continue
            tensor = tensor[rows]
        if name == "encoder.pos_embedding" and isinstance(model, VisionTransformer):
            tensor = _resample_positions(model, tensor)
        if tensor.shape != target.shape:
            skipped.append((original, f"shape {tuple(tensor.shape)} there, {tuple(target.shape)} here"))
            if name in head_tensors:
                head, head_kept = "new (of another shape there)", False
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
    return LoadReport(
        source=source, loaded=len(loaded), skipped=tuple(skipped), new=new, head=head, head_kept=head_kept
    )


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


def _some(items: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
