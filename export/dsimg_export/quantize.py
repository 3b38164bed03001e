"""Write an exported network in int8, with proof of what that costs and wins on this machine.

dsimg quantize --source RUN --out RUN2
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsimg import cli
from dsimg.console import bytes_text
from dsimg.errors import ConfigError
from dsimg.evaluation import Evaluation, write_evaluation
from dsimg.machine import all_cores, int8_is_exact
from dsimg.metrics import accuracy_text
from dsimg.preprocess import Preprocess
from dsimg.run import ROLES, Run, write_json
from dsimg_export.choosing import Choice, Chooser, role_of_this_machine
from dsimg_export.comparison import Comparison
from dsimg_export.golden import made_on, read_golden, record
from dsimg_export.int8 import check_is_fp32, default_ops, is_transformer
from dsimg_export.kernels import products, seconds_by_operator
from dsimg_export.measuring import measured_on
from dsimg_export.samples import Samples, find_samples
from dsimg_export.session import latency
from dsimg_export.stage import copy_described, run_short
from dsimg_export.trials import Candidates, Way

FLIP_ROWS = 10  # classes in the terminal
INT8_ROLES = ("model", "reduced")


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """The flags of `dsimg quantize`."""

    source: Path
    """The exported run to quantize, in fp32."""
    out: Path
    """The run folder to write."""
    data: str | None = None
    """The images to calibrate and measure with. Default: those that the run was trained and measured on."""
    calibration_images: int = 512
    """How many training images set the ranges, drawn by class. At most half of them do."""
    method: Literal["auto", "minmax", "percentile", "mse"] = "auto"
    """How ranges of activations are found; auto tries all three, and for a transformer ranges measured in each run, and
    takes the best on training images that did not calibrate."""
    max_drop: float = 0.005
    """The accuracy that int8 may lose, 0.005 being half a point. Where it loses more, the layers that hurt most are put
    back to float."""
    seed: int = 0
    """Draws the images."""
    threads: int | None = None
    """Threads of ONNX Runtime while calibrating and measuring accuracy; latency has one. Default: one a core."""
    overwrite: bool = False
    """Replace the run in --out."""

    def __post_init__(self) -> None:
        if self.calibration_images < 1:
            raise ConfigError(f"--calibration_images is {self.calibration_images}; it must be at least 1.")
        if not 0 <= self.max_drop < 1:
            raise ConfigError(
                f"--max_drop is {self.max_drop}; it must be at least 0 and below 1, 0.005 is half a point."
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is known before the run folder is claimed."""

    source: Run
    path: Path  # the fp32 file
    samples: Samples
    ops: tuple[str, ...]
    ways: tuple[Way, ...]
    encoded: tuple[bytes, ...]  # golden images


def quantize(config: QuantizeConfig) -> Run:
    """Write an exported run in int8, twice: with weights of 8 bits, and of 7 for x86 processors without VNNI."""
    source = Run.open(config.source)
    return run_short(
        config,
        stage="quantize",
        parents=[source],
        reads=[] if config.data is None else [Path(config.data)],
        prepare=lambda: _plan(config, source),
        body=lambda out, plan: _quantize(config, plan, out),
    )


def _plan(config: QuantizeConfig, source: Run) -> _Plan:
    """Open what the source has, and raise what it lacks."""
    path = source.file("model")
    check_is_fp32(path)
    return _Plan(
        source=source,
        path=path,
        samples=find_samples(source, config.data, calibration_images=config.calibration_images, seed=config.seed),
        ops=default_ops(path),
        ways=_ways(config, path),
        encoded=read_golden(source.file("golden")).encoded,
    )


