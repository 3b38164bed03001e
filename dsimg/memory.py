"""How many bytes a rank needs for parameters, gradients and optimizer states: an estimate before anything is allocated.

Source: the ZeRO paper's accounting (Rajbhandari et al. 2019, arXiv 1910.02054, section 3), with DeepSpeed's habits
added: above stage 0 it keeps an fp32 copy of the weights even when they are fp32 already.
"""

from dataclasses import dataclass

FP32 = 4

# Values that an optimizer keeps for each weight.
STATES = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "adagrad": 1, "rmsprop": 1, "muon": 1}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank. Activations and communication buckets are not in it: they depend on the batch."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def estimate_rank_memory(
    parameter_count: int,
    *,
    zero_stage: int,
    world_size: int,
    weight_bytes: int,
    optimizer: str,
    ema: bool = False,
) -> RankMemory:
    """Return the bytes per rank for `parameter_count` trainable parameters.

    `weight_bytes` is 4 for fp32 and autocast, 2 for DeepSpeed's own fp16 and bf16. `optimizer` is its lower-case
    name; an unknown one is counted as Adam.
    """
    share = 1 / world_size
    working = parameter_count * weight_bytes
    states = parameter_count * FP32 * STATES.get(optimizer, 2)
    master = parameter_count * FP32 if zero_stage > 0 or weight_bytes < FP32 else 0
    average = parameter_count * FP32 if ema else 0
    return RankMemory(
        parameters=round(working * (share if zero_stage == 3 else 1)),
        gradients=round(working * (share if zero_stage >= 2 else 1)),
        optimizer=round((states + master + average) * (share if zero_stage >= 1 else 1)),
    )
