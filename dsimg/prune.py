"""Cut channels out of a trained network until it is as small or as fast as asked, and train it back to its accuracy.

dsimg prune --source RUN --data DIR --out RUN2 --target_macs 0.5
deepspeed dsimg/prune.py --deepspeed_config ds_configs/zero2.json --source RUN --out RUN2 --target_latency 0.5
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dsimg import cli, loop, models
from dsimg.console import count_text, ms_text
from dsimg.cutter import (
    CUT,
    REPORT,
    WEIGHTS_BEGIN,
    Cutter,
    Phase,
    load_network,
    read_kept,
    remove_cut,
    remove_training,
    serving_of,
)
from dsimg.cutting import TOLERANCE, sparsity_penalty
from dsimg.errors import ConfigError, DsimgError
from dsimg.hints import Hints
from dsimg.metrics import accuracy_text, compared_text
from dsimg.plan import Images, Network, TrainPlan, data_path, find_images_of
from dsimg.preprocess import Preprocess
from dsimg.pruned import read_record
from dsimg.recipe import PruneConfig, latency_goal
from dsimg.run import Run
from dsimg.runtime import require_onnxruntime
from dsimg.scan import scan_units, write_scan
from dsimg.session import Trained, fit_run
from dsimg.stage import Job, data_of, finish_run, run_stage, trained_weights
from dsimg.teacher import Teacher, open_teacher
from dsimg.teacher_cache import TeacherCache
from dsimg.teaching import (
    check_hints,
    compare_predictions,
    distillation_loss,
    loss_text,
    open_cache,
    open_hints,
)
from dsimg.watch import STARTING
from dsimg.weights import open_network, save_weights

__all__ = ["PruneConfig", "prune"]

SOURCE = "source.json"
SHOWN_LAYERS = 40
CUT_EPOCHS = 2


def prune(config: PruneConfig) -> Run:
    """Prune a run's network and train it on, into a run folder. It stops and resumes as `train` does."""
    if config.data is None:
        config = dataclasses.replace(config, data=data_of(config.source))
    same = [config.source, Path(config.teacher)]
    return run_stage(config, stage="prune", body=_prune, free=("teacher_shard",), same=same)


def _prune(job: Job[PruneConfig]) -> Run:
    config, world, path = job.config, job.world, job.path
    if config.scan and world.size > 1:
        raise ConfigError("--scan works on one rank. Start it without a launcher: dsimg prune --scan.")
    if config.target_latency is not None:
        require_onnxruntime("measuring a session")
    source = Run.open(config.source)
    index = path / "index.jsonl.gz"
    begun = job.again and world.on_rank_zero(index.exists)
    images = find_images_of(config, index=index if begun else None, world=world)
    dense = _open_source(source, config, images)
    # Of a copy: gradient checkpointing changes what it is planned for.
    setup = job.plan(config, images, dataclasses.replace(dense, model=copy.deepcopy(dense.model)))
    if config.sparsity_epochs and setup.ds.zero_stage == 3:
        raise ConfigError(
            "--sparsity_epochs needs whole layers on each rank, and ZeRO-3 cuts them up. Use a lower stage for "
            "pruning: --deepspeed_config zero2."
        )
    reads = [config.source]
    teacher: Teacher | None = None
    cache: TeacherCache | None = None
    if config.teacher != "none" and not config.scan:
        who, flag = (str(config.source), "--source") if config.teacher == "source" else (config.teacher, "--teacher")
        classes = images.folder.classes
        teacher, rows = open_teacher((who,), config, classes=classes, student=dense.preprocess, world=world, flag=flag)
        setup.rows[-1:-1] = [*rows, ("loss", loss_text(config))]
        cache = open_cache(config, setup, teacher, world)
        check_hints(config, dense, teacher)
        reads += [Path(who)] if Path(who) != config.source and Path(who).exists() else []
    setup.rows[-1:-1] = _target_rows(config)
    # Its sessions' files go even where the process ends by os._exit.
    with contextlib.closing(Cutter(config, source, dense, setup, world)) as cutter:
        if not begun:  # what cannot work is said before there is a run
            world.on_rank_zero(cutter.check)
        run = job.begin(setup, begun=begun, reads=reads)
        if config.scan:
            _scan(run, cutter)
            return Run.open(path)
        before = cutter.measure_source(path / SOURCE)
        network, steps_left = dense, config.max_steps
        phases = _phases(config, path, goal=before["goal"])
        for number, phase in enumerate(phases, start=1):
            if len(phases) > 1:
                cli.context().terminal.say(
                    f"training {number} of {len(phases)}, {phase.epochs} epochs, in {phase.folder}"
                )
            end = phase.folder / "weights.safetensors"
            if phase.last or not world.on_rank_zero(end.exists):
                here, trained, steps = _train_phase(job, cutter, network, phase, images, teacher, cache, steps_left)
                if phase.last:
                    return _finish(run, here, trained, cutter, before)
                steps_left = None if steps_left is None else steps_left - steps
                world.on_rank_zero(functools.partial(save_weights, trained_weights(trained), end))
                trained.engine.close()
            world.on_rank_zero(functools.partial(remove_training, phase.folder))
            network = load_network(dense, phase.folder, end, classes=len(images.folder.classes))
    raise AssertionError("the last phase returns")


