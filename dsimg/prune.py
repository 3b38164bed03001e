"""Cut channels out of a trained network until it is as small or as fast as asked, and train it back to its accuracy.

dsimg prune --source RUN --data DIR --out RUN2 --target_macs 0.5
deepspeed dsimg/prune.py --deepspeed_config ds_configs/zero2.json --source RUN --out RUN2 --target_latency 0.5
"""

import contextlib
import copy
import dataclasses
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsimg import cli, loop, models
from dsimg.channels import Unit
from dsimg.console import count_text
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
    reestimate_batchnorm,
    sparsity_penalty,
    training_batches,
)
from dsimg.errors import ConfigError, ModelError
from dsimg.forward import inference_forward
from dsimg.graph import Found, find_units
from dsimg.metrics import accuracy_text, compared_text, mcnemar
from dsimg.plan import Network, TrainPlan, data_path, find_images_of, plan_training
from dsimg.preprocess import Preprocess
from dsimg.pruned import cut, read_record, rebuild
from dsimg.recipe import PruneConfig, latency_goal
from dsimg.run import Run, read_json, write_json
from dsimg.scan import scan_units, write_scan
from dsimg.session import Trained, fit_run, validation_batches
from dsimg.stage import Job, data_of, finish_run, run_stage, trained_weights
from dsimg.teacher import Teacher, distillation_loss, loss_text, open_cache, open_hints, open_teacher
from dsimg.watch import STARTING
from dsimg.weights import open_network, read_weights, restore_weights, save_weights
from dsimg.world import World

__all__ = ["PruneConfig", "prune"]

SOURCE = "source.json"
CUT, WEIGHTS_CUT, WEIGHTS_BEGIN = "cut.json", "cut.safetensors", "begin.safetensors"
SHOWN_LAYERS = 40


@dataclass(frozen=True)
class Phase:
    """A training: before the first cut, between two, or after the last. `goal` is the share of the source's MACs,
    parameters or latency that is left when it begins; None where nothing is cut before it."""

    folder: Path
    epochs: int
    goal: float | None
    last: bool


def prune(config: PruneConfig) -> Run:
    """Prune a run's network and train it on, into a run folder. It stops and resumes as `train` does."""
    if config.data is None:
        config = dataclasses.replace(config, data=data_of(config.source))
    return run_stage(config, stage="prune", body=_prune, free=("teacher_shard",))


