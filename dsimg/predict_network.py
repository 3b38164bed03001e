"""A training run's network, ready to answer: what `dsimg predict` asks where there is no ONNX file."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dsimg import models
from dsimg.preprocess import Preprocess, normalise
from dsimg.run import Run
from dsimg.weights import open_network


def network_answer(run: Run) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Return the network of a run as a function from pixels (N, H, W, 3) to logits (N, C), on a GPU where there is
    one. Raises RunError and ModelError as `open_network`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = open_network(run).eval().to(device)
    preprocess = Preprocess.from_dict(run.model["preprocess"])

    @torch.inference_mode()
    def answer(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        images = torch.from_numpy(normalise(pixels, preprocess)).to(device)
        logits: NDArray[np.float32] = models.primary_logits(model(images)).float().cpu().numpy()
        return logits

    return answer