def _open_source(source: Run, config: PruneConfig, images: Images) -> Network:
    """Return the network to prune. Raises ConfigError where the data has other classes."""
    block, classes = source.model, images.folder.classes
    if list(classes) != block["classes"]:
        raise ConfigError(
            f"{data_path(config)} has other classes than {config.source} was trained on ({len(classes)} here, "
            f"{len(block['classes'])} there). Give the data it was trained on."
        )
    return Network(
        arch=block["arch"],
        model=open_network(source),
        preprocess=Preprocess.from_dict(block["preprocess"]),
        pruning=read_record(source.file("pruning")) if source.has("pruning") else None,
    )


def _train_phase(
    job: Job[PruneConfig],
    cutter: Cutter,
    network: Network,
    phase: Phase,
    images: Images,
    teacher: Teacher | None,
    cache: TeacherCache | None,
    steps_left: int | None,
) -> tuple[TrainPlan, Trained, int]:
    """Cut where the phase begins with that, and train; return the plan, what came of it, and this start's steps."""
    config = dataclasses.replace(job.config, epochs=phase.epochs, max_steps=steps_left)
    job.stop.nothing_to_save = True  # until the first step: asked to stop while it searches, it leaves at once
    if phase.goal is not None:
        if job.watch is not None:
            job.watch.at(0, STARTING)  # a search may take longer than a rank may stand still
        network = cutter.cut(network, phase)
    penalty = None
    if phase.goal is None:
        found = job.world.on_rank_zero(lambda: cutter.found(network))
        # A copy learns: what a cut may take is measured by the source.
        network = dataclasses.replace(network, model=copy.deepcopy(network.model))
        penalty = sparsity_penalty(network.model, found.units, strength=config.sparsity)
    phase.folder.mkdir(parents=True, exist_ok=True)
    resumed = job.resume_point(phase.folder / "checkpoints")
    setup = job.plan(config, images, network)
    job.go_on(setup, resumed)
    hints = open_hints(config, network, teacher) if teacher is not None else None
    trained = fit_run(
        Run(phase.folder, None),
        config,
        setup,
        world=job.world,
        resumed=resumed,
        loss=_loss(config, teacher, cache, hints, penalty),
        stop=job.stop,
        watch=job.watch,
    )
    if hints is not None:
        hints.close()
    return setup, trained, setup.plan.steps * phase.epochs - (resumed[1]["step"] if resumed else 0)


def _phases(config: PruneConfig, path: Path, *, goal: float) -> list[Phase]:
    """Return the trainings of the stage in order; what is left falls by the same factor in each cut."""
    folder = path / "phases"
    phases = [Phase(folder / "sparsity", config.sparsity_epochs, None, False)] if config.sparsity_epochs else []
    for number in range(1, config.cuts):
        phases.append(
            Phase(folder / f"cut_{number}", config.cut_epochs or CUT_EPOCHS, goal ** (number / config.cuts), False)
        )
    return [*phases, Phase(path, config.epochs, goal, True)]


def _loss(
    config: PruneConfig,
    teacher: Teacher | None,
    cache: TeacherCache | None,
    hints: Hints | None,
    penalty: Callable[[], Tensor] | None,
) -> loop.Loss:
    """Return the loss of one training: the labels, the teacher, and before the first cut the penalty on channels."""
    if teacher is None:
        loss = loop.classification_loss(config.label_smoothing)
    else:
        loss = distillation_loss(teacher, config, label_smoothing=config.label_smoothing, cache=cache, hints=hints)
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
        goal = ms_text(value) if seconds else f"{value:g} of the source's latency"
        target = f"{goal}, measured on ONNX Runtime here: {serving_of(config)}"
    cuts = (
        ""
        if config.cuts == 1
        else f" in {config.cuts} cuts, {config.cut_epochs or CUT_EPOCHS} epochs after each but the last"
    )
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


