"""The order of an epoch's samples, and how they fall to optimizer steps, micro-batches and ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsimg.augment import ORDER, hash_bits


def epoch_order(count: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the (count,) sample ids of an epoch in order: a function of its arguments, on any machine."""
    ids = np.arange(count, dtype=np.int64)
    return np.argsort(hash_bits(ids, seed=seed, epoch=epoch, draws=1, stream=ORDER)[:, 0], kind="stable")


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank takes of an epoch's order in one micro-batch."""

    positions: NDArray[np.int64]  # (N,) in the epoch's order
    weights: NDArray[np.float32]  # (N,) of the samples' losses
    partner: NDArray[np.int64]  # (N,) index in the block to mix with; its own where there is none
    boundary: bool  # the last micro-batch of its optimizer step


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How an epoch's samples fall to optimizer steps, micro-batches and ranks.

    Step s takes positions [s * B, (s + 1) * B) of the epoch's order, B = micro * accumulation * world; within
    it micro-batch a of rank r is the contiguous block at a * world * micro + r * micro. Hence 1 rank of 64, 2
    of 32 and 1 of 32 with 2 accumulated see the same samples. The last, shorter step is dealt out as evenly
    as possible, over no more micro-batches than it needs. A block of it with fewer than two samples, which
    BatchNorm cannot bear, is filled up from the start of the order with samples of weight 0.

    The loss of a micro-batch is sum(weights * losses). Averaged over the ranks and divided by `accumulation`,
    as DeepSpeed always does, its gradient is exactly the mean over the step's samples, however many these
    are.
    """

    samples: int
    micro: int  # train_micro_batch_size_per_gpu
    accumulation: int  # gradient_accumulation_steps
    world: int

    @property
    def batch_size(self) -> int:
        """Samples in a full optimizer step."""
        return self.micro * self.accumulation * self.world

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, the shorter last one included."""
        return math.ceil(self.samples / self.batch_size)

    def blocks(self, rank: int, *, start_step: int = 0) -> Iterator[Block]:
        """Yield a rank's micro-batches from an optimizer step to the epoch's end; as many on every rank."""
        for step in range(start_step, self.steps):
            start = step * self.batch_size
            total = min(self.batch_size, self.samples - start)
            micro_batches = math.ceil(total / (self.world * self.micro))
            # Pairs for mixup stay together wherever the micro-batch is even.
            unit = 2 if self.micro % 2 == 0 else 1
            units, shares = math.ceil(total / unit), micro_batches * self.world
            weight = self.world * self.accumulation / total
            for index in range(micro_batches):
                share = index * self.world + rank
                low, high = (min(units * part // shares * unit, total) for part in (share, share + 1))
                positions = np.arange(start + low, start + high)
                fill = max(min(2, self.micro) - len(positions), 0)
                positions = np.concatenate([positions, np.arange(fill) % self.samples])
                weights = np.full(len(positions), weight, np.float32)
                weights[len(positions) - fill :] = 0
                yield Block(
                    positions=positions,
                    weights=weights,
                    partner=_partners(positions[: len(positions) - fill], len(positions)),
                    boundary=index == micro_batches - 1,
                )


def _partners(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each of `count` the index of position 2k + 1 where it is 2k, and back; else its own."""
    partner = np.arange(count)
    if len(positions):
        other = np.arange(len(positions)) + np.where(positions % 2 == 0, 1, -1)
        inside = (other >= 0) & (other < len(positions))
        partner[: len(positions)][inside] = other[inside]
    return partner
