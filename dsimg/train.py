"""Train an image classifier with DeepSpeed: the first stage.

deepspeed dsimg/train.py --deepspeed_config ds_configs/zero2.json --data DIR --model resnet50 --out RUN --epochs 90
"""

from pathlib import Path

from dsimg import cli
from dsimg.loop import classification_loss
from dsimg.plan import choose_network, data_path, find_images_of, is_digits
from dsimg.recipe import TrainConfig
from dsimg.run import Run
from dsimg.session import fit_run
from dsimg.stage import Job, finish_run, run_stage

__all__ = ["TrainConfig", "train"]


def train(config: TrainConfig) -> Run:
    """Train an image classifier with DeepSpeed, on any number of ranks, into a run folder.

    Asked to stop, it saves and ends with exit code 75; the same command goes on.

    In Python: raises StopRequested then.
    """
    return run_stage(config, stage="train", body=_train)


def _train(job: Job[TrainConfig]) -> Run:
    config, path = job.config, job.path
    resumed = job.resume_point(path / "checkpoints")
    images = find_images_of(config, index=path / "index.jsonl.gz" if resumed else None, world=job.world)
    network = choose_network(config, images, saved=resumed[1]["model"] if resumed else None)
    setup = job.plan(config, images, network)
    job.go_on(setup, resumed)
    weights = [Path(config.weights)] if config.weights is not None and Path(config.weights).exists() else []
    run = job.begin(setup, begun=resumed is not None, reads=weights)
    trained = fit_run(
        run,
        config,
        setup,
        world=job.world,
        resumed=resumed,
        loss=classification_loss(config.label_smoothing),
        stop=job.stop,
        watch=job.watch,
    )
    rows = [("next", f"dsimg evaluate --source {run.path} --data {data_path(config)}")]
    if is_digits(config):
        rows.append(("your images", "dsimg train --data DIR, with DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"))
    return finish_run(run, config, setup, trained, rows=rows)


if __name__ == "__main__":
    cli.run(train)
