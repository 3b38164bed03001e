"""int8 of exported runs by dsimg, by onnxruntime's quantize_static at its defaults, and by NNCF, on the same images.

    python benchmarks/quantize.py --out DIR --source RUN [RUN ...] [--data DIR] [--calibration_images 512]

Each network is quantized by `dsimg quantize`, which records its calibration images; the others get those. All files are
then measured in one run: accuracy on the validation images, latency of one image on one thread, in turn. NNCF's ONNX
backend is measured where it can be imported (pip install nncf). At its defaults onnxruntime asks for a pre-processed
file, and gets one. The others' files run in sessions with ONNX Runtime's own defaults: NNCF's are made for these, and
are four times as slow in dsimg's, which leave out an optimiser that it counts on.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from dsimg.metrics import mcnemar
from dsimg.preprocess import Preprocess, normalise, read_pixels
from dsimg.run import Run
from dsimg_export.kernels import int8_macs, products
from dsimg_export.measuring import Answer, evaluate_sessions
from dsimg_export.quantize import QuantizeConfig, quantize
from dsimg_export.samples import find_samples
from dsimg_export.served import logits_of
from dsimg_export.session import INPUT, in_turn, noise_for, open_session, repeatable


class Images(CalibrationDataReader):  # type: ignore[misc]
    """The calibration images one at a time, as onnxruntime's calibration asks for them."""

    def __init__(self, images: Iterator[NDArray[Any]]) -> None:
        self.images = images

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the next image (1, 3, H, W), or None after the last."""
        image = next(self.images, None)
        return None if image is None else {INPUT: image}


def open_plainly(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Return a session with ONNX Runtime's defaults but for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers_of(session: onnxruntime.InferenceSession, preprocess: Preprocess) -> Answer:
    """Return what gives the logits of a session for pixels."""
    return lambda pixels: logits_of(session, pixels, preprocess)


def by_onnxruntime(source: Path, target: Path, images: Callable[[], Iterator[NDArray[Any]]]) -> None:
    """Quantize with onnxruntime's defaults."""
    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    quantize_static(prepared, target, Images(images()))


def by_nncf(source: Path, target: Path, images: Callable[[], Iterator[NDArray[Any]]]) -> None:
    """Quantize with NNCF's defaults."""
    nncf: Any = importlib.import_module("nncf")
    data = nncf.Dataset([{INPUT: image} for image in images()])
    onnx.save(nncf.quantize(onnx.load(source), data, subset_size=len(list(images()))), target)


def measure(source: Run, args: argparse.Namespace) -> None:
    """Print a table for one network."""
    out = args.out / source.path.name
    ours = quantize(
        QuantizeConfig(
            source=source.path,
            out=out,
            data=args.data,
            calibration_images=args.calibration_images,
            threads=args.threads,
        )
    )
    preprocess = Preprocess.from_dict(source.model["preprocess"])
    # The images that dsimg calibrates with, or would: dynamic int8 needs none.
    samples = find_samples(source, args.data, calibration_images=args.calibration_images, seed=0)
    calibration = [samples.calibration.folder / file for file in samples.calibration.files]

    def images() -> Iterator[NDArray[Any]]:
        for file in calibration:
            yield normalise(read_pixels([file], preprocess)[0], preprocess)

    path = source.file("model")
    others = {"onnxruntime": by_onnxruntime}
    if importlib.util.find_spec("nncf") is None:
        print("nncf is not there: pip install nncf")
    else:
        others["nncf"] = by_nncf
    files = {"fp32": path, "dsimg": ours.file("model")}
    for name, tool in others.items():
        files[name] = args.out / f"{source.path.name}-{name}.onnx"
        tool(path, files[name], images)
    own = ("fp32", "dsimg")
    sessions = {
        name: open_session(file, threads=args.threads) if name in own else open_plainly(file, args.threads)
        for name, file in files.items()
    }
    found = evaluate_sessions(
        {name: answers_of(session, preprocess) for name, session in sessions.items()},
        split=samples.validation,
        preprocess=preprocess,
        classes=source.model["classes"],
    )
    steps = {
        name: repeatable(session, noise_for(session, 1, preprocess.input_size)) for name, session in sessions.items()
    }
    times = in_turn(steps, seconds=args.seconds)
    right = {name: evaluation.top[:, 0] == evaluation.split.labels for name, evaluation in found.items()}
    print(f"\n{source.path}: {source.model['arch']}, {found['fp32'].report['images']} images")
    print("| | Top-1 | dsimg against it, points (95 %) | ms, p50 | fp32 / it, processor time | MACs in int8 |")
    print("|---|---|---|---|---|---|")
    for name, file in files.items():
        faster = np.median(times["fp32"].cpu) / np.median(times[name].cpu)
        share = f"{int8_macs(products(file, preprocess.input_size)):.1%}" if name in own else ""
        test = mcnemar(right["dsimg"], right[name])
        low, high = (100 * value for value in test["interval"])
        against = "" if name == "dsimg" else f"{100 * test['difference']:+.2f} ({low:+.2f}, {high:+.2f})"
        print(
            f"| {name} | {found[name].report['top1']['value']:.2%} | {against} | "
            f"{1000 * np.median(times[name].wall):.3g} | {faster:.2f} | {share} |",
            flush=True,
        )


def main() -> None:
    """Measure each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data")
    parser.add_argument("--calibration_images", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.source:
        measure(Run.open(path), args)


if __name__ == "__main__":
    main()
