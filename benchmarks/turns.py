"""What a session loses by running among others, and how many uncounted calls give it back.

    python benchmarks/turns.py --source RUN [RUN ...] [--copies 6]

Every exported run is opened once, then in several copies, all in turn; before each call that counts there are 0, 1, 2
or 4 that do not (always 0 before a call that takes 0.1 s, and of one session alone). Where the figures of many copies
come near those of few, the caches are the session's own again.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from dsimg.run import Run
from dsimg_export import session
from dsimg_export.served import open_served


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, nargs="+", required=True)
    parser.add_argument("--copies", type=int, default=6, help="of each file")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measurement for each session")
    options = parser.parse_args()
    names = [path.resolve().name for path in options.source]
    if len(set(names)) != len(names):
        parser.error(f"--source names folders that are called alike: {' '.join(names)}; rename or leave out one")
    served = {name: open_served(Run.open(path)) for name, path in zip(names, options.source, strict=True)}
    print("| sessions | uncounted calls | " + " | ".join(f"{name}, ms" for name in served) + " |")
    print("|---" * (2 + len(served)) + "|")
    for copies, uncounted in itertools.product(sorted({1, options.copies}), (0, 1, 2, 4)):
        if uncounted and copies * len(served) == 1:
            continue  # nothing else runs
        steps = {}
        for (name, one), number in itertools.product(served.items(), range(copies)):
            opened = session.open_session(one.path)
            noise = session.noise_for(opened, 1, one.preprocess.input_size)
            steps[f"{name} {number}"] = session.repeatable(opened, noise, "cpu")
        session.UNCOUNTED = uncounted
        found = session.in_turn(steps, seconds=options.seconds)
        cells = [
            f"{np.mean([1000 * np.median(found[f'{name} {number}'].cpu) for number in range(copies)]):.3f}"
            for name in served
        ]
        print(f"| {len(steps)} | {uncounted} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
