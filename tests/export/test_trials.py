"""What a file says of images, in the figures that choose."""

import math

import numpy as np
import pytest

from dsimg.folder import Split
from dsimg.preprocess import Preprocess
from dsimg_export import trials
from dsimg_export.int8 import CONVOLUTIONAL_OPS
from dsimg_export.trials import Candidates, Images
from tests.export.files import write_network
from tests.export.runs import PREPROCESS


@pytest.fixture
def candidates(tmp_path):
    return Candidates(
        write_network(tmp_path / "fp32.onnx"),
        tmp_path,
        calibration=Split(tmp_path, (), np.empty(0, np.int64)),
        preprocess=Preprocess.from_dict(PREPROCESS),
        ops=CONVOLUTIONAL_OPS,
        threads=1,
        reduce_range=False,
    )


@pytest.mark.parametrize(("finite", "loss", "correct"), [(2, math.log(5), 1), (0, math.inf, 0)])
def test_the_loss_is_the_mean_of_those_that_are_finite(candidates, monkeypatch, finite, loss, correct):
    def answer(session, pixels, preprocess):
        logits = np.zeros((len(pixels), 5), np.float32)  # all classes alike: the first is taken, with the loss ln 5
        logits[finite:] = np.nan
        return logits

    monkeypatch.setattr(trials, "logits_of", answer)
    found = candidates.trial(None, Images(np.zeros((3, 16, 16, 3), np.uint8), np.array([0, 1, 0])))
    assert found.loss == pytest.approx(loss)
    assert found.correct == correct
