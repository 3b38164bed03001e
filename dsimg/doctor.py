"""Prove, on one's own model and data, that a run which is stopped and resumed is the run that never stopped.

dsimg doctor resume --source RUN
dsimg doctor resume --source recipe.toml --ranks 2
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from safetensors import SafetensorError, safe_open

from dsimg import cli
from dsimg.errors import ConfigError, RunError
from dsimg.machine import free_port
from dsimg.stop import STOPPED

# Of a source's settings: where it writes and when it ends, which the proof decides, and what it would set off.
LEFT_OUT = ("stage", "parents", "out", "overwrite", "log_steps", "max_steps", "max_hours", "stop_file", "on_exit")

# What a launcher around this process would tell the ranks that are started here.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

# In a line of metrics.jsonl: what is learned; the rest is times and memory.
LEARNED = ("epoch", "loss", "lr", "grad_norm")

# In state.json: hashes of what is compared anyway.
HASHES = ("digest", "shards")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The flags of `dsimg doctor`."""

    check: tyro.conf.Positional[Literal["resume"]]
    """What to prove. resume: stopping and resuming changes nothing that is learned, to the bit."""
    source: Path
    """A run folder, whose settings are taken, or a TOML recipe as of `dsimg train --config`. It is only read; paths in
    it are taken from the current directory, as they were when the run was started."""
    ranks: int | None = None
    """Ranks to train on, on this machine. Default: one a GPU, or one without GPUs."""
    steps: int = 6
    """Optimizer steps to train; the stop comes half-way."""

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ConfigError(f"--ranks is {self.ranks}; it must be at least 1.")
        if self.steps < 2:
            raise ConfigError(f"--steps is {self.steps}; it must be at least 2, to stop between them.")


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared to the bit."""

    rows: tuple[tuple[str, str], ...]  # what was compared, and how it came out
    differences: tuple[str, ...]  # in words


def doctor(config: DoctorConfig) -> Comparison:
    """Prove on your own model and data that a run which is stopped and resumed is the run that never stopped.

    Trains a few steps in a temporary folder (in $TMPDIR, with room for four checkpoints): once without a stop, and once
    with a stop half-way. Then all that both learned is compared.
    """
    terminal = cli.context().terminal
    recipe = "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in _settings(config.source).items()
    )
    gpus = _count_gpus()
    ranks = config.ranks or max(1, gpus)
    rows = [
        ("source", str(config.source)),
        ("world", f"{ranks} rank{'s' if ranks > 1 else ''} on {f'{gpus} GPU(s)' if gpus else 'the CPU'}"),
        ("steps", f"{config.steps} without a stop; the same with a stop half-way"),
    ]
    terminal.table("plan", rows)
    with tempfile.TemporaryDirectory(prefix="dsimg-doctor-") as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
        whole, resumed, again = folder / "whole", folder / "resumed", folder / "again"

        start_training(whole, max_steps=config.steps, ranks=ranks, cpu=not gpus)
        epochs = [line["epoch"] for line in _train_lines(whole)]
        if len(epochs) < 2:
            raise RunError(f"the training of {config.source} has a single step: there is nothing to stop between.")
        stop = stop_step(epochs)

        start_training(resumed, max_steps=stop, ranks=ranks, cpu=not gpus)
        saved = newest_checkpoint(resumed).name
        if saved != f"step_{stop:08d}" or (resumed / "run.json").exists():
            raise RunError(f"the training did not stop after step {stop}: its newest checkpoint is {saved}.")
        output = start_training(resumed, max_steps=len(epochs) - stop, ranks=ranks, cpu=not gpus)
        if not re.search(rf"resum.*\bstep {stop}\b", output):
            raise RunError(f"the second start did not resume at step {stop}. It said:\n{_last_lines(output)}")

        result = compare_runs(whole, resumed)
        where = f"in the middle of epoch {epochs[stop] + 1}" if epochs[stop] == epochs[stop - 1] else "between epochs"
        counts = f"{len(epochs)} without a stop; {stop} and, resumed {where}, {len(epochs) - stop} more"
        terminal.table("result", [("steps", counts), *result.rows])
        if result.differences:
            start_training(again, max_steps=config.steps, ranks=ranks, cpu=not gpus)
            raise RunError(f"{result.differences[0]}. {_cause(compare_runs(whole, again))}")
    terminal.say("A stop changes nothing in this training: resumed, it is the run that never stopped.")
    return result


def _cause(control: Comparison) -> str:
    """Return what commonly causes a difference, knowing how two runs without a stop compare."""
    if control.differences:
        return (
            f"But a second run without a stop differs as well ({control.differences[0]}), so it is not the stop: this "
            "training is not deterministic. Look for GPU kernels that are not, or for random numbers or clocks in your "
            "own model or data that --seed does not fix."
        )
    return (
        "Two runs without a stop are equal, so something does not survive the stop. Look in your own model for state "
        "that is neither a parameter nor a buffer (a counter, a cache), and for random numbers drawn outside torch, "
        "numpy and random."
    )


def stop_step(epochs: list[int]) -> int:
    """Return after which step to stop, given each step's epoch: near the half, within an epoch where one has room."""
    half = len(epochs) / 2
    within = [step for step in range(1, len(epochs)) if epochs[step - 1] == epochs[step]]
    return min(within or range(1, len(epochs)), key=lambda step: abs(step - half))


