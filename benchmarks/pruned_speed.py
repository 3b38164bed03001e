"""Measure how much faster ONNX Runtime runs networks that were pruned to half the MACs, and to half the latency.

    python benchmarks/pruned_speed.py [--only NAME ...] [--rounds 9]

One thread, batch 1, 224 px. Dense and pruned, fp32 and int8: all four sessions in turn, in processor time of the
calling thread, so that what else the machine does meets them alike; a ratio is the median of the rounds', with their
range. Then the functions of `dsimg prune --target_latency 0.5` look for half the latency in fp32, and what they found
is exported and measured again from the start. Weights are random: they say which channels go, and not how fast a width
is; `--seeds` draws several.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Sequence

import onnxruntime
import torch
from prune_families import lively, noise
from torch import Tensor, nn

from dsimg.cutting import Choice, Counted, Serving, Sessions, Yardstick, choose, reestimate_batchnorm
from dsimg.graph import Found, find_units
from dsimg.models import build_model
from dsimg.pruned import cut

WANTED = {"resnet18": (1.6, 1.4), "mobilenet_v2": (1.7, 1.4)}  # fp32, int8
SIZE = (3, 224, 224)
GOAL, NEAR = 0.5, 0.05
MAX_RATIO = 0.8  # as `dsimg prune` has it
CALIBRATION_IMAGES = 16
SECONDS = 1.0  # of each session in each round


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WANTED), choices=list(WANTED))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round_to", type=int, default=16)
    parser.add_argument("--importance", default="group_norm", choices=("group_norm", "random"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--no_latency", action="store_true", help="leave the search for half the latency out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}, one thread, {os.cpu_count()} cores")
    for name in options.only:
        for seed in options.seeds:
            print(f"\n{name}, weights of seed {seed}", flush=True)
            measure(name, options, seed=seed)


def measure(name: str, options: argparse.Namespace, *, seed: int) -> None:
    """Print the tables of one network."""
    torch.manual_seed(seed)
    source = lively(build_model(name, num_classes=1000)).eval()
    reestimate_batchnorm(source, [noise(CALIBRATION_IMAGES, SIZE)])
    images = noise(CALIBRATION_IMAGES, SIZE)
    found = find_units(source, input_size=SIZE[1])
    by_macs, _ = _pruned(source, found, Counted(source, what="macs", side=SIZE[1]), options, seed=seed)
    rounds = ratios(source, by_macs, images, rounds=options.rounds)
    print("| half the MACs | dense, ms | pruned, ms | times as fast | range | wanted |\n|---|---|---|---|---|---|")
    for precision, wanted in zip(("fp32", "int8"), WANTED[name], strict=True):
        dense, narrow = ([times[f"{which} {precision}"] for times in rounds] for which in ("source", "pruned"))
        faster = [one / other for one, other in zip(dense, narrow, strict=True)]
        verdict = "" if statistics.median(faster) >= wanted else ": **missed**"
        print(
            f"| {precision} | {1000 * statistics.median(dense):.2f} | {1000 * statistics.median(narrow):.2f} | "
            f"{statistics.median(faster):.2f} | {min(faster):.2f} to {max(faster):.2f} | {wanted}{verdict} |"
        )
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    if options.no_latency:
        return
    start = time.perf_counter()
    by_latency, choice = _pruned(source, found, _sessions(source, images), options, seed=seed)
    seconds = time.perf_counter() - start
    shares = [
        times["pruned fp32"] / times["source fp32"]
        for times in ratios(source, by_latency, images, rounds=options.rounds, int8=(False,))
    ]
    middle = statistics.median(shares)
    print(
        f"half the latency, fp32: the search of {seconds:.0f} s ended at {choice.share:.3f}; measured again: "
        f"{middle:.3f} ({min(shares):.3f} to {max(shares):.3f}), wanted {GOAL} ± {NEAR}"
        f"{'' if abs(middle - GOAL) <= NEAR else ': **missed**'}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def ratios(
    source: nn.Module, pruned: nn.Module, images: Tensor, *, rounds: int, int8: Sequence[bool] = (False, True)
) -> list[dict[str, float]]:
    """Return the seconds of the sessions of "source" and "pruned", exported anew, in each of several rounds."""
    sessions = _sessions(source, images)
    sessions.add("pruned", pruned)
    return [sessions.seconds(("source", "pruned"), int8=int8, duration=SECONDS) for _ in range(rounds)]


def _sessions(source: nn.Module, images: Tensor) -> Sessions:
    serving = Serving(batch=1, threads=1, int8=False)
    return Sessions(source, serving=serving, input_size=SIZE, calibration=images, say=print)


def _pruned(
    source: nn.Module, found: Found, yardstick: Yardstick, options: argparse.Namespace, *, seed: int
) -> tuple[nn.Module, Choice]:
    choice = choose(
        source,
        found,
        yardstick=yardstick,
        goal=GOAL,
        importance=options.importance,
        round_to=options.round_to,
        max_ratio=MAX_RATIO,
        gradients=None,
        seed=seed,
    )
    model = copy.deepcopy(source)
    cut(model, choice.units, choice.kept)
    print(f"{choice.share:.3f} left{'' if choice.shortfall is None else ': ' + choice.shortfall}")
    return model, choice


if __name__ == "__main__":
    main()