def _quantize(config: QuantizeConfig, plan: _Plan, out: Run) -> None:
    terminal = cli.context().terminal
    path, samples, block = plan.path, plan.samples, plan.source.model
    preprocess = Preprocess.from_dict(block["preprocess"])
    threads = config.threads or all_cores()
    terminal.table(
        "plan",
        [
            ("source", f"{plan.source.path}: {block['arch']}, {bytes_text(path.stat().st_size)}"),
            ("calibration", f"{len(samples.calibration.files):,} images of {samples.calibration.folder}"),
            ("choosing", _choosing_text(samples)),
            ("reported on", f"{len(samples.validation.files):,} images of {samples.validation.folder}"),
            *(("", note) for note in samples.notes),
            ("methods", ", ".join(plan.ways)),
            ("operators", ", ".join(plan.ops)),
            ("allowed drop", f"{100 * config.max_drop:g} points"),
            ("this machine", "sums 8-bit products exactly" if int8_is_exact() else "needs weights of 7 bits (no VNNI)"),
        ],
    )
    copy_described(plan.source, out, block["classes"])
    written = {role: out.path / ROLES[role][0] for role in INT8_ROLES}
    # Beside the result: where there is room for that, there is for what is tried. A killed run's is removed.
    with tempfile.TemporaryDirectory(dir=out.path, prefix=".trials-", suffix=".tmp") as folder:
        candidates = Candidates(
            path,
            Path(folder),
            calibration=samples.calibration,
            preprocess=preprocess,
            ops=plan.ops,
            threads=threads,
            reduce_range=role_of_this_machine() == "reduced",
        )
        chooser = Chooser(
            candidates,
            samples,
            preprocess=preprocess,
            classes=block["classes"],
            max_drop=config.max_drop,
            threads=threads,
        )
        choice = chooser.choose(plan.ways)
        measured, choice = chooser.write(choice, written)
    dynamic = choice.way == "dynamic"
    used = () if dynamic else tuple(file for file in samples.calibration.files if file not in candidates.unreadable)
    write_json(out.path / "calibration.json", _calibration(samples, used, candidates, choice))
    role = role_of_this_machine()
    files = {"fp32": path, "int8": written[role]}
    comparison = Comparison(
        fp32=measured["fp32"],
        int8=measured[role],
        latency=latency(files, input_size=preprocess.input_size),
        seconds={name: seconds_by_operator(file, preprocess.input_size) for name, file in files.items()},
        products=products(files["int8"], preprocess.input_size),
        classes=block["classes"],
        max_drop=config.max_drop,
    )
    # What a saturating processor makes of the 8-bit file is not what others are to compare with.
    right = {name: file for name, file in written.items() if name in measured}
    golden = record(plan.encoded, right, preprocess=preprocess, classes=block["classes"])
    golden.save(out.path / "golden.safetensors")
    reported = measured_on(measured[role], file=written[role], role=role, provider="cpu")
    write_evaluation(out.path, reported, block["classes"])
    sizes = {"fp32": path.stat().st_size, **{role: file.stat().st_size for role, file in written.items()}}
    metrics = {
        "method": choice.way,
        "tried": choice.trials,
        "in_float": {role: list(names) for role, names in choice.in_float.items()},
        "chosen_on": choice.chosen_on,
        "flattered": list(choice.flattered),
        "max_drop": config.max_drop,
        "calibration_images": len(used),
        "role": role,
        "bytes": sizes,
        "machine": made_on(),
        **comparison.as_dict(),
        "reduced": {"top1": measured["reduced"].report["top1"]},
    }
    out.finish(seed=config.seed, model=block, metrics=metrics)
    terminal.table(
        "result",
        [
            ("method", choice.way),
            ("", _tried_text(choice)),
            *([("", "ranges are those of a whole batch: dsimg runs the file image by image")] if dynamic else []),
            ("layers in float", _layers_text(choice, role, len(candidates.layers))),
            *comparison.rows(),
            *_twin_rows(choice, role, measured, len(candidates.layers)),
            ("size", f"{bytes_text(sizes['fp32'])} -> {bytes_text(sizes['model'])}"),
            ("run", str(out.path)),
        ],
    )
    changed = sorted((row for row in comparison.flips() if row["changed"]), key=lambda row: -row["changed"])
    if changed:
        rows = [[str(row[key]) for key in ("class", "images", "changed", "won", "lost")] for row in changed[:FLIP_ROWS]]
        terminal.grid(("class", "images", "other Top-1", "won", "lost"), rows)
    for file, reason in list(candidates.unreadable.items())[:3]:
        terminal.warn(f"a calibration image was left out: {file}: {reason}")


def _ways(config: QuantizeConfig, path: Path) -> tuple[Way, ...]:
    if config.method != "auto":
        return (config.method,)
    return ("minmax", "percentile", "mse", *(("dynamic",) if is_transformer(path) else ()))


def _calibration(samples: Samples, used: tuple[str, ...], candidates: Candidates, choice: Choice) -> dict[str, Any]:
    """Return what the ranges are from; used: the calibration images, none where ranges are measured in each run."""
    return {
        "method": choice.way,
        "folder": str(samples.calibration.folder),
        "files": list(used),
        "unreadable": candidates.unreadable,
        "choosing_files": list(samples.choosing.files),
        "ranges": {name: list(ends) for name, ends in candidates.ranges(choice.way).items()},
        "sensitivity": [
            {"layer": name, "relative_error": error if math.isfinite(error) else None}
            for name, error in choice.sensitivity
        ],
    }


def _choosing_text(samples: Samples) -> str:
    if len(samples.choosing.files):
        return f"{len(samples.choosing.files):,} other images of {samples.choosing.folder}"
    return "the images that are reported on: there are no others"


def _tried_text(choice: Choice) -> str:
    tried = ", ".join(f"{name} {entry['correct'] / entry['images']:.2%}" for name, entry in choice.trials.items())
    return f"on {choice.chosen_on}: {tried}"


def _layers_text(choice: Choice, role: str, count: int) -> str:
    names = choice.in_float[role]
    found = f"{len(names)} of {count}: {', '.join(names)}" if names else f"none of {count}"
    if role in choice.missed:
        return f"{found}; putting back up to half of them did not bring the drop down to --max_drop"
    if role in choice.flattered:
        return f"{found}; how many was decided on the reported images, which flatters their accuracy a little"
    return found


def _twin_rows(choice: Choice, role: str, measured: Mapping[str, Evaluation], count: int) -> list[tuple[str, str]]:
    """Return the lines on the file for other processors than this one."""
    if role == "reduced":
        return [("8-bit weights", "model.onnx, for processors with VNNI, was not measured: sums would saturate here")]
    return [
        ("7-bit weights", f"{accuracy_text(measured['reduced'].report['top1'])}, for x86 without VNNI"),
        ("", f"layers in float: {_layers_text(choice, 'reduced', count)}"),
    ]


if __name__ == "__main__":
    cli.run(quantize)
