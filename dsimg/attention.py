"""What pruning can cut in torchvision's ViT, Swin (1 and 2) and MaxViT, by hand: hidden widths, and attention heads.

torch-pruning's graph does not get through these networks (VainF/Torch-Pruning #101, #258, #474). Their forward code
fixes the size of a head and wants heads * head size = the width of the residual stream, so heads go together with the
stream: a stage that keeps h heads in each of its layers keeps h * head size channels between them. Only the number has
to agree. Which head goes with which channels is free, so the weakest heads of each layer are paired with the weakest
channels of the stream: channel c of such a unit is rank c of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models import MaxVit, SwinTransformer, VisionTransformer
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import PatchMergingV2, ShiftedWindowAttention, ShiftedWindowAttentionV2

from dsimg.channels import Indices, Slice, Unit

State = Mapping[str, Tensor]
Part = tuple[str, int]  # a tensor's name and the dimension along which channels lie
Attention = tuple[list[Part], list[Part]]  # a layer's parts with a head's size of positions a head, and with one

PER_OUTPUT = ("weight", "bias", "running_mean", "running_var")


def units(model: nn.Module) -> tuple[list[Unit], list[str]]:
    """Return what can be cut in `model`, and one sentence for each thing that is not.

    Both are empty for a network that is no torchvision VisionTransformer, SwinTransformer or MaxVit. The pairing of
    heads and channels reads the weights; on the meta device it goes by number.
    """
    state = model.state_dict()
    if type(model) is VisionTransformer:  # a subclass may read its tensors in other ways
        found, notes = _vit(model, state)
    elif type(model) is SwinTransformer:
        found, notes = _swin(model, state)
    elif type(model) is MaxVit:
        found, notes = _maxvit(model, state)
    else:
        return [], []
    single = [unit.name for unit in found if unit.channels == 1]
    notes += [f"{name} has a single head, so its width is not cut." for name in single]
    return [unit for unit in found if unit.channels > 1], notes


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that `module`'s forward reads and that follow from its tensors; {} for other modules.

    For a module whose tensors were narrowed and whose attributes are still the old ones. The scale of MaxViT's
    attention is not among them: it comes from the width that the network was trained at, and stays.
    """
    if isinstance(module, VisionTransformer):
        return {"hidden_dim": module.class_token.shape[2]}
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        width = module.in_proj_weight.shape[1]
        return {"embed_dim": width, "kdim": width, "vdim": width, "num_heads": width // module.head_dim}
    if isinstance(module, ShiftedWindowAttentionV2):  # before its base class, whose table it computes
        return {"num_heads": module.logit_scale.shape[0]}
    if isinstance(module, ShiftedWindowAttention):
        return {"num_heads": module.relative_position_bias_table.shape[1]}
    if isinstance(module, RelativePositionalMultiHeadAttention):
        return {"n_heads": module.relative_position_bias_table.shape[1]}
    return {}


# --- The families -------------------------------------------------------------------------------------------


def _vit(model: Any, state: State) -> tuple[list[Unit], list[str]]:
    plain_stem = isinstance(model.conv_proj, nn.Conv2d)
    stem, head = "conv_proj" if plain_stem else "conv_proj.conv_last", "heads.head"
    found, notes = [], [] if plain_stem else ["The convolutions before conv_proj.conv_last are not cut."]
    if model.representation_size is not None:
        found.append(_hidden(state, "heads.pre_logits", "heads.head", kind="pre_logits"))
        head = "heads.pre_logits"
    stream = [*_rows(state, stem), ("class_token", 2), ("encoder.pos_embedding", 2)]
    attentions: list[Attention] = []
    layers = dict(model.encoder.layers.named_children())
    for name in (f"encoder.layers.{key}" for key in layers):
        found.append(_hidden(state, f"{name}.mlp.0", f"{name}.mlp.3", kind="mlp"))
        attention = f"{name}.self_attention"
        stream += _rows(state, f"{name}.ln_1", f"{name}.ln_2", f"{attention}.out_proj", f"{name}.mlp.3")
        stream += [(f"{attention}.in_proj_weight", 1), (f"{name}.mlp.0.weight", 1)]
        wide = [
            (f"{attention}.in_proj_weight", 0),
            (f"{attention}.in_proj_bias", 0),
            (f"{attention}.out_proj.weight", 1),
        ]
        attentions.append((wide, []))
    stream += [*_rows(state, "encoder.ln"), (f"{head}.weight", 1)]
    heads = next(iter(layers.values())).self_attention.num_heads
    unit = _heads(state, "encoder", heads=heads, width=model.hidden_dim // heads, stream=stream, attentions=attentions)
    return [unit, *found], [_head_size_note(unit), *notes]


def _swin(model: Any, state: State) -> tuple[list[Unit], list[str]]:
    # features: the patches, then stages with a patch merging between each two.
    second = any(isinstance(module, ShiftedWindowAttentionV2) for module in model.modules())
    last = len(model.features) - 1
    found, hidden = [], []
    for position in range(1, last + 1, 2):
        name, before, after = f"features.{position}", f"features.{position - 1}", f"features.{position + 1}"
        if position == 1:
            stream = _rows(state, f"{before}.0", f"{before}.2")
        else:
            merged_norm = isinstance(model.features[position - 1], PatchMergingV2)  # after the reduction, not before
            stream = _rows(state, f"{before}.reduction", *([f"{before}.norm"] if merged_norm else []))
        if position == last:
            stream += [*_rows(state, "norm"), ("head.weight", 1)]
        else:
            stream += [(f"{after}.reduction.weight", 1)]  # four pixels side by side: four blocks of the width
            if not isinstance(model.features[position + 1], PatchMergingV2):
                stream += _rows(state, f"{after}.norm")
        attentions: list[Attention] = []
        for block in (f"{name}.{number}" for number in range(len(model.features[position]))):
            hidden.append(_hidden(state, f"{block}.mlp.0", f"{block}.mlp.3", kind="mlp"))
            attention = f"{block}.attn"
            stream += _rows(state, f"{block}.norm1", f"{block}.norm2", f"{attention}.proj", f"{block}.mlp.3")
            stream += [(f"{attention}.qkv.weight", 1), (f"{block}.mlp.0.weight", 1)]
            narrow = [(f"{attention}.relative_position_bias_table", 1)]
            if second:
                narrow = [(f"{attention}.logit_scale", 0), (f"{attention}.cpb_mlp.2.weight", 0)]
            attentions.append(([*_rows(state, f"{attention}.qkv"), (f"{attention}.proj.weight", 1)], narrow))
        heads = model.features[position][0].attn.num_heads
        width = state[f"{name}.0.attn.proj.weight"].shape[0] // heads
        found.append(_heads(state, name, heads=heads, width=width, stream=stream, attentions=attentions))
    notes = [_head_size_note(found[0])]
    if second:
        notes.append("The hidden width of each cpb_mlp is not cut: it computes a table, not the image's features.")
    return found + hidden, notes


def _maxvit(model: Any, state: State) -> tuple[list[Unit], list[str]]:
    streams, attentions = [_rows(state, "stem.1.0")], []  # what the stem writes, then each block
    hidden = [_single(state, "stem.0.0", "stem.0.0", [*_rows(state, "stem.0.0", "stem.0.1"), ("stem.1.0.weight", 1)])]
    for name, block in ((f"blocks.{number}", block) for number, block in enumerate(model.blocks)):
        stream: list[Part] = []
        pairs: list[Attention] = []
        for layer in (f"{name}.layers.{number}.layers" for number in range(len(block.layers))):
            convs = f"{layer}.MBconv.layers"
            reads = [*_rows(state, f"{convs}.pre_norm"), (f"{convs}.conv_a.0.weight", 1)]
            if stream:
                stream += reads
            else:  # a block's first layer reads the width before it, and projects the shortcut
                streams[-1] += [*reads, (f"{layer}.MBconv.proj.1.weight", 1)]
                stream += _rows(state, f"{layer}.MBconv.proj.1")
            stream += _rows(state, f"{convs}.conv_c")
            hidden.append(_mbconv(state, convs))
            for part in (f"{layer}.window_attention", f"{layer}.grid_attention"):
                attention, mlp = f"{part}.attn_layer.1", f"{part}.mlp_layer"
                hidden.append(_hidden(state, f"{mlp}.1", f"{mlp}.3", kind="mlp"))
                stream += _rows(state, f"{part}.attn_layer.0", f"{attention}.merge", f"{mlp}.0", f"{mlp}.3")
                stream += [(f"{attention}.to_qkv.weight", 1), (f"{mlp}.1.weight", 1)]
                wide = [*_rows(state, f"{attention}.to_qkv"), (f"{attention}.merge.weight", 1)]
                pairs.append((wide, [(f"{attention}.relative_position_bias_table", 1)]))
        streams.append(stream)
        attentions.append(pairs)
    streams[-1] += [*_rows(state, "classifier.2"), ("classifier.3.weight", 1)]
    hidden.append(_hidden(state, "classifier.3", "classifier.5", kind="classifier.3"))
    found = [_single(state, "stem.1.0", "stem.1.0", streams[0])]
    for number, (stream, pairs) in enumerate(zip(streams[1:], attentions, strict=True)):
        attention = model.blocks[number].layers[0].layers.window_attention
        sizes = {"heads": attention.attn_layer[1].n_heads, "width": attention.head_dim}
        found.append(_heads(state, f"blocks.{number}", **sizes, stream=stream, attentions=pairs))
    note = "The squeeze widths of the squeeze-and-excitation blocks are not cut: next to no time is spent in them."
    return found + hidden, [_head_size_note(found[-1]), note]


def _mbconv(state: State, convs: str) -> Unit:
    squeeze = f"{convs}.squeeze_excitation"
    written = _rows(state, *(f"{convs}.{name}" for name in ("conv_a.0", "conv_a.1", "conv_b.0", "conv_b.1")))
    parts = [*written, *_rows(state, f"{squeeze}.fc2"), (f"{squeeze}.fc1.weight", 1), (f"{convs}.conv_c.weight", 1)]
    return _single(state, f"{convs}.conv_a.0", "mbconv", parts)


def _head_size_note(unit: Unit) -> str:
    return (
        f"The size of an attention head stays {unit.width}: heads are cut whole, each with {unit.width} channels of "
        "the width between the layers."
    )


# --- Units from tensors -------------------------------------------------------------------------------------


def _rows(state: State, *modules: str) -> list[Part]:
    """Return the tensors of layers and norms that have one entry an output channel."""
    names = (f"{module}.{leaf}" for module in modules for leaf in PER_OUTPUT)
    return [(name, 0) for name in names if name in state]


def _hidden(state: State, first: str, second: str, *, kind: str) -> Unit:
    """Return the width between two linear layers."""
    return _single(state, first, kind, [*_rows(state, first), (f"{second}.weight", 1)])


def _single(state: State, name: str, kind: str, parts: Sequence[Part]) -> Unit:
    """Return channels that are one position each in all of `parts`."""
    tensor, dim = parts[0]
    order = np.arange(state[tensor].shape[dim])[:, None]
    return Unit(name, kind, len(order), tuple(_slice(state, part, order) for part in parts))


def _heads(
    state: State,
    name: str,
    *,
    heads: int,
    width: int,
    stream: Sequence[Part],
    attentions: Sequence[Attention],
) -> Unit:
    """Return the heads of a stage's layers with the stream between them, the weakest first in each.

    `stream` has heads * width channels, each of `attentions` `heads` heads of `width` positions.
    """
    size = heads * width
    order = np.argsort(_strength(state, stream, size), kind="stable").reshape(heads, width)
    slices = [_slice(state, part, order) for part in stream]
    for wide, narrow in attentions:
        strength = _strength(state, wide, size).reshape(heads, width).sum(axis=1)
        ranked = np.argsort(strength, kind="stable")[:, None]
        slices += [_slice(state, part, ranked * width + np.arange(width)) for part in wide]
        slices += [_slice(state, part, ranked) for part in narrow]
    # Stages differ in depth and in what is around them: each is a kind of its own.
    return Unit(name, f"heads of {name}", heads, tuple(slices), width)


def _slice(state: State, part: Part, order: Indices) -> Slice:
    """Return the positions of `part` for `order` (channels, k), which may lie in it several times: q, k and v."""
    tensor, dim = part
    blocks, rest = divmod(state[tensor].shape[dim], order.size)
    assert rest == 0, (part, order.shape)
    return Slice(tensor, dim, np.concatenate([order + block * order.size for block in range(blocks)], axis=1))


def _strength(state: State, parts: Sequence[Part], size: int) -> NDArray[np.float64]:
    """Return (size,) the squared norm of each channel over the matrices of `parts`, each matrix having mean 1."""
    total = np.zeros(size)
    for tensor, dim in parts:
        values = state[tensor]
        if values.ndim < 2 or values.is_meta:
            continue
        others = [other for other in range(values.ndim) if other != dim]
        energy = values.float().square().sum(dim=others).view(-1, size).sum(dim=0).double().cpu().numpy()
        total += energy / max(energy.mean(), np.finfo(np.float64).tiny)
    return total
