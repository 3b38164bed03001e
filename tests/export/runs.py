"""Run folders with small ONNX files, made without torch."""

from pathlib import Path
from typing import Any

from dsimg.run import Run
from tests.export.files import INPUT_SIZE, write_network

CLASSES = ["ant", "bee", "fly", "moth", "wasp"]
PREPROCESS = {
    "input_size": list(INPUT_SIZE),
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bilinear",
    "crop_pct": 1.0,
}
MODEL = {"arch": "tests.net", "num_classes": 5, "classes": CLASSES, "preprocess": PREPROCESS}


def write_run(path: Path, *, stage: str = "export", parents: tuple[Run, ...] = (), metrics: Any = None) -> Run:
    """Write a finished run with a network of five classes for 16 x 16 images, and return it."""
    run, _ = Run.begin(path, stage=stage, config={}, parents=parents)
    write_network(path / "model.onnx")
    (path / "labels.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    run.finish(seed=0, model=MODEL, metrics=metrics or {})
    return Run.open(path)
