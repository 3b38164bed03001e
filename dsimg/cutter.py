"""The cuts of one `dsimg prune`: what rank 0 chooses, what every rank measures, and the files between.

A phase's folder holds `pruning.json`, the weights right after the cut and those that its training begins with, and
`cut.json`, written last: what was reached, and the accuracies on the way.
"""

import copy
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dsimg import cli, models
from dsimg.channels import Unit
from dsimg.console import ms_text
from dsimg.cutting import (
    BATCHNORM_IMAGES,
    CALIBRATION_IMAGES,
    GRADIENT_IMAGES,
    Counted,
    Serving,
    Sessions,
    Yardstick,
    choose,
    mean_gradients,
    nothing_goes,
    reestimate_batchnorm,
    training_batches,
)
from dsimg.errors import ConfigError, ModelError, RunError
from dsimg.evaluation import Evaluation
from dsimg.forward import inference_forward
from dsimg.graph import Found, find_units
from dsimg.metrics import accuracy_text
from dsimg.plan import Network, TrainPlan
from dsimg.pruned import cut, read_record, rebuild
from dsimg.recipe import PruneConfig, latency_goal
from dsimg.run import Run, read_json, write_json
from dsimg.session import evaluate_on_validation
from dsimg.teaching import predictions
from dsimg.weights import open_network, read_weights, restore_weights, save_weights
from dsimg.widths import removal_order
from dsimg.world import World

REPORT = ("goal", "reached", "shortfall", "after_cut", "after_batchnorm")
CUT, WEIGHTS_CUT, WEIGHTS_BEGIN = "cut.json", "cut.safetensors", "begin.safetensors"


@dataclass(frozen=True)
class Phase:
    """A training: before the first cut, between two, or after the last. `goal` is the share of the source's MACs,
    parameters or latency that is left when it begins; None where nothing is cut before it."""

    folder: Path
    epochs: int
    goal: float | None
    last: bool


