"""Peak memory of calibrating a network for int8 by minmax, percentile and MSE, beyond what the network itself takes.

    python benchmarks/calibration_memory.py --source RUN --data DIR [--images 1000]

RUN is an exported run, DIR holds class folders; their images are taken again from the start where there are fewer. What
the network itself takes is the memory of a process that has opened a session of it and run one image.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from dsimg.folder import find_labelled
from dsimg.preprocess import Preprocess
from dsimg.run import Run
from dsimg_export.int8 import default_ops
from dsimg_export.samples import subset
from dsimg_export.served import logits_of
from dsimg_export.session import open_session
from dsimg_export.trials import Candidates, read_images


def peak_mib() -> float:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the memory before, and after each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    run = Run.open(args.source)
    path = run.file("model")
    preprocess = Preprocess.from_dict(run.model["preprocess"])
    split, _ = find_labelled(args.data, run.model["classes"])
    split = subset(split, np.resize(np.arange(len(split.files)), args.images))
    images = read_images(subset(split, [0]), preprocess)
    session = open_session(path, threads=args.threads)
    logits_of(session, images.pixels, preprocess)
    model = peak_mib()
    print(f"the network's own  {model:8.0f} MiB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        candidates = Candidates(
            path,
            Path(folder),
            calibration=split,
            preprocess=preprocess,
            ops=default_ops(path),
            threads=args.threads,
            reduce_range=False,
        )
        print(f"{'prepared':<18} {peak_mib():8.0f} MiB", flush=True)
        for method in ("minmax", "percentile", "mse"):
            start = time.perf_counter()
            candidates.ranges(method)
            used = peak_mib()
            print(
                f"{method:<18} {used:8.0f} MiB, {used - model:.0f} beyond the network, {args.images} images in "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            candidates.write(method, Path(folder) / "int8.onnx")
        print(f"{'written':<18} {peak_mib():8.0f} MiB, {peak_mib() - model:.0f} beyond the network")


if __name__ == "__main__":
    main()