def _prune(job: Job[PruneConfig]) -> Run:
    config, world, path = job.config, job.world, job.path
    source = Run.open(config.source)
    block = source.model
    index = path / "index.jsonl.gz"
    begun = job.again and world.on_rank_zero(index.exists)
    images = find_images_of(config, index=index if begun else None, world=world)
    classes = images.folder.classes
    if list(classes) != block["classes"]:
        raise ConfigError(
            f"{data_path(config)} has other classes than {config.source} was trained on ({len(classes)} here, "
            f"{len(block['classes'])} there). Give the data it was trained on."
        )
    pruning = read_record(source.file("pruning")) if source.has("pruning") else None
    dense = Network(
        arch=block["arch"],
        model=open_network(source),
        preprocess=Preprocess.from_dict(block["preprocess"]),
        pruning=pruning,
    )

    def plan(network: Network, epochs: int) -> TrainPlan:
        return plan_training(
            dataclasses.replace(config, epochs=epochs),
            job.raw,
            ds_source=job.ds_source,
            batch_size=job.batch_size,
            world=world,
            images=images,
            network=network,
        )

    # Of a copy: gradient checkpointing changes what it is planned for.
    setup = plan(dataclasses.replace(dense, model=copy.deepcopy(dense.model)), config.epochs)
    if config.sparsity_epochs and setup.ds.zero_stage == 3:
        raise ConfigError(
            "--sparsity_epochs needs whole layers on each rank, and ZeRO-3 cuts them up. Use a lower stage for "
            "pruning: --deepspeed_config zero2."
        )
    reads = [config.source]
    teacher: Teacher | None = None
    if config.teacher != "none" and not config.scan:
        who = str(config.source) if config.teacher == "source" else config.teacher
        teacher, rows = open_teacher((who,), config, classes=classes, student=dense.preprocess, world=world)
        setup.rows[-1:-1] = [*rows, ("loss", loss_text(config))]
        reads += [Path(who)] if Path(who) not in reads and Path(who).exists() else []
    setup.rows[-1:-1] = _target_rows(config)
    run = job.begin(setup, begun=begun, reads=reads)
    # Its sessions' files go even where the process ends by os._exit.
    with contextlib.closing(_Cutter(config, source, dense, setup, world)) as cutter:
        if config.scan:
            world.on_rank_zero(lambda: _scan(run, cutter))
            return Run.open(path)
        before = cutter.measure_source(path / SOURCE)

        network = dense
        for phase in _phases(config, path, goal=before["goal"]):
            end = phase.folder / "weights.safetensors"
            if not phase.last and world.on_rank_zero(end.exists):
                world.on_rank_zero(functools.partial(_remove_cut, phase.folder))  # killed just before it did
                network = _load(dense, phase.folder, end, classes=len(classes))
                continue
            if phase.goal is not None:
                if job.watch is not None:
                    job.watch.at(0, STARTING)  # a search may take longer than a rank may stand still
                network = cutter.cut(network, phase)
            phase.folder.mkdir(parents=True, exist_ok=True)
            resumed = job.resume_point(phase.folder / "checkpoints")
            here = plan(network, phase.epochs)
            job.go_on(here, resumed)
            trained = fit_run(
                Run(phase.folder, None),
                dataclasses.replace(config, epochs=phase.epochs),
                here,
                world=world,
                resumed=resumed,
                loss=_loss(here, config, teacher, cutter, world, sparse=phase.goal is None),
                stop=job.stop,
                watch=job.watch,
            )
            if phase.last:
                return _finish(run, here, trained, cutter, before)
            world.on_rank_zero(functools.partial(save_weights, trained_weights(trained), end))
            world.on_rank_zero(functools.partial(_remove_cut, phase.folder))
            del trained
            gc.collect()  # the engine and its network refer to one another
            network = _load(dense, phase.folder, end, classes=len(classes))
    raise AssertionError("the last phase returns")


def _phases(config: PruneConfig, path: Path, *, goal: float) -> list[Phase]:
    """Return the trainings of the stage in order; what is left falls by the same factor in each cut."""
    folder = path / "phases"
    phases = [Phase(folder / "sparsity", config.sparsity_epochs, None, False)] if config.sparsity_epochs else []
    for number in range(1, config.cuts):
        phases.append(Phase(folder / f"cut_{number}", config.cut_epochs, goal ** (number / config.cuts), False))
    return [*phases, Phase(path, config.epochs, goal, True)]


def _load(dense: Network, folder: Path, weights: Path, *, classes: int) -> Network:
    """Rebuild the network of a phase: the source's architecture, what `folder` says was cut, and these weights."""
    record = folder / "pruning.json"
    pruning = read_record(record) if record.exists() else dense.pruning
    model = models.build_model(dense.arch, num_classes=classes, input_size=dense.preprocess.input_size[1])
    if pruning is not None:
        rebuild(model, pruning)
    restore_weights(model, read_weights(weights), source=str(weights))
    return dataclasses.replace(dense, model=model, pruning=pruning)


def _loss(
    setup: TrainPlan,
    config: PruneConfig,
    teacher: Teacher | None,
    cutter: "_Cutter",
    world: World,
    *,
    sparse: bool,
) -> loop.Loss:
    """Return the loss of one training: the labels, the teacher, and before the first cut the penalty on channels."""
    penalty = None
    if sparse:  # before hints add to the network
        penalty = sparsity_penalty(setup.network.model, cutter.found(setup.network).units, strength=config.sparsity)
    if teacher is None:
        loss = loop.classification_loss(config.label_smoothing)
    else:
        loss = distillation_loss(
            teacher,
            config,
            label_smoothing=config.label_smoothing,
            cache=open_cache(config, setup, teacher, world),
            hints=open_hints(config, setup.network, teacher),
        )
    if penalty is None:
        return loss

    def with_penalty(output: Any, images: Tensor, targets: loop.Targets) -> Tensor:
        return loss(output, images, targets) + penalty()

    return with_penalty


