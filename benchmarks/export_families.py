"""Export one or more of every family of torchvision's classifiers, whole and with half their MACs cut, and compare.

    python benchmarks/export_families.py [--only NAME ...] [--results FILE] [--anew]

Each network is exported and run by ONNX Runtime at batch 1, 2, 3 and 8 in a process of its own with a time limit, so
that a crash or a hang is a line of the table. Networks, weights and images are those of prune_families.py, which does
the same for pruned ones. Done networks are in FILE, one JSON line each, and are not done again.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prune_families import CLASSES, IMAGES, WARM_IMAGES, lively, noise, of_each

from dsimg.console import bytes_text, count_text
from dsimg.cutting import reestimate_batchnorm
from dsimg.errors import DsimgError
from dsimg.models import build_model, count_parameters, default_preprocess
from dsimg.to_onnx import parity, to_onnx

HEADER = "| network | parameters | file | export, s | max error | relative | same Top-1 |"


def main() -> None:
    """Export what is asked for and not done, then print the table."""
    shown = of_each(exported, row, program=__file__, description=__doc__, limit=600)
    if not shown:
        return
    print(f"\ntorch {torch.__version__}; batch 1, 2, 3 and 8\n\n{HEADER}\n{'|---' * 7}|")
    print("\n".join(map(row, shown)))
    errors = [result["parity"]["relative_error"] for result in shown if "parity" in result]
    same = sum(result["parity"]["same_top1"] == 1 for result in shown if "parity" in result)
    print(f"\n{len(shown)} networks: {len(errors)} exported, {same} with the same Top-1; worst {np.max(errors):.1e}.")


def exported(name: str) -> dict[str, Any]:
    """Export a network and return what the table says of it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = default_preprocess(name, image_size=None).input_size
    model = lively(build_model(name, num_classes=CLASSES, input_size=size[1]))
    reestimate_batchnorm(model, [noise(WARM_IMAGES, size)])
    model.eval()
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        path = Path(folder) / "model.onnx"
        start = time.perf_counter()
        try:
            to_onnx(model, path, input_size=size)
        except DsimgError as error:
            return {"name": name, "refusal": str(error)}
        return {
            "name": name,
            "parameters": count_parameters(model),
            "bytes": path.stat().st_size,
            "seconds": time.perf_counter() - start,
            "parity": vars(parity(model, path, noise(IMAGES, size))),
        }


def row(result: dict[str, Any]) -> str:
    """Return a network's line of the table in Markdown."""
    if "parity" not in result:
        said = f"refused: {result['refusal']}" if "refusal" in result else f"**FAILED**: {result['failure']}"
        return f"| {result['name']} | {said} |"
    one = result["parity"]
    cells = [
        result["name"],
        count_text(result["parameters"]),
        bytes_text(result["bytes"]),
        f"{result['seconds']:.1f}",
        f"{one['max_error']:.1e}{' **vacuous**' if one['vacuous'] else ''}",
        f"{one['relative_error']:.1e}",
        f"{one['same_top1']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
