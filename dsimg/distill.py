"""Train a small network to say what a large one says of each view of each image.

dsimg distill --source TEACHER --model resnet18 --data DIR --out RUN
deepspeed dsimg/distill.py --deepspeed_config ds_configs/zero2.json --source TEACHER --model resnet18 --out RUN
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsimg import cli
from dsimg.evaluation import Evaluation
from dsimg.forward import inference_forward
from dsimg.metrics import accuracy_text, compared_text
from dsimg.plan import TrainPlan, choose_network, data_path, find_images_of
from dsimg.preprocess import Preprocess
from dsimg.recipe import DistillConfig
from dsimg.run import Run, read_json, write_json
from dsimg.session import Trained, evaluate_on_validation, fit_run
from dsimg.stage import Job, data_of, finish_run, run_stage
from dsimg.teacher import Teacher, open_teacher, order_of
from dsimg.teacher_cache import TeacherCache
from dsimg.teaching import (
    compare_predictions,
    distillation_loss,
    loss_text,
    open_cache,
    open_hints,
    predictions,
)
from dsimg.weights import open_network
from dsimg.world import World

__all__ = ["DistillConfig", "distill"]

TEACHER = "teacher.json"
SPEED_BATCH, SPEED_PASSES = 32, 5


def distill(config: DistillConfig) -> Run:
    """Train a student on the labels and on what one or several teachers say, into a run folder.

    It stops and resumes as `train` does.
    """
    if config.data is None:
        config = dataclasses.replace(config, data=data_of(Path(config.source[0])))
    teachers = [Path(source) for source in config.source]
    return run_stage(config, stage="distill", body=_distill, free=("baseline", "teacher_shard"), same=teachers)


def _distill(job: Job[DistillConfig]) -> Run:
    config, world, path = job.config, job.world, job.path
    resumed = job.resume_point(path / "checkpoints")
    images = find_images_of(config, index=path / "index.jsonl.gz" if resumed else None, world=world)
    student = choose_network(config, images, saved=resumed[1]["model"] if resumed else None)
    setup = job.plan(config, images, student)
    classes = setup.folder.classes
    if config.baseline is not None:
        order_of(Run.open(config.baseline).model["classes"], classes, flag=f"--baseline {config.baseline}")
    teacher, rows = open_teacher(config.source, config, classes=classes, student=student.preprocess, world=world)
    setup.rows[-1:-1] = [*rows, ("loss", loss_text(config))]
    cache = open_cache(config, setup, teacher, world)
    hints = open_hints(config, student, teacher)
    job.go_on(setup, resumed)
    given = [Path(source) for source in (*config.source, *([config.weights] if config.weights else []))]
    reads = [path for path in given if path.exists()]
    run = job.begin(setup, begun=resumed is not None, reads=reads)
    _measure_teacher(run, setup, teacher, world)
    before = teacher.seconds
    trained = fit_run(
        run,
        config,
        setup,
        world=world,
        resumed=resumed,
        loss=distillation_loss(teacher, config, label_smoothing=config.label_smoothing, cache=cache, hints=hints),
        stop=job.stop,
        watch=job.watch,
    )
    # A start that only had the end left to do has no share to tell.
    cost = (teacher.seconds - before) / trained.seconds if trained.stepped else None
    return _finish(run, config, setup, trained, teacher, cache, cost=cost, world=world)


def _measure_teacher(run: Run, setup: TrainPlan, teacher: Teacher, world: World) -> None:
    """Measure the teacher on the student's validation images, before days are spent on learning from it."""
    path, terminal = run.path / TEACHER, cli.context().terminal
    if world.on_rank_zero(path.exists):
        return
    measured = evaluate_on_validation(teacher.logits, setup.network.preprocess, setup, world)
    if measured is not None:
        write_json(path, predictions(measured))
        top1 = measured.report["top1"]["value"]
        terminal.say(f"the teacher, as the student sees the validation images: Top-1 {top1:.2%}")