class Cutter:
    """Chooses and cuts on rank 0, measures on all ranks, and keeps what it did in the phases' folders."""

    def __init__(self, config: PruneConfig, source: Run, dense: Network, setup: TrainPlan, world: World) -> None:
        self.config, self.source, self.dense, self.setup, self.world = config, source, dense, setup, world
        self._say = cli.context().terminal.say
        self._sessions: Sessions | None = None
        self._found: tuple[Network, Found] | None = None  # of the last network that was asked for
        self._told: set[str] = set()

    def found(self, network: Network) -> Found:
        """Return the units of a network, and say what cannot be cut, each once; on rank 0. Raises ModelError."""
        if self._found is None or self._found[0] is not network:
            side = network.preprocess.input_size[1]
            self._found = network, find_units(network.model, input_size=side, protect=self.config.protect)
            for note in self._found[1].notes:
                if note not in self._told:
                    cli.context().terminal.warn(note)
            self._told.update(self._found[1].notes)
        return self._found[1]

    def check(self) -> None:
        """Raise ModelError where nothing of the source may be cut, before there is a run; on rank 0."""
        config, units = self.config, self.found(self.dense).units
        anything = [np.zeros(unit.channels) for unit in units]
        if config.scan or removal_order(units, anything, round_to=config.round_to, max_ratio=config.max_ratio):
            return
        reason = nothing_goes(units, round_to=config.round_to, max_ratio=config.max_ratio)
        raise ModelError(f"nothing can be cut: {reason}. Give others.")

    def sessions(self) -> Sessions:
        """Return the sessions of the source and what is compared with it; on rank 0."""
        if self._sessions is None:
            images = torch.cat([images for images, _ in self._batches(CALIBRATION_IMAGES)])
            self._sessions = Sessions(
                open_network(self.source),
                serving=serving_of(self.config),
                input_size=self.dense.preprocess.input_size,
                calibration=images,
                say=self._say,
            )
        return self._sessions

    def close(self) -> None:
        """Remove the sessions' files."""
        if self._sessions is not None:
            self._sessions.close()

    def _goal(self) -> float:
        """Return the share of the source's MACs, parameters or latency that is to be left in the end."""
        config = self.config
        if config.target_latency is None:
            return float(config.target_macs or config.target_params or 0)
        value, is_seconds = latency_goal(config.target_latency)
        return value if not is_seconds else self.world.on_rank_zero(lambda: self._goal_of_seconds(value))

    def _goal_of_seconds(self, seconds: float) -> float:
        precision = self.config.served_as
        source = self.sessions().seconds(("source",), int8=(precision == "int8",))[f"source {precision}"]
        if seconds >= source:
            raise ConfigError(
                f"--target_latency is {self.config.target_latency}, and the source takes {ms_text(source)} here "
                f"already ({serving_of(self.config)}). Give less, or serve the source."
            )
        return seconds / source

    def measure_source(self, path: Path) -> dict[str, Any]:
        """Return the source's accuracy on the validation images and the goal, measured at the first start and kept in
        `path`."""
        if not self.world.on_rank_zero(path.exists):
            goal = self._goal()
            result = self._evaluate(self.dense)
            if result is not None:
                write_json(path, {**predictions(result), "goal": goal})
                self._say(f"the source: Top-1 {accuracy_text(result.report['top1'])}")
        return self.world.on_rank_zero(lambda: read_kept(path, ("top1", "images", "predicted", "goal")))

    def cut(self, network: Network, phase: Phase) -> Network:
        """Cut a network to the phase's goal, re-estimate BatchNorm, and measure the accuracy before and after that.

        What is in the phase's folder already is not done again. Raises ModelError.
        """
        folder, classes = phase.folder, len(self.setup.folder.classes)
        if not self.world.on_rank_zero((folder / CUT).exists):
            report = self.world.on_rank_zero(lambda: self._choose(network, phase))
            narrow = load_network(self.dense, folder, folder / WEIGHTS_CUT, classes=classes)
            after_cut = self._evaluate(narrow)
            self.world.on_rank_zero(lambda: self._reestimate(narrow, folder))
            narrow = load_network(self.dense, folder, folder / WEIGHTS_BEGIN, classes=classes)
            after_batchnorm = self._evaluate(narrow)
            if after_cut is not None and after_batchnorm is not None:
                report["after_cut"] = after_cut.report["top1"]
                report["after_batchnorm"] = after_batchnorm.report["top1"]
                write_json(folder / CUT, report)
                self._say(
                    f"right after the cut: Top-1 {after_cut.report['top1']['value']:.2%}; BatchNorm re-estimated: "
                    f"{after_batchnorm.report['top1']['value']:.2%}"
                )
            self.world.barrier()
        self.world.on_rank_zero(lambda: read_kept(folder / CUT, REPORT))  # before days are spent on what follows
        return load_network(self.dense, folder, folder / WEIGHTS_BEGIN, classes=classes)

    def _choose(self, network: Network, phase: Phase) -> dict[str, Any]:
        config, side = self.config, network.preprocess.input_size[1]
        assert phase.goal is not None
        self._say(f"looking for {phase.goal:.3f} of the source's {self.what}")
        found = self.found(network)
        yardstick: Yardstick
        if config.target_latency is not None:
            yardstick = self.sessions()
        else:
            what: Literal["macs", "params"] = "params" if config.target_params is not None else "macs"
            yardstick = Counted(self.dense.model, what=what, side=side)
        gradients = self.gradients(network)
        model = copy.deepcopy(network.model).cpu()  # the source stays whole: later cuts are measured by it
        whole = self._whole(model, found.units)
        choice = choose(
            model,
            found,
            yardstick=yardstick,
            goal=phase.goal,
            importance=config.importance,
            round_to=config.round_to,
            max_ratio=config.max_ratio,
            whole=whole,
            gradients=gradients,
            seed=config.seed,
        )
        untouched = not choice.cuts and whole == [unit.channels for unit in found.units]
        if untouched and phase.last:  # an earlier one of several cuts may be too small for a block
            near = f"{phase.goal:g} of it is nearest to the whole network. Give a smaller target"
            raise ModelError(f"nothing can be cut: {choice.shortfall or near}.")
        record = cut(model, choice.units, choice.kept, before=network.pruning)
        phase.folder.mkdir(parents=True, exist_ok=True)
        record.save(phase.folder / "pruning.json")
        save_weights(model.state_dict(), phase.folder / WEIGHTS_CUT)
        said = f"{choice.share:.3f} of the source's {self.what} left"
        self._say(said if choice.shortfall is None else f"{said}, not {phase.goal:.3f}: {choice.shortfall}")
        return {"goal": phase.goal, "reached": choice.share, "shortfall": choice.shortfall, "notes": list(found.notes)}

    def gradients(self, network: Network) -> dict[str, Tensor] | None:
        """Return what --importance taylor needs, None for the others."""
        if self.config.importance != "taylor":
            return None
        return mean_gradients(network.model.to(self.world.device), self._batches(GRADIENT_IMAGES))

    def _whole(self, model: nn.Module, units: Sequence[Unit]) -> list[float]:
        """Return the channels that each unit had in the source."""
        source, here = self.dense.model.state_dict(), model.state_dict()
        firsts = [(unit.channels, unit.slices[0]) for unit in units]
        return [
            channels * source[part.tensor].shape[part.dim] / here[part.tensor].shape[part.dim]
            for channels, part in firsts
        ]

    @property
    def what(self) -> str:
        """What the target is said in."""
        if self.config.target_latency is not None:
            return "latency"
        return "MACs" if self.config.target_macs is not None else "parameters"

    def _reestimate(self, network: Network, folder: Path) -> None:
        model = network.model.to(self.world.device)
        reestimate_batchnorm(model, (images for images, _ in self._batches(BATCHNORM_IMAGES)))
        save_weights(model.state_dict(), folder / WEIGHTS_BEGIN)

    def _batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return training_batches(self.setup, count, seed=self.config.seed, device=self.world.device)

    def _evaluate(self, network: Network) -> Evaluation | None:
        forward = inference_forward(network.model, config=None, world=self.world)
        result = evaluate_on_validation(forward, network.preprocess, self.setup, self.world)
        network.model.cpu()  # the device is the training's
        return result