def compare_runs(whole: Path, resumed: Path) -> Comparison:
    """Compare what two run folders learned: each step's metrics, and the newest checkpoints.

    Raises RunError when one has no checkpoint, or one that cannot be read.
    """
    parts = [_compare_metrics(whole, resumed)]
    first, second = newest_checkpoint(whole), newest_checkpoint(resumed)
    parts.append(_compare_states(first, second))
    parts.append(_compare_shards(first, second))
    return Comparison(
        tuple((title, f"{text}: {difference or 'equal to the bit'}") for title, text, difference in parts),
        tuple(difference for _, _, difference in parts if difference is not None),
    )


def newest_checkpoint(run: Path) -> Path:
    """Return the folder of a run's newest checkpoint. Raises RunError when there is none."""
    found = sorted((run / "checkpoints").glob("step_*"))
    if not found:
        raise RunError(f"the run {run} saved no checkpoint.")
    return found[-1]


def _compare_metrics(whole: Path, resumed: Path) -> tuple[str, str, str | None]:
    ours, theirs = _train_lines(whole), _train_lines(resumed)
    text = f"loss, learning rate, gradient norm of {len(ours)} steps"
    steps, other_steps = ([line["step"] for line in lines] for lines in (ours, theirs))
    if steps != other_steps:
        return "metrics", text, f"recorded are steps {steps} in the one run, {other_steps} in the other"
    for one, other in zip(ours, theirs, strict=True):
        for name in LEARNED:
            if repr(one[name]) != repr(other[name]):  # equal to the bit: NaN is NaN, and 0.0 is not -0.0
                return "metrics", text, f"{name} of step {one['step']} is {one[name]!r} and {other[name]!r}"
    return "metrics", text, None


def _train_lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def _compare_states(first: Path, second: Path) -> tuple[str, str, str | None]:
    text = "position in the data, counters, schedule"
    if first.name != second.name:
        return "state", text, f"the newest checkpoint is {first.name} in the one run, {second.name} in the other"
    one, other = (json.loads((path / "state.json").read_bytes()) for path in (first, second))
    for key in sorted(one.keys() | other.keys()):
        if key not in HASHES and repr(one.get(key)) != repr(other.get(key)):
            values = (textwrap.shorten(repr(state.get(key)), 60, placeholder=" …") for state in (one, other))
            return "state", text, f"{key} in state.json is {' and '.join(values)}"
    return "state", text, None