def _finish(
    run: Run,
    config: DistillConfig,
    setup: TrainPlan,
    trained: Trained,
    teacher: Teacher,
    cache: TeacherCache | None,
    *,
    cost: float | None,
    world: World,
) -> Run:
    """Put student, teacher and baseline beside one another, and end the run."""
    engine, folder = trained.engine, setup.folder
    engine.eval()
    with engine.ema_weights():
        speeds = _images_per_second(
            {"student": engine.forward, "teacher": teacher.logits}, setup.network.preprocess, world
        )
    baseline: Evaluation | None = None
    if config.baseline is not None:
        other = Run.open(config.baseline)
        preprocess = Preprocess.from_dict(other.model["preprocess"])
        order = list(order_of(other.model["classes"], folder.classes, flag=f"--baseline {config.baseline}"))
        forward = inference_forward(open_network(other), config=None, world=world)
        baseline = evaluate_on_validation(lambda images: forward(images)[:, order], preprocess, setup, world)
    replayed, computed = (
        world.sum(torch.tensor([cache.replayed, cache.computed], device=world.device)).tolist() if cache else (0, 0)
    )
    metrics: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    if trained.result is not None:
        metrics = _compare(trained.result, read_json(run.path / TEACHER), baseline)
        metrics["images_per_second"] = speeds
        metrics["teacher_share_of_training"] = cost
        rows = _rows(metrics, config)
        if cache is not None:
            metrics["cache"] = {"replayed": replayed, "computed": computed}
            rows.append(("teacher's cache", f"{replayed:,} views replayed, {computed:,} computed since the last start"))
        rows.append(("next", f"dsimg evaluate --source {run.path} --data {data_path(config)}"))
    return finish_run(run, config, setup, trained, metrics={"distillation": metrics}, rows=rows)


def _compare(student: Evaluation, teacher: Mapping[str, Any], baseline: Evaluation | None) -> dict[str, Any]:
    """Return what the manifest says of the student beside its teacher and a student without one."""
    metrics = {"teacher": teacher["top1"], "against_teacher": compare_predictions(student, teacher)}
    if baseline is not None:
        metrics["baseline"] = baseline.report["top1"]
        metrics["against_baseline"] = compare_predictions(student, predictions(baseline))
    return metrics


def _rows(metrics: Mapping[str, Any], config: DistillConfig) -> list[tuple[str, str]]:
    speeds = metrics["images_per_second"]
    rows = [("teacher", accuracy_text(metrics["teacher"])), ("", compared_text(metrics["against_teacher"]))]
    if metrics["against_teacher"] is not None:
        rows.append(("agreement", f"student and teacher say the same of {metrics['against_teacher']['agreement']:.2%}"))
    if "baseline" in metrics:
        test = metrics["against_baseline"]
        rows.append(("without teacher", f"{accuracy_text(metrics['baseline'])}, {config.baseline}"))
        rows.append(("", compared_text(test)))
    rows.append(("images/s", f"student {speeds['student']:.0f}, teacher {speeds['teacher']:.0f}, forward alone"))
    if metrics["teacher_share_of_training"] is not None:
        share = f"{metrics['teacher_share_of_training']:.0%} of the training time since the last start"
        rows.append(("teacher's cost", share))
    return rows


@torch.no_grad()
def _images_per_second(
    forwards: Mapping[str, Callable[[Tensor], Any]], preprocess: Preprocess, world: World
) -> dict[str, float]:
    """Time forwards in turn on noise, each rank its own batch; return images per second of all ranks together."""
    images = torch.randn((SPEED_BATCH, *preprocess.input_size), device=world.device)
    seconds: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(1 + SPEED_PASSES):
        for name, forward in forwards.items():
            begun = time.perf_counter()
            forward(images)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            seconds[name].append(time.perf_counter() - begun)
    return {name: world.size * SPEED_BATCH / statistics.median(times[1:]) for name, times in seconds.items()}


if __name__ == "__main__":
    cli.run(distill)