def _target_rows(config: PruneConfig) -> list[tuple[str, str]]:
    if config.scan:
        return [("scan", "each group of layers alone; nothing is trained or kept")]
    if config.target_macs is not None:
        target = f"{config.target_macs:g} of the source's MACs"
    elif config.target_params is not None:
        target = f"{config.target_params:g} of the source's parameters"
    else:
        value, seconds = latency_goal(str(config.target_latency))
        goal = f"{1000 * value:g} ms" if seconds else f"{value:g} of the source's latency"
        target = f"{goal}, measured on ONNX Runtime here: {_serving(config)}"
    cuts = "" if config.cuts == 1 else f" in {config.cuts} cuts, {config.cut_epochs} epochs after each but the last"
    rows = [("target", target + cuts)]
    sparse = f"; {config.sparsity_epochs} epochs of sparse training first" if config.sparsity_epochs else ""
    kept = f"; protected: {', '.join(config.protect)}" if config.protect else ""
    rows.append(
        (
            "cut",
            f"by {config.importance}, widths in multiples of {config.round_to}, at most {config.max_ratio:g} of a layer"
            f"{kept}{sparse}",
        )
    )
    return rows


def _serving(config: PruneConfig) -> Serving:
    return Serving(batch=config.latency_batch, threads=config.latency_threads, int8=config.served_as == "int8")


class _Cutter:
    """Chooses and cuts on rank 0, measures on all ranks, and keeps what it did in the phases' folders."""

    def __init__(self, config: PruneConfig, source: Run, dense: Network, setup: TrainPlan, world: World) -> None:
        self.config, self.source, self.dense, self.setup, self.world = config, source, dense, setup, world
        self._say = cli.context().terminal.say
        self._sessions: Sessions | None = None

    def found(self, network: Network) -> Found:
        """Return the units of a network; what cannot be cut is said once. Raises ModelError."""
        return find_units(network.model, input_size=network.preprocess.input_size[1], protect=self.config.protect)

    def sessions(self) -> Sessions:
        """Return the sessions of the source and what is compared with it; on rank 0."""
        if self._sessions is None:
            images = torch.cat([images for images, _ in self._batches(CALIBRATION_IMAGES)])
            self._sessions = Sessions(
                open_network(self.source),
                serving=_serving(self.config),
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
                f"--target_latency is {1000 * seconds:g} ms, and the source takes {1000 * source:.2f} ms here already "
                f"({_serving(self.config)}). Give less, or serve the source."
            )
        return seconds / source

    def measure_source(self, path: Path) -> dict[str, Any]:
        """Return the source's accuracy on the validation images and the goal, measured at the first start and kept in
        `path`."""
        if not self.world.on_rank_zero(path.exists):
            goal = self._goal()
            result = self._evaluate(self.dense)
            if result is not None:
                right = (result.top[:, 0] == result.split.labels).astype(int)
                write_json(path, {"top1": result.report["top1"], "right": right.tolist(), "goal": goal})
                self._say(f"the source: Top-1 {accuracy_text(result.report['top1'])}")
        return self.world.on_rank_zero(lambda: read_json(path))

    def cut(self, network: Network, phase: Phase) -> Network:
        """Cut a network to the phase's goal, re-estimate BatchNorm, and measure the accuracy before and after that.

        What is in the phase's folder already is not done again. Raises ModelError.
        """
        folder, classes = phase.folder, len(self.setup.folder.classes)
        if not self.world.on_rank_zero((folder / CUT).exists):
            report = self.world.on_rank_zero(lambda: self._choose(network, phase))
            narrow = _load(self.dense, folder, folder / WEIGHTS_CUT, classes=classes)
            after_cut = self._evaluate(narrow)
            self.world.on_rank_zero(lambda: self._reestimate(narrow, folder))
            narrow = _load(self.dense, folder, folder / WEIGHTS_BEGIN, classes=classes)
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
        return _load(self.dense, folder, folder / WEIGHTS_BEGIN, classes=classes)

    def _choose(self, network: Network, phase: Phase) -> dict[str, Any]:
        config, side = self.config, network.preprocess.input_size[1]
        assert phase.goal is not None
        self._say(f"looking for {phase.goal:.3f} of the source's {self.what}")
        found = self.found(network)
        for note in found.notes:
            cli.context().terminal.warn(note)
        yardstick: Yardstick
        if config.target_latency is not None:
            yardstick = self.sessions()
        else:
            dense = open_network(self.source)
            yardstick = Counted(dense, what="params" if config.target_params is not None else "macs", side=side)
        gradients = self.gradients(network)
        model = network.model.cpu()
        choice = choose(
            model,
            found,
            yardstick=yardstick,
            goal=phase.goal,
            importance=config.importance,
            round_to=config.round_to,
            max_ratio=config.max_ratio,
            whole=self._whole(model, found.units),
            gradients=gradients,
            seed=config.seed,
        )
        if choice.share > 0.999 and phase.last:  # an earlier one of several cuts may be too small for a block
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

    def _evaluate(self, network: Network) -> loop.Evaluation | None:
        preprocess = network.preprocess
        result = loop.evaluate(
            inference_forward(network.model, config=None, world=self.world),
            world=self.world,
            batches=validation_batches(self.setup.folder.val, preprocess, self.setup, self.world),
            split=self.setup.folder.val,
            preprocess=preprocess,
            classes=self.setup.folder.classes,
        )
        network.model.cpu()  # the device is the training's
        return result