def _compare_shards(first: Path, second: Path) -> tuple[str, str, str | None]:
    """Compare each tensor of two checkpoints; name the first that differs, and by how much it does at most."""
    names, other_names = ([path.name for path in sorted(folder.glob("*.safetensors"))] for folder in (first, second))
    tensors = values = 0
    differing: list[str] = []
    for name in names if names == other_names else ():
        try:
            # Tensor by tensor, since a rank's share may be as large as its memory.
            with safe_open(first / name, "np") as one, safe_open(second / name, "np") as other:
                keys = sorted(one.keys())
                if keys != sorted(other.keys()):
                    alone = sorted(set(keys) ^ set(other.keys()))
                    differing.append(f"{alone[0]} is in {name} of one checkpoint only")
                    continue
                for key in keys:
                    mine, others = one.get_tensor(key), other.get_tensor(key)
                    tensors, values = tensors + 1, values + mine.size
                    if (mine.dtype, mine.shape) != (others.dtype, others.shape):
                        differing.append(f"{key} is {mine.dtype}{mine.shape} and {others.dtype}{others.shape}")
                    elif (odd := _bits(mine) != _bits(others)).any():
                        with np.errstate(invalid="ignore"):  # NaN and infinity may be among them
                            apart = np.abs(mine[odd].astype(np.float64) - others[odd].astype(np.float64)).max()
                        differing.append(f"{key} differs in {odd.sum()} of {odd.size} values, by up to {apart:.3g}")
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot read {name} of {first} and of {second}: {error}.") from error
    text = f"{tensors} tensors of {values:,} values in {len(names)} shard{'s' if len(names) != 1 else ''}"
    if names != other_names:
        return (
            "tensors",
            text,
            f"the shards are {', '.join(names)} in the one run, {', '.join(other_names)} in the other",
        )
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return "tensors", text, differing[0] + more if differing else None


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.view(f"u{values.itemsize}")


def _settings(source: Path) -> dict[str, Any]:
    """Return what to train, as keys and values of a recipe. Raises RunError or ConfigError."""
    path = source / "config.json" if source.is_dir() else source
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if source.is_dir() else tomllib.loads(text)
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror}. --source is a run folder, or a TOML recipe as of `dsimg train "
            "--config`."
        ) from error
    except ValueError as error:  # what both formats' errors are
        raise ConfigError(f"{path} is not {'JSON' if source.is_dir() else 'TOML'}: {error}.") from error
    stage = content.get("stage", "train")
    if stage != "train":
        raise RunError(f"{source} is a run of the stage {stage}. --source takes one that `dsimg train` made.")
    kept = {key: value for key, value in content.items() if key not in LEFT_OUT and value is not None}
    if kept.get("cache", "auto") == "auto":
        kept["cache"] = "none"  # a few steps do not pay for decoding all images
    return kept


def start_training(out: Path, *, max_steps: int, ranks: int, cpu: bool) -> str:
    """Train the recipe beside `out` for at most `max_steps` steps, and return what was printed.

    Raises RunError with the last lines of that when the training fails.
    """
    words = ["--config", str(out.parent / "recipe.toml"), "--out", str(out), "--log_steps", "1"]
    words += ["--max_steps", str(max_steps)]
    if ranks == 1:
        command = [sys.executable, "-m", "dsimg", "train", *words]
    else:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--num_gpus", str(ranks)]
        command = [*launcher, "--master_port", str(free_port()), "--module", "dsimg.train", *words]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    if cpu:
        environment["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed's launcher finds no device
    begun = time.perf_counter()
    try:
        answer = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RunError(
            f"cannot start {command[0]}: {error.strerror}. pip install 'dsimg[train]' puts it there."
        ) from error
    if answer.returncode not in (0, STOPPED):
        raise RunError(
            f"the training ended with exit code {answer.returncode} (paths are taken from {Path.cwd()}). Its last "
            f"lines:\n{_last_lines(answer.stdout)}"
        )
    seconds = time.perf_counter() - begun
    cli.context().terminal.say(f"{out.name}: at most {max_steps} steps, in {seconds:.0f} s")
    return answer.stdout


def _last_lines(output: str) -> str:
    return "\n".join(f"  {line}" for line in output.splitlines()[-15:])


def _count_gpus() -> int:
    """Return how many GPUs there are for the ranks, without torch."""
    try:
        answer = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    count = sum(line.startswith("GPU") for line in answer.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if chosen is None else min(count, len([name for name in chosen.split(",") if name.strip()]))


if __name__ == "__main__":
    cli.run(doctor)
