"""Find the channels that can be cut in a network, by torch-pruning's dependency graph.

The graph (DepGraph, arXiv 2301.12900) says which dimensions of which layers go together. torch-pruning reads a group of
it from one layer and keeps one origin per position; here the edges are followed position by position instead, so that
what has to go together is exactly a connected component, and no position belongs to two units.
"""

import copy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from dsimg import attention
from dsimg.channels import Slice, Unit
from dsimg.errors import ModelError, near
from dsimg.models import AUX_HEADS, first_line, head_names
from dsimg.pruned import cut

TRACE_SECONDS = 120  # torch-pruning's recursion over concatenations and reshapes may never end (its issue #474)
PER_OUTPUT = ("weight", "bias", "running_mean", "running_var")
NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
# Compared with logits of their own size: float32 sums in another order, through a whole network.
TOLERANCE = 1e-3

SPLIT = "the forward splits or slices them at fixed positions"
UNKNOWN = "torch-pruning's graph reaches a layer there that cannot be narrowed"
TIED = "several modules share a tensor of theirs"
UNSOUND = "the forward fixes their number, or uses them in a way that torch-pruning does not see"
KEPT = ""  # inputs, logits and what the user protects: nothing to tell


@dataclass(frozen=True)
class Found:
    """The units of a network, and one sentence for the user on each thing that cannot be cut."""

    units: tuple[Unit, ...]
    notes: tuple[str, ...]


