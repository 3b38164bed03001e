"""What cutting each group of channels alone does to the accuracy: where a network can be narrowed, and where not."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsimg import data, models
from dsimg.channels import Unit
from dsimg.cutting import reestimate_batchnorm, training_batches
from dsimg.graph import Found
from dsimg.importance import scores
from dsimg.plan import Network, TrainPlan
from dsimg.pruned import cut
from dsimg.run import write_json

RATIOS = (0.25, 0.5, 0.75)
VALIDATION_IMAGES = 1000
RECOUNT_IMAGES = 256  # that BatchNorm is re-estimated on, for each cut
WORST_SHOWN = 12  # lines with a name in the picture


@dataclass(frozen=True)
class Scan:
    """Accuracy on some validation images: of the whole network, and with a share of one unit's channels cut."""

    units: tuple[Unit, ...]
    ratios: tuple[float, ...]
    whole: float
    images: int
    accuracy: list[list[float]]  # of each unit, at each ratio

    def rows(self) -> list[tuple[str, ...]]:
        """Return the lines of a table, the most sensitive unit first."""
        order = sorted(range(len(self.units)), key=lambda index: self.accuracy[index])
        return [
            (
                self.units[index].name,
                str(self.units[index].channels * self.units[index].width),
                *(f"{value:.1%}" for value in self.accuracy[index]),
            )
            for index in order
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the scan as `scan.json` holds it."""
        return {
            "images": self.images,
            "whole": self.whole,
            "ratios": list(self.ratios),
            "units": [
                {"name": unit.name, "channels": unit.channels, "width": unit.width, "top1": accuracy}
                for unit, accuracy in zip(self.units, self.accuracy, strict=True)
            ],
        }


@torch.no_grad()
def scan_units(
    network: Network,
    found: Found,
    setup: TrainPlan,
    *,
    importance: str,
    seed: int,
    device: torch.device,
    gradients: dict[str, Tensor] | None,
    say: Callable[[str], None],
) -> Scan:
    """Cut each unit alone by each of RATIOS, re-estimate BatchNorm, and measure; nothing is trained."""
    model = network.model.to(device).eval()
    ranked = scores(model, found.units, importance=importance, seed=seed, gradients=gradients)
    validation = _validation(setup, device)
    training = [images for images, _ in training_batches(setup, RECOUNT_IMAGES, seed=seed, device=device)]
    base = copy.deepcopy(model)
    reestimate_batchnorm(base, training)  # as after each cut, so that what is shown is the cut's alone
    whole = _accuracy(base, validation)
    table = []
    for number, (unit, score) in enumerate(zip(found.units, ranked, strict=True)):
        ascending = np.argsort(score, kind="stable")
        row = []
        for ratio in RATIOS:
            twin = copy.deepcopy(model)
            gone = min(round(ratio * unit.channels), unit.channels - 1)
            cut(twin, [unit], [np.sort(ascending[gone:])])
            reestimate_batchnorm(twin, training)
            row.append(_accuracy(twin, validation))
        table.append(row)
        shown = ", ".join(f"{value:.1%}" for value in row)
        say(f"{number + 1}/{len(found.units)}  {unit.name}: {shown}")
    return Scan(found.units, RATIOS, whole, sum(len(labels) for _, labels in validation), table)


def write_scan(folder: Path, scan: Scan) -> None:
    """Write `scan.json` and `scan.png` into a folder. Raises RunError."""
    write_json(folder / "scan.json", scan.as_dict())
    _draw(folder / "scan.png", scan)


def _validation(setup: TrainPlan, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return up to VALIDATION_IMAGES of the validation images, evenly spread, normalised, with labels."""
    split, preprocess = setup.folder.val, setup.network.preprocess
    count = min(len(split.files), VALIDATION_IMAGES)
    chosen = np.unique(np.linspace(0, len(split.files) - 1, count).astype(int))
    part = type(split)(split.folder, tuple(split.files[i] for i in chosen), split.labels[chosen])
    return [
        (data.to_input(batch.images, preprocess, device)[batch.valid], batch.labels[batch.valid].to(device))
        for batch in data.EvalLoader(part, preprocess, batch_size=64)
    ]


def _accuracy(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((models.primary_logits(model(images)).argmax(1) == labels).sum()) for images, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


def _draw(path: Path, scan: Scan) -> None:
    from matplotlib.figure import Figure

    from dsimg_export.plots import save

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    shares = [0.0, *(100 * ratio for ratio in scan.ratios)]
    order = sorted(range(len(scan.units)), key=lambda index: scan.accuracy[index])
    colours = itertools.cycle(f"C{number}" for number in range(10))
    styles = itertools.chain(itertools.repeat("-", 10), itertools.repeat("--"))
    for index, colour, style in zip(order[:WORST_SHOWN], colours, styles, strict=False):
        values = [100 * value for value in (scan.whole, *scan.accuracy[index])]
        axes.plot(shares, values, color=colour, linestyle=style, marker="o", markersize=3, label=scan.units[index].name)
    for number, index in enumerate(order[WORST_SHOWN:]):
        values = [100 * value for value in (scan.whole, *scan.accuracy[index])]
        label = None if number else f"the other {len(order) - WORST_SHOWN}"
        axes.plot(shares, values, color="0.75", linewidth=1, zorder=1, label=label)
    axes.set(xlabel="channels cut (%)", xticks=shares, title="One group of channels cut alone, nothing trained")
    axes.set_ylabel(f"Top-1 on {scan.images:,} validation images (%)")
    axes.grid(alpha=0.3)
    rest = f"the most sensitive of {len(scan.units)}" if len(scan.units) > WORST_SHOWN else "groups"
    axes.legend(title=rest, fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save(figure, path)