def _compare(
    run: Run, setup: TrainPlan, trained: Trained, cutter: Cutter, before: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what the manifest and the result table say of the pruned network beside its source."""
    assert trained.result is not None
    side = setup.network.preprocess.input_size[1]
    source = open_network(cutter.source)
    classes = len(setup.folder.classes)
    pruned = load_network(cutter.dense, run.path, run.path / WEIGHTS_BEGIN, classes=classes).model
    cut_report = read_kept(run.path / CUT, REPORT)
    macs = [models.count_macs(model, side) for model in (source, pruned)]
    parameters = [models.count_parameters(model) for model in (source, pruned)]
    metrics: dict[str, Any] = {
        **cut_report,
        "before": before["top1"],
        "against_source": compare_predictions(trained.result, before),
        "macs": macs,
        "parameters": parameters,
        "layers": _layers(source, pruned),
    }
    rows = [
        ("source", accuracy_text(before["top1"])),
        ("after last cut", accuracy_text(cut_report["after_cut"])),
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
    except DsimgError as error:
        rows.append(("latency", f"not measured: {error}"))
    else:
        goal = cut_report["goal"] if cutter.what == "latency" else None
        rows += _latency_rows(metrics["latency"], served_as=cutter.config.served_as, goal=goal)
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


def _latency(cutter: Cutter, pruned: nn.Module) -> dict[str, Any]:
    """Return seconds of one run of the source's and the pruned network's session, in fp32 and int8."""
    sessions = cutter.sessions()
    sessions.add("pruned", pruned)
    serving = sessions.serving
    seconds = sessions.seconds(("source", "pruned"), int8=(False, True))
    return {"batch": serving.batch, "threads": serving.threads, "seconds": seconds}


def _latency_rows(latency: Mapping[str, Any], *, served_as: str, goal: float | None) -> list[tuple[str, str]]:
    seconds, rows = latency["seconds"], []
    share = seconds[f"pruned {served_as}"] / seconds[f"source {served_as}"]
    for precision in ("fp32", "int8"):
        source, pruned = seconds[f"source {precision}"], seconds[f"pruned {precision}"]
        text = f"{ms_text(source)} -> {ms_text(pruned)} in {precision}, {source / pruned:.2f}x as fast"
        rows.append(("latency" if precision == "fp32" else "", text))
    if goal is not None and abs(share - goal) > TOLERANCE * goal:
        rows.append(("", f"! measured again, {share:.3f} of the source's in {served_as}, not {goal:.3f}"))
    if share > 1 - TOLERANCE:
        rows.append(
            (
                "",
                f"! not faster in {served_as}, which it is to be served in (--served_as): serve the source, or give a "
                "--target_latency",
            )
        )
    best = min(seconds, key=lambda name: seconds[name])
    threads = f"{latency['threads']} thread{'s' * (latency['threads'] != 1)}"
    of = " of processor time" if latency["threads"] == 1 else ""
    rows.append(("", f"ms{of}: ONNX Runtime, CPU, batch {latency['batch']}, {threads}; fastest: {best}"))
    return rows


def _scan(run: Run, cutter: Cutter) -> None:
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
            ("whole network", f"Top-1 {result.whole:.2%} on {result.images} validation images, BatchNorm re-estimated"),
            ("picture", str(run.path / "scan.png")),
            ("next", f"dsimg prune --source {config.source} --target_macs 0.5 --protect LAYERS that lose most"),
        ],
    )


def _finish(run: Run, setup: TrainPlan, trained: Trained, cutter: Cutter, before: Mapping[str, Any]) -> Run:
    """Put the pruned network beside its source, and end the run."""
    metrics, rows = cutter.world.on_rank_zero(lambda: _compare(run, setup, trained, cutter, before))
    finished = finish_run(run, cutter.config, setup, trained, metrics={"pruning": metrics}, rows=rows)
    cutter.world.on_rank_zero(lambda: remove_cut(run.path))  # only now: a resumed run begins with them
    return finished


if __name__ == "__main__":
    cli.run(prune)