def _compare(
    run: Run, setup: TrainPlan, trained: Trained, cutter: _Cutter, before: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what the manifest and the result table say of the pruned network beside its source."""
    assert trained.result is not None
    side = setup.network.preprocess.input_size[1]
    source = open_network(cutter.source)
    classes = len(setup.folder.classes)
    pruned = _load(cutter.dense, run.path, run.path / WEIGHTS_BEGIN, classes=classes).model
    right = trained.result.top[:, 0] == trained.result.split.labels
    cut_report = read_json(run.path / CUT)
    macs, parameters = (
        [count(source), count(pruned)]
        for count in (lambda model: models.count_macs(model, side), models.count_parameters)
    )
    metrics: dict[str, Any] = {
        **cut_report,
        "before": before["top1"],
        "against_source": mcnemar(right, np.array(before["right"], bool)),
        "macs": macs,
        "parameters": parameters,
        "layers": _layers(source, pruned),
    }
    rows = [
        ("source", accuracy_text(before["top1"])),
        ("after the cut", accuracy_text(cut_report["after_cut"])),
        ("", f"{accuracy_text(cut_report['after_batchnorm'])} with BatchNorm re-estimated"),
        ("against source", compared_text(metrics["against_source"])),
        ("MACs", f"{count_text(macs[0])} -> {count_text(macs[1])}, {macs[0] / macs[1]:.2f}x fewer"),
        ("parameters", f"{count_text(parameters[0])} -> {count_text(parameters[1])}"),
    ]
    if cut_report["shortfall"]:
        missed = f"{cut_report['reached']:.3f} of the source's {cutter.what} and not {cut_report['goal']:.3f}"
        rows.append(("target", f"! missed: {missed}: {cut_report['shortfall']}"))
    try:
        metrics["latency"] = _latency(cutter, pruned)
    except (ConfigError, ModelError) as error:
        rows.append(("latency", f"not measured: {error}"))
    else:
        rows += _latency_rows(metrics["latency"], served_as=cutter.config.served_as)
    shown = [(layer["name"], str(layer["before"]), str(layer["after"])) for layer in metrics["layers"]]
    more = len(shown) - SHOWN_LAYERS
    shown = [*shown[:SHOWN_LAYERS], (f"and {more} more in run.json", "", "")] if more > 0 else shown
    cli.context().terminal.grid(("outputs of", "before", "after"), shown)
    rows.append(("next", f"dsimg evaluate --source {run.path} --data {data_path(cutter.config)}"))
    return metrics, rows


def _layers(source: nn.Module, pruned: nn.Module) -> list[dict[str, Any]]:
    """Return the outputs of each layer that was cut, before and after."""
    after = pruned.state_dict()
    return [
        {"name": name.rpartition(".")[0], "before": tensor.shape[0], "after": after[name].shape[0]}
        for name, tensor in source.state_dict().items()
        if tensor.dim() > 1 and name.endswith("weight") and tensor.shape[0] != after[name].shape[0]
    ]


def _latency(cutter: _Cutter, pruned: nn.Module) -> dict[str, Any]:
    """Return seconds of one run of the source's and the pruned network's session, in fp32 and int8."""
    sessions = cutter.sessions()
    sessions.add("pruned", pruned)
    serving = sessions.serving
    seconds = sessions.seconds(("source", "pruned"), int8=(False, True))
    return {"batch": serving.batch, "threads": serving.threads, "seconds": seconds}


def _latency_rows(latency: Mapping[str, Any], *, served_as: str) -> list[tuple[str, str]]:
    seconds, rows = latency["seconds"], []
    for precision in ("fp32", "int8"):
        source, pruned = seconds[f"source {precision}"], seconds[f"pruned {precision}"]
        text = f"{1000 * source:.2f} -> {1000 * pruned:.2f} ms in {precision}, {source / pruned:.2f}x as fast"
        rows.append(("latency" if precision == "fp32" else "", text))
    if seconds[f"pruned {served_as}"] > 0.97 * seconds[f"source {served_as}"]:
        rows.append(
            (
                "",
                f"! not faster in {served_as}, which it is to be served in (--served_as): serve the source, or give a "
                "--target_latency",
            )
        )
    best = min(seconds, key=lambda name: seconds[name])
    threads = f"{latency['threads']} thread{'s' * (latency['threads'] != 1)}"
    rows.append(("", f"ONNX Runtime, CPU, batch {latency['batch']}, {threads}; fastest: {best}"))
    return rows


def _scan(run: Run, cutter: _Cutter) -> None:
    """Measure what cutting each group alone does, and end the run, which has no weights."""
    config, network = cutter.config, cutter.dense
    result = scan_units(
        network,
        cutter.found(network),
        cutter.setup,
        importance=config.importance,
        seed=config.seed,
        device=cutter.world.device,
        gradients=cutter.gradients(network),
        say=cli.context().terminal.say,
    )
    write_scan(run.path, result)
    terminal = cli.context().terminal
    terminal.grid(("channels of", "width", *(f"{ratio:.0%} cut" for ratio in result.ratios)), result.rows())
    run.finish(
        seed=config.seed, model=network.described(cutter.setup.folder.classes), metrics={"scan": result.as_dict()}
    )
    terminal.table(
        "result",
        [
            ("whole network", f"Top-1 {result.whole:.2%} on {result.images} validation images"),
            ("picture", str(run.path / "scan.png")),
            ("next", f"dsimg prune --source {config.source} --target_macs 0.5 --protect LAYERS that lose most"),
        ],
    )


def _finish(run: Run, setup: TrainPlan, trained: Trained, cutter: _Cutter, before: Mapping[str, Any]) -> Run:
    """Put the pruned network beside its source, and end the run."""
    metrics, rows = cutter.world.on_rank_zero(lambda: _compare(run, setup, trained, cutter, before))
    finished = finish_run(run, cutter.config, setup, trained, metrics={"pruning": metrics}, rows=rows)
    cutter.world.on_rank_zero(lambda: _remove_cut(run.path))  # only now: a resumed run begins with them
    return finished


def _remove_cut(folder: Path) -> None:
    """Remove the weights that a training began with, where its own are kept now."""
    for name in (WEIGHTS_CUT, WEIGHTS_BEGIN):
        (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    cli.run(prune)
