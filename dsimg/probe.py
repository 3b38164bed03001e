"""Measure how fast networks are before any of them is trained: a latency does not depend on the weights.

python -m dsimg.probe --source RUN --students cifar_resnet20 cifar_resnet32 --ratios 1 0.5 --out probe.json

`dsimg compress` runs it to know what is worth training. A student has fresh weights; one that is pruned loses the
channels that `dsimg prune` would take of those, so its layers are about as wide as they will be, not exactly.
"""

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsimg import cli, models
from dsimg.console import count_text, ms_text
from dsimg.cutting import Counted, Serving, Sessions, choose
from dsimg.errors import ConfigError, DsimgError, ModelError
from dsimg.graph import find_units
from dsimg.preprocess import Preprocess
from dsimg.pruned import cut
from dsimg.recipe import PruneConfig
from dsimg.run import Run, as_plain, write_json
from dsimg.weights import open_network

CALIBRATION_IMAGES = 16  # of noise: int8 takes as long whatever its ranges are
SECONDS = 1.0  # of measuring, for each file


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The flags of `python -m dsimg.probe`."""

    source: Path
    """The run that is to be compressed: its classes, image size, and its own network."""
    students: tuple[str, ...] = ()
    """Architectures beside the source's own."""
    ratios: tuple[float, ...] = (1.0,)
    """Shares of each network's multiply-adds that are left; 1 is the whole network."""
    round_to: int = PruneConfig.round_to
    """Widths stay multiples of this, as in `dsimg prune`."""
    latency_batch: int = 1
    """Images a run of the session."""
    latency_threads: int = 1
    """Threads of the session."""
    out: Path
    """The JSON file to write."""

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"--ratios is {self.ratios}; give shares above 0 and at most 1.")


def probe(config: ProbeConfig) -> list[dict[str, Any]]:
    """Measure the latency of a run's network and of others in its place, whole and pruned, in fp32 and int8."""
    source = Run.open(config.source)
    preprocess, own = Preprocess.from_dict(source.model["preprocess"]), source.model["arch"]
    side, classes = preprocess.input_size[1], source.model["num_classes"]
    terminal = cli.context().terminal
    torch.manual_seed(0)
    network = open_network(source).eval()
    noise = torch.randn(CALIBRATION_IMAGES, *preprocess.input_size, generator=torch.Generator().manual_seed(0))
    sessions = Sessions(
        network,
        serving=Serving(batch=config.latency_batch, threads=config.latency_threads, int8=False),
        input_size=preprocess.input_size,
        calibration=noise,
        say=terminal.say,
    )
    found: list[dict[str, Any]] = []
    try:
        for arch in dict.fromkeys((own, *config.students)):
            whole, reason = network if arch == own else None, None
            if whole is None:
                try:
                    whole = _build(arch, classes=classes, side=side)
                except DsimgError as error:  # the others are measured all the same
                    reason = str(error)
            for ratio in dict.fromkeys((1.0, *config.ratios)):
                entry: dict[str, Any] = {"model": arch, "ratio": ratio, "error": reason, "seconds": {}}
                found.append(entry)
                if whole is None:
                    continue
                terminal.progress(f"export {arch}" + (f", {ratio:g} of its MACs" if ratio < 1 else ""))
                try:
                    model = whole if ratio == 1 else _narrowed(whole, ratio, side=side, round_to=config.round_to)
                    sessions.add(_name(entry), model)
                except DsimgError as error:
                    entry["error"] = str(error)
                    continue
                entry["macs"], entry["parameters"] = models.count_macs(model, side), models.count_parameters(model)
        names = [_name(entry) for entry in found if entry["error"] is None]
        terminal.progress(f"measure {2 * len(names)} files in turn")
        seconds = sessions.seconds(names, int8=(False, True), duration=SECONDS)
        for entry, precision in itertools.product(found, ("fp32", "int8")):
            if entry["error"] is None:
                entry["seconds"][precision] = seconds[f"{_name(entry)} {precision}"]
    finally:
        sessions.close()
        terminal.stop_live()
    write_json(config.out, {"config": as_plain(config), "networks": found})
    terminal.grid(("network", "MACs", "left", "fp32", "int8"), [_row(entry) for entry in found])
    return found


def _build(arch: str, *, classes: int, side: int) -> nn.Module:
    model = models.build_model(arch, num_classes=classes, input_size=side)
    models.check_input_size(model, side, arch, num_classes=classes)
    return model.eval()


def _narrowed(whole: nn.Module, ratio: float, *, side: int, round_to: int) -> nn.Module:
    """Return a copy that is cut to a share of the multiply-adds, as `dsimg prune --target_macs` would. Raises
    ModelError where nothing of it can be cut."""
    model = copy.deepcopy(whole).cpu()
    units = find_units(model, input_size=side)
    choice = choose(
        model,
        units,
        yardstick=Counted(whole, what="macs", side=side),
        goal=ratio,
        importance=PruneConfig.importance,
        round_to=round_to,
        max_ratio=PruneConfig.max_ratio,
        gradients=None,
        seed=0,
    )
    if not choice.cuts:
        raise ModelError(f"nothing can be cut: {choice.shortfall or f'{ratio:g} is nearest to the whole network'}.")
    cut(model, choice.units, choice.kept)
    return model


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['model']} {entry['ratio']:g}".replace("/", "_")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["error"] is not None:
        return entry["model"], "", f"{entry['ratio']:.0%}", entry["error"], ""
    times = (ms_text(entry["seconds"][precision]) for precision in ("fp32", "int8"))
    return entry["model"], count_text(entry["macs"]), f"{entry['ratio']:.0%}", *times


if __name__ == "__main__":
    cli.run(probe)