@dataclass
class Components:
    """Which positions go together: a label for each (layer, side, position), labels joined, and why some stay."""

    label: dict[tuple[Any, Any], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    parent: list[int] = field(default_factory=list)
    stays: dict[int, str] = field(default_factory=dict)

    def root(self, label: int) -> int:
        """Return the label that stands for all those joined with `label`."""
        while self.parent[label] != label:
            self.parent[label] = label = self.parent[self.parent[label]]
        return label

    def keep(self, labels: Iterable[int], reason: str) -> None:
        """Say that these stay, and why; the first reason is the one told."""
        for label in labels:
            self.stays.setdefault(label, reason)


def find_units(model: nn.Module, *, input_size: int, protect: Sequence[str] = ()) -> Found:
    """Return what can be cut in `model`, for images of `input_size` pixels; the model does not change.

    The logits and the image's channels always stay, and so do the outputs of the modules named in `protect` and of
    those inside them. Where torch-pruning does not get through the network, widths inside its blocks are found instead.
    One channel of each unit is cut on trial: the logits must be those of the network in which nothing reads it.

    Raises ModelError: an unknown name in `protect`, nothing that can be cut. The network takes images of this size
    (`dsimg.models.check_input_size`).
    """
    names = [name for name, _ in model.named_modules() if name]
    for entry in protect:
        if entry not in names:
            raise ModelError(f"there is no module '{entry}' to protect{near(entry, names)} Name one of the network's.")
    entries = (*protect, *head_names(model))
    whole = {name for name in names if any(name == entry or name.startswith(f"{entry}.") for entry in entries)}
    by_hand, by_hand_notes = attention.units(model)
    if by_hand or by_hand_notes:
        units = [unit for unit in by_hand if not any(_output_of(part, whole) for part in unit.slices)]
        return _found(model, units, by_hand_notes)

    twin = copy.deepcopy(model).cpu().float().eval().requires_grad_(True)
    images = torch.randn(1, 3, input_size, input_size, generator=torch.Generator().manual_seed(0))
    kept: dict[str, list[str]] = defaultdict(list)
    notes: list[str] = []
    try:
        units = _units(twin, images, prefix="", whole=whole, kept=kept, deadline=time.monotonic() + TRACE_SECONDS)
    except Exception as error:  # torch-pruning's own, or the network's: any type
        notes.append(
            f"torch-pruning cannot follow the forward of {type(model).__name__} ({type(error).__name__}: "
            f"{first_line(error)}), a channel shuffle for example: only the widths inside its blocks are cut."
        )
        units = []
    if not units:
        units = _inner_units(twin, images, whole=whole)
    shared = _shared(model)
    tied = [unit for unit in units if any(part.tensor in shared for part in unit.slices)]
    kept[TIED] += [unit.name for unit in tied]
    units = [unit for unit in units if not any(unit is other for other in tied)]
    sound = _sound_units(twin, units, images)
    kept[UNSOUND] += [unit.name for unit in units if not any(unit is other for other in sound)]
    return _found(model, sound, [*notes, *(_note(reason, layers) for reason, layers in kept.items() if layers)])


def _found(model: nn.Module, units: Sequence[Unit], notes: Sequence[str]) -> Found:
    if not units:
        reason = notes[0] if notes else "no layer has a width that is not protected."
        raise ModelError(
            f"nothing in {type(model).__name__} can be pruned: {reason} Convolutions, linear layers and norms work "
            "where the forward reads all sizes from its tensors."
        )
    return Found(tuple(units), tuple(notes))


def _shared(model: nn.Module) -> set[str]:
    """Return the names of parameters that are one with another's."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def _note(reason: str, layers: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(layers))
    more = f" and of {len(distinct) - 1} more" if len(distinct) > 1 else ""
    return f"The channels of {distinct[0]}{more} stay: {reason}."


def _output_of(part: Slice, modules: set[str]) -> bool:
    return part.dim == 0 and part.tensor.rpartition(".")[0] in modules


# --- The graph ----------------------------------------------------------------------------------------------


def _units(
    model: nn.Module, example: Tensor, *, prefix: str, whole: set[str], kept: dict[str, list[str]], deadline: float
) -> list[Unit]:
    """Return the units that reach neither what goes into `model` nor what comes out.

    `prefix` is the model's own name with a dot, `whole` the modules that keep their outputs. What stays is added to
    `kept`, by reason. Raises what torch-pruning and the network raise, and TimeoutError at the deadline.
    """
    graph, entry = _build(model, example, deadline=deadline)
    nodes = list(graph.module2node.values())
    components = _components(graph, nodes, entry)
    state = model.state_dict(keep_vars=True)
    order = {name: number for number, name in enumerate(state)}
    parts: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (node, side), labels in components.label.items():
        for name, dim in _tensors(graph, node, side):
            if name not in state:  # a parametrised weight
                components.keep(map(components.root, labels.values()), UNKNOWN)
                continue
            for position, label in labels.items():
                parts[components.root(label)][name, dim].append(position)
    stays: dict[int, str] = {}
    for label, reason in components.stays.items():
        stays.setdefault(components.root(label), reason)
    alike: dict[tuple[tuple[str, int, int], ...], list[dict[tuple[str, int], list[int]]]] = defaultdict(list)
    for label, tensors in parts.items():
        shape = tuple(sorted(((*key, len(p)) for key, p in tensors.items()), key=lambda s: (order[s[0]], s[1])))
        producer = prefix + shape[0][0].rpartition(".")[0]
        if label in stays:
            kept[stays[label]].append(producer)
        elif not any(dim == 0 and prefix + name.rpartition(".")[0] in whole for name, dim, _ in shape):
            alike[shape].append(tensors)
    kept.pop(KEPT, None)
    modules = dict(model.named_modules())
    units = [_unit(shape, rows, modules, prefix=prefix) for shape, rows in alike.items() if len(rows) > 1]
    return sorted(units, key=lambda unit: order[unit.slices[0].tensor.removeprefix(prefix)])


def _unit(
    shape: Sequence[tuple[str, int, int]],
    rows: list[dict[tuple[str, int], list[int]]],
    modules: dict[str, nn.Module],
    *,
    prefix: str,
) -> Unit:
    """Join components of the same `shape`, (tensor, dimension, positions) each, into a unit."""
    rows.sort(key=lambda row: min(row[shape[0][:2]]))
    kinds = []
    for name, dim, _ in shape:
        owner, _, leaf = name.rpartition(".")
        if leaf not in PER_OUTPUT:
            kinds.append(f"{leaf}:{dim}")
        elif leaf == "weight":
            grouped = "Grouped" if getattr(modules[owner], "groups", 1) > 1 else ""
            kinds.append(f"{grouped}{type(modules[owner]).__name__}:{dim}")
    slices = tuple(
        Slice(prefix + name, dim, np.array([sorted(row[name, dim]) for row in rows], np.int64))
        for name, dim, _ in shape
    )
    producer = next(name for name, dim, _ in shape if dim == 0).rpartition(".")[0]
    return Unit(prefix + producer, " ".join(kinds), len(rows), slices, width=min(count for *_, count in shape))


def _build(model: nn.Module, example: Tensor, *, deadline: float) -> tuple[Any, object]:
    """Return torch-pruning's graph of `model` and the autograd node of what goes into it."""
    import torch_pruning  # a second to import, and only pruning needs it

    entries: list[Any] = []

    def forward(module: nn.Module, images: Tensor) -> list[Tensor]:
        # A product on either side makes nodes of the input and of the outputs, so that channels that reach them show.
        # Autograd's node is kept alive, or its Python object would be another one later.
        entry = images.clone().requires_grad_(True) * 1.0
        entries.append(entry.grad_fn)
        return [output * 1.0 for output in _outputs(module, entry)]

    outer = sys.getprofile()
    # Raised from inside torch-pruning's pure Python: neither a thread that cannot be stopped nor a signal handler.
    sys.setprofile(_alarm(deadline))
    try:
        with torch.enable_grad():
            graph = torch_pruning.DependencyGraph().build_dependency(model, example, forward_fn=forward, verbose=False)
    finally:
        sys.setprofile(outer)
    _mend_flattening(graph)
    return graph, entries[0]


def _mend_flattening(graph: Any) -> None:
    """Set how many columns a flattened channel makes from the tensor's shape.

    torch-pruning guesses it from the last layer before, which is wrong behind a shortcut padded with zero channels.
    """
    for node in graph.module2node.values():
        sizes = getattr(node.grad_fn, "_saved_self_sym_sizes", ())
        if type(node.module).__name__ == "_ReshapeOp" and len(sizes) > 2:
            above = [edge for edge in node.dependencies if edge.target in node.inputs]
            above += [edge for source in node.inputs for edge in source.dependencies if edge.target is node]
            for mapping in (mapping for edge in above for mapping in edge.index_mapping):
                if type(mapping).__name__ == "_FlattenIndexMapping":
                    mapping._stride = int(np.prod(sizes[2:]))


def _alarm(deadline: float) -> Callable[..., None]:
    def check(*_: object) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end after {TRACE_SECONDS} s")

    return check


def _outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return all that the model gives, auxiliary logits too, while its layers are in eval mode."""
    training, model.training = model.training, type(model).__name__ in AUX_HEADS
    try:
        output = model(images)
    finally:
        model.training = training
    return [output] if isinstance(output, Tensor) else [part for part in output if part is not None]


def _components(graph: Any, nodes: Sequence[Any], entry: object) -> Components:
    """Follow the graph's edges from the outputs of each layer, position by position."""
    from torch_pruning import _helpers, ops

    found = Components()
    hybrid = _helpers._HybridIndex
    queue: list[tuple[Any, Any, list[Any]]] = []

    def reach(node: Any, side: Any, pairs: Iterable[Any]) -> None:
        """Label positions of one side of a node, join labels that meet, and queue the new ones."""
        known, width, new = found.label[node, side], _width(graph, node, side), []
        for position, label in pairs:
            # Beyond the width: zeros that a shortcut is padded with at its end, nothing to cut.
            if width is not None and position >= width:
                continue
            if position not in known:
                known[position] = label
                new.append(hybrid(position, label))
            else:
                found.parent[found.root(label)] = found.root(known[position])
        if new:
            queue.append((node, side, new))

    for start in nodes:
        if not isinstance(start.module, LAYERS):
            continue
        side = graph.get_pruner_of_module(start.module).prune_out_channels
        fresh = [p for p in range(start.module.weight.shape[0]) if p not in found.label[start, side]]
        labels = range(len(found.parent), len(found.parent) + len(fresh))
        found.parent.extend(labels)
        reach(start, side, map(hybrid, fresh, labels))
        while queue:
            node, side, pairs = queue.pop()
            reason = _stays(node, entry, ops)
            if reason is not None:
                found.keep((pair.root_idx for pair in pairs), reason)
            for other, size, other_size in _group_sizes(graph, node, side):
                members = {pair.idx // size: pair.root_idx for pair in pairs}
                every = (
                    hybrid(group * other_size + i, label) for group, label in members.items() for i in range(other_size)
                )
                reach(node, other, every)
            for edge in node.dependencies:
                if not edge.is_triggered_by(side):
                    continue
                mapped = pairs
                for mapping in filter(None, edge.index_mapping):
                    if type(mapping).__name__ not in ("_ConcatIndexMapping", "_FlattenIndexMapping"):
                        found.keep((pair.root_idx for pair in mapped), SPLIT)
                        mapped = []
                        break
                    mapped = mapping(mapped)
                reach(edge.target, edge.handler, mapped)
    return found


def _stays(node: Any, entry: object, ops: Any) -> str | None:
    """Return why channels that reach this node cannot be cut, or None where they can."""
    module = node.module
    if node.grad_fn is entry or node.type == ops.OPTYPE.OUTPUT:
        return KEPT
    if node.type in (ops.OPTYPE.MHA, ops.OPTYPE.LSTM, ops.OPTYPE.EMBED, ops.OPTYPE.IN):
        return UNKNOWN
    if isinstance(module, _ConvTransposeNd) or (isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1):
        return UNKNOWN
    # torch-pruning takes these for depthwise convolutions, though they read several channels for each that they make.
    if isinstance(module, LAYERS[:3]) and 1 < module.groups == module.out_channels != module.in_channels:
        return UNKNOWN
    return None


def _group_sizes(graph: Any, node: Any, side: Any) -> list[tuple[Any, int, int]]:
    """Return, for a layer that works in groups, (side, size of a group on this side, its size on that one)."""
    module = node.module
    if isinstance(module, nn.GroupNorm):
        size = module.num_channels // module.num_groups
        return [(side, size, size)]
    if not isinstance(module, LAYERS[:3]) or module.groups in (1, module.out_channels):
        return []
    pruner = graph.get_pruner_of_module(module)
    sizes = {
        pruner.prune_in_channels: module.in_channels // module.groups,
        pruner.prune_out_channels: module.out_channels // module.groups,
    }
    return [(other, sizes[side], size) for other, size in sizes.items()]


def _tensors(graph: Any, node: Any, side: Any) -> list[tuple[str, int]]:
    """Return the tensors, and the dimension of each, along which the channels of this side of a node lie."""
    module, pruner = node.module, graph.get_pruner_of_module(node.module)
    if isinstance(module, nn.Parameter):
        return [(graph._param_to_name[module], node.pruning_dim)]
    if not isinstance(module, (*LAYERS, *NORMS, nn.PReLU)) or pruner.get_out_channels(module) is None:
        return []  # an operation, or the one slope of a PReLU for all channels
    name = graph._module2name[module]
    dot = f"{name}." if name else ""
    if isinstance(module, LAYERS) and side != pruner.prune_out_channels:
        return [(f"{dot}weight", 1)] if getattr(module, "groups", 1) == 1 else []
    return [(dot + leaf, 0) for leaf in PER_OUTPUT if getattr(module, leaf, None) is not None]


def _width(graph: Any, node: Any, side: Any) -> int | None:
    """Return how many positions this side of a node has; None for operations, which have no say."""
    module, pruner = node.module, graph.get_pruner_of_module(node.module)
    if isinstance(module, nn.Parameter):
        return int(module.shape[node.pruning_dim])
    if not isinstance(module, (*LAYERS, *NORMS)):
        return None
    pruner.pruning_dim = node.pruning_dim
    width = pruner.get_out_channels(module) if side == pruner.prune_out_channels else pruner.get_in_channels(module)
    return int(width)


# --- Widths inside blocks -----------------------------------------------------------------------------------


def _inner_units(model: nn.Module, images: Tensor, *, whole: set[str]) -> list[Unit]:
    """Return the units inside the largest sub-modules, one tensor in and one out, that torch-pruning gets through."""
    examples: dict[str, list[Tensor]] = defaultdict(list)

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                examples[name].append(args[0].clone())

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            _outputs(model, images)
    finally:
        for handle in handles:
            handle.remove()
    deadline = time.monotonic() + TRACE_SECONDS
    untold: dict[str, list[str]] = defaultdict(list)  # that the widths between blocks stay is said once, for all

    def search(module: nn.Module, name: str) -> list[Unit]:
        if len(examples[name]) == 1 and time.monotonic() < deadline:
            try:
                return _units(module, examples[name][0], prefix=f"{name}.", whole=whole, kept=untold, deadline=deadline)
            except Exception:  # as for the whole network: its parts may do
                pass
        prefix = f"{name}." if name else ""
        blocks = [(prefix + own, child) for own, child in module.named_children() if [*child.children()]]
        return [unit for full, child in blocks for unit in search(child, full)]

    return search(model, "")


# --- The trial ----------------------------------------------------------------------------------------------


class _NoStatistics(TorchFunctionMode):
    """LayerNorm without its mean and variance, which are over the very channels that are cut."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.layer_norm:
            bound = dict(zip(("input", "normalized_shape", "weight", "bias"), args, strict=False)) | (kwargs or {})
            scaled = bound["input"] if bound.get("weight") is None else bound["input"] * bound["weight"]
            return scaled if bound.get("bias") is None else scaled + bound["bias"]
        return func(*args, **(kwargs or {}))


def _sound_units(model: nn.Module, units: list[Unit], images: Tensor) -> list[Unit]:
    """Return the units of which a channel can be cut without any other effect than that nothing reads it.

    Units not tried within TRACE_SECONDS count as the others: it takes that long only where most fail.
    """
    deadline = time.monotonic() + TRACE_SECONDS

    def search(some: list[Unit]) -> list[Unit]:
        if _is_sound(model, some, images):
            return some
        if len(some) == 1 or time.monotonic() > deadline:
            return []
        half = len(some) // 2
        return search(some[:half]) + search(some[half:])

    sound = search(units)
    return sound if len(sound) == len(units) or _is_sound(model, sound, images) else []


def _is_sound(model: nn.Module, units: Sequence[Unit], images: Tensor) -> bool:
    """Tell whether the middle channel of every unit can be cut at once."""
    unread, narrow = copy.deepcopy(model), copy.deepcopy(model)
    tensors = unread.state_dict()
    for part, row in ((part, unit.channels // 2) for unit in units for part in unit.slices):
        if part.dim == 1:
            tensors[part.tensor].index_fill_(1, torch.from_numpy(part.index[row]), 0.0)
    cut(narrow, units, [np.delete(np.arange(unit.channels), unit.channels // 2) for unit in units])
    with torch.no_grad(), _NoStatistics():
        wanted = _outputs(unread, images)
        try:
            given = _outputs(narrow, images)
        except Exception:  # the network's own code, with fewer channels than it was written for: any type
            return False
    return all(
        a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=TOLERANCE * float(a.abs().max())))
        for a, b in zip(wanted, given, strict=True)
        if a.isfinite().all()
    )
