"""What training and evaluation share of running a network; `inference_forward` is tested through the evaluate stage."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsimg.forward import input_dtype, to_float
from tests.dsimg.test_engine import PRECISIONS, make_engine


class Outputs(NamedTuple):
    """What GoogLeNet and Inception return in training."""

    logits: Tensor
    aux: Tensor | None


def test_outputs_come_back_in_fp32_in_their_own_shape() -> None:
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    assert to_float(half).dtype == torch.float32
    found = to_float(Outputs(half, None))
    assert isinstance(found, Outputs)
    assert found.logits.dtype == torch.float32
    assert found.aux is None
    assert [part.dtype for part in to_float((half, half))] == [torch.float32, torch.float32]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_autocast_takes_fp32_and_deepspeeds_own_modes_their_type(precision: str) -> None:
    engine = make_engine(2, precision)
    assert input_dtype(engine._engine) == (torch.bfloat16 if precision == "bf16" else torch.float32)