def read_kept(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Return what the stage has kept in a JSON file of its run. Raises RunError where it is not whole."""
    content = read_json(path)
    if any(key not in content for key in keys):
        raise RunError(
            f"{path} is not what dsimg wrote there. Remove it, and the same command makes it anew; or --overwrite."
        )
    return content


def load_network(dense: Network, folder: Path, weights: Path, *, classes: int) -> Network:
    """Rebuild the network of a phase: the source's architecture, what `folder` says was cut, and these weights."""
    record = folder / "pruning.json"
    try:
        pruning = read_record(record) if record.exists() else dense.pruning
        model = models.build_model(dense.arch, num_classes=classes, input_size=dense.preprocess.input_size[1])
        if pruning is not None:
            rebuild(model, pruning)
        restore_weights(model, read_weights(weights), source=str(weights))
    except (ModelError, RunError) as error:
        raise RunError(
            f"{record} and {weights} are no longer what dsimg wrote there ({str(error).partition('. ')[0]}). Remove "
            f"{folder / CUT} and {weights.name}, and the same command makes them anew; or --overwrite."
        ) from error
    return dataclasses.replace(dense, model=model, pruning=pruning)


def serving_of(config: PruneConfig) -> Serving:
    """Return how latency is measured."""
    return Serving(batch=config.latency_batch, threads=config.latency_threads, int8=config.served_as == "int8")


def remove_cut(folder: Path) -> None:
    """Remove the weights that a training began with, where its own are kept now."""
    for name in (WEIGHTS_CUT, WEIGHTS_BEGIN):
        (folder / name).unlink(missing_ok=True)


def remove_training(folder: Path) -> None:
    """Remove what a training between two cuts was resumed from, where its weights are kept now."""
    remove_cut(folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
