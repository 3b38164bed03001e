"""An exported run, ready to answer: the right file in a session, and the preprocess and classes that belong to it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dsimg.errors import RunError
from dsimg.machine import int8_is_exact
from dsimg.preprocess import Preprocess, normalise
from dsimg.run import Run
from dsimg.runtime import Provider
from dsimg_export.onnx_file import DEPENDS_ON_BATCH
from dsimg_export.session import INPUT, OUTPUT, open_session, takes_pixels


@dataclass(frozen=True)
class Served:
    """A run's network in a session."""

    run: Run
    role: str  # of the file that runs: "model", or "reduced" on a processor that needs it
    path: Path
    session: onnxruntime.InferenceSession
    preprocess: Preprocess
    classes: tuple[str, ...]

    def logits(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """pixels: (N, H, W, 3) of 0..255, resized and cropped -> (N, C) float32, in the order of `classes`."""
        return logits_of(self.session, pixels, self.preprocess)


def logits_of(
    session: onnxruntime.InferenceSession, pixels: NDArray[np.uint8], preprocess: Preprocess
) -> NDArray[np.float32]:
    """Return what a session says of pixels (N, H, W, 3): (N, C). They are normalised here unless its file does that.

    A file whose answers depend on the batch is given one image at a time.
    """
    images = pixels if takes_pixels(session) else normalise(pixels, preprocess)
    size = 1 if depends_on_batch(session) else max(len(images), 1)
    parts = [images[start : start + size] for start in range(0, len(images), size)] or [images]
    answers: list[NDArray[np.float32]] = [session.run([OUTPUT], {INPUT: part})[0] for part in parts]
    return np.concatenate(answers)


def depends_on_batch(session: onnxruntime.InferenceSession) -> bool:
    """Tell whether an image's answer depends on its neighbours in a batch, as dynamic int8 has it."""
    return DEPENDS_ON_BATCH in session.get_modelmeta().custom_metadata_map


def role_here(run: Run, provider: Provider = "cpu") -> str:
    """Return the role of the file to run: `reduced` where it is there and int8 sums would saturate, on this processor's
    account; a GPU sums exactly beside any processor."""
    return "reduced" if provider == "cpu" and run.has("reduced") and not int8_is_exact() else "model"


def open_served(run: Run, *, role: str | None = None, threads: int = 1, provider: Provider = "cpu") -> Served:
    """Open the ONNX file of a run, checked against its hash. `role` None takes the one for this machine.

    Raises RunError: the run has no such file, or it is damaged; ModelError and ConfigError as `open_session`.
    """
    role = role or role_here(run, provider)
    path = run.file(role)
    block = run.model
    session = open_session(path, threads=threads, provider=provider)
    outputs = session.get_outputs()[0].shape[1]
    if outputs != len(block["classes"]):
        raise RunError(
            f"{path} gives {outputs} logits, and run.json names {len(block['classes'])} classes. Copy the run again."
        )
    return Served(
        run=run,
        role=role,
        path=path,
        session=session,
        preprocess=Preprocess.from_dict(block["preprocess"]),
        classes=tuple(block["classes"]),
    )
