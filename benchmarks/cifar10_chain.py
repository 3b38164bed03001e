"""CIFAR-10 from a ResNet-56 to small networks: distilled, and pruned; every step a command that anyone can type.

    python benchmarks/cifar10_chain.py --data DIR [--out runs/cifar10] [--ranks 2] [STEP ...]

DIR holds train/ and test/ of class folders. The steps, in order: teacher, alone (students without a teacher), dist, kd,
dkd, prune, table. A step that is done is not done again, and one that was stopped goes on. All students have one
recipe, and so has what pruning leaves. Expect many hours on a CPU: `--epochs_teacher`, `--epochs`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = ("teacher", "alone", "dist", "kd", "dkd", "prune", "table")
RECIPE = "--lr 0.4 --weight_decay 5e-4 --schedule one_cycle --augment light --eval_epochs 5"
SPEED_UPS = (2.13, 2.57)  # DepGraph's, arXiv 2301.12900, table 1


def main() -> None:
    """Run the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=[], metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--deepspeed_config", default="ds_configs/zero1.json", help="of every step, its precision too")
    parser.add_argument("--epochs_teacher", type=int, default=20, help="of each of its two cycles")
    parser.add_argument("--epochs", type=int, default=15, help="of students")
    parser.add_argument("--epochs_pruned", type=int, default=20, help="of training after pruning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--temperature", type=float, default=4.0, help="of dist; kd and dkd have their own")
    parser.add_argument("--port", default="29541")
    options = parser.parse_args()
    unknown = set(options.steps) - set(STEPS)
    if unknown:
        parser.error(f"unknown step {unknown.pop()}; there are {', '.join(STEPS)}")
    for step in options.steps or STEPS:
        if step == "table":
            show(options.out, options.seeds)
            continue
        for words in commands(step, options):
            run(words, options)


def commands(step: str, options: argparse.Namespace) -> list[str]:
    """Return the command lines of a step, without the launcher."""
    out, teacher = shlex.quote(str(options.out)), f"{shlex.quote(str(options.out))}/teacher"
    data = f"--data {shlex.quote(str(options.data))} --deepspeed_config {shlex.quote(options.deepspeed_config)}"
    if step == "teacher":
        cycle = f"train {data} --model cifar_resnet56 --epochs {options.epochs_teacher} {RECIPE}"
        return [f"{cycle} --out {teacher}_cycle_1", f"{cycle} --weights {teacher}_cycle_1 --out {teacher}"]
    student = f"{data} --model cifar_resnet20 --epochs {options.epochs} {RECIPE}"
    if step == "alone":
        return [f"train {student} --seed {seed} --out {out}/alone_{seed}" for seed in options.seeds]
    if step == "prune":  # by the students' own recipe: what is left of the network is trained as a student is
        return [
            f"prune {data} --source {teacher} --target_macs {1 / speed_up:.4f} --round_to 4 --loss dkd "
            f"--epochs {options.epochs_pruned} {RECIPE} --cache_teacher {out}/cache_0 --out {out}/pruned_{speed_up}"
            for speed_up in SPEED_UPS
        ]
    seeds = options.seeds if step == "dist" else options.seeds[:1]
    own = f"--temperature {options.temperature:g}" if step == "dist" else ""
    # The seed fixes the views, so the students of one seed share what the teacher said of them.
    return [
        f"distill {student} --source {teacher} --loss {step} {own} --seed {seed} --baseline {out}/alone_{seed} "
        f"--cache_teacher {out}/cache_{seed} --out {out}/{step}_{seed}"
        for seed in seeds
    ]


def run(words: str, options: argparse.Namespace) -> None:
    """Run `deepspeed dsimg/STAGE.py FLAGS` and end with its exit code when that is not 0."""
    stage, _, flags = words.partition(" ")
    line = f"deepspeed --quiet --num_gpus {options.ranks} --master_port {options.port} dsimg/{stage}.py {flags}"
    print(f"\n$ {line}", flush=True)
    code = subprocess.run(shlex.split(line), check=False).returncode
    if code:
        sys.exit(code)


def show(out: Path, seeds: list[int]) -> None:
    """Print what the finished runs say of themselves, as a table in Markdown."""
    print("\n| run | Top-1 | 95 % interval | against | points | p |\n|---|---|---|---|---|---|")
    names = ["teacher", *(f"{step}_{seed}" for step in ("alone", "dist", "kd", "dkd") for seed in seeds)]
    for name in (*names, *(f"pruned_{speed_up}" for speed_up in SPEED_UPS)):
        path = out / name / "run.json"
        if not path.exists():
            continue
        metrics = json.loads(path.read_text())["metrics"]
        top1 = metrics["validation"]["top1"]
        low, high = top1["interval"]
        against, test = _comparison(metrics)
        compared = f"{100 * test['difference']:+.2f} | {test['p_value']:.2g}" if test else " | "
        print(f"| {name} | {top1['value']:.2%} | {low:.2%} to {high:.2%} | {against} | {compared} |")


def _comparison(metrics: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    if "distillation" in metrics:
        return "alone", metrics["distillation"].get("against_baseline")
    if "pruning" in metrics:
        macs = metrics["pruning"]["macs"]
        return f"teacher, at {macs[0] / macs[1]:.2f}x fewer MACs", metrics["pruning"]["against_source"]
    return "", None


if __name__ == "__main__":
    main()
