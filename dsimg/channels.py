"""What pruning can cut: units of channels that have to go together, said in tensors and indices alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Slice:
    """One dimension of one tensor that a unit's channels occupy: row c of `index` (channels, k) lists the positions
    along `dim` that go when channel c goes."""

    tensor: str  # a name of the network's state dict
    dim: int
    index: Indices


@dataclass(frozen=True)
class Unit:
    """Channels that several tensors share, such as a convolution's outputs, the BatchNorm after it and the inputs of
    what reads them.

    `width` is how many positions of the layers' width one channel stands for: 1, or a whole group of a grouped
    convolution, or an attention head's size. Units of the same `kind` have the same structure and are ranked together.
    """

    name: str  # the module that makes these channels
    kind: str
    channels: int
    slices: tuple[Slice, ...]
    width: int = 1
