"""Prune one or more of every family of torchvision's classifiers to half the MACs, and check what comes out of it.

    python benchmarks/prune_families.py [--only NAME ...] [--results FILE] [--anew]

Each network is found, chosen, cut, saved, rebuilt and exported by the functions of `dsimg prune`, in a process of its
own with a time limit, so that a crash or a hang is a line of the table. The weights are random, but as a trained
network's: no layer says zero, and BatchNorm's statistics are those of the images. Done networks are in FILE, one JSON
line each, and are not done again. `--round_to` is halved from 16 until the target is reached; the table says where.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsimg.console import count_text
from dsimg.cutting import TOLERANCE, Counted, choose, reestimate_batchnorm
from dsimg.errors import DsimgError
from dsimg.graph import Found, find_units
from dsimg.models import build_model, count_macs, default_preprocess
from dsimg.pruned import cut, read_record, rebuild
from dsimg.to_onnx import parity, to_onnx
from dsimg.weights import read_weights, restore_weights, save_weights

# The cheapest first.
NETWORKS = (
    *("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x1_0", "mobilenet_v2", "mobilenet_v3_large"),
    *("mnasnet1_0", "alexnet", "regnet_y_400mf", "regnet_x_400mf", "resnet18", "efficientnet_b0", "googlenet"),
    *("shufflenet_v2_x0_5", "resnet50", "resnext50_32x4d", "densenet121", "vit_b_32", "inception_v3", "swin_t"),
    *("convnext_tiny", "vgg11_bn", "regnet_y_3_2gf", "wide_resnet50_2", "efficientnet_v2_s", "swin_v2_t", "vgg16_bn"),
    *("vit_b_16", "maxvit_t"),
)
CLASSES = 1000
GOAL = 0.5
ROUND_TO = (16, 8, 4, 2, 1)
MAX_RATIO = 0.8  # as `dsimg prune` has it
IMAGES = 8  # of parity
WARM_IMAGES = 16  # that BatchNorm is measured on


def main() -> None:
    """Prune what is asked for and not done, then print the table."""
    results = of_each(pruned, row, program=__file__, description=__doc__, limit=1200)
    if results:
        print(table(results))


def of_each(
    measure: Callable[[str], dict[str, Any]],
    row: Callable[[dict[str, Any]], str],
    *,
    program: str,
    description: str | None,
    limit: float,
) -> list[dict[str, Any]]:
    """Return what `measure` says of each network that the command line of `program` asks for, each in a process of its
    own and at most `limit` seconds; in that process, print it and return nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NETWORKS, metavar="NAME", help="torchvision names")
    parser.add_argument("--results", type=Path, default=Path("runs") / f"{Path(program).stem}.jsonl")
    parser.add_argument("--anew", action="store_true", help="do what is done already, too")
    parser.add_argument("--limit", type=float, default=limit, help="seconds a network may take")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in the process of a network
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return []
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = {} if options.anew else _read(options.results)
    for name in options.only:
        if name not in results:
            results[name] = _in_a_process(name, limit=options.limit, program=program)
            with options.results.open("a") as file:
                file.write(json.dumps(results[name]) + "\n")
            print(row(results[name]), flush=True)
    return [results[name] for name in options.only]


def _in_a_process(name: str, *, limit: float, program: str) -> dict[str, Any]:
    """Return what `program --one NAME` says of a network, or how its process ended."""
    command = [sys.executable, "-W", "ignore", program, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "failure": f"no end after {limit:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"name": name, "failure": f"exit code {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


# --- One network --------------------------------------------------------------------------------------------


def pruned(name: str) -> dict[str, Any]:
    """Prune a network to half its MACs and return what the table says of it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = default_preprocess(name, image_size=None).input_size
    model = lively(build_model(name, num_classes=CLASSES, input_size=size[1]))
    reestimate_batchnorm(model, [noise(WARM_IMAGES, size)])
    model.eval()
    start = time.perf_counter()
    try:
        found = find_units(model, input_size=size[1])
    except DsimgError as error:
        return {"name": name, "refusal": str(error)}
    seconds = time.perf_counter() - start
    macs = count_macs(model, size[1])
    start = time.perf_counter()
    round_to, choice = _chosen(model, found, size[1])
    result = {
        "name": name,
        "find_seconds": seconds,
        "choose_seconds": time.perf_counter() - start,
        "units": len(found.units),
        "notes": list(found.notes),
        "round_to": round_to,
        "share": choice.share,
        "shortfall": choice.shortfall,
        "macs": macs,
        "narrowest": min(len(k) / unit.channels for k, unit in zip(choice.kept, found.units, strict=True)),
    }
    if choice.share > 0.999:
        return result
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        cut(model, choice.units, choice.kept).save(Path(folder) / "pruning.json")
        save_weights(model.state_dict(), Path(folder) / "weights.safetensors")
        twin = build_model(name, num_classes=CLASSES, input_size=size[1]).eval()
        rebuild(twin, read_record(Path(folder) / "pruning.json"))
        restore_weights(twin, read_weights(Path(folder) / "weights.safetensors"), source=folder)
        images = noise(IMAGES, size)
        with torch.no_grad():
            result["equal"] = torch.equal(model(images[:2]), twin(images[:2]))
        assert count_macs(twin, size[1]) == round(choice.share * macs), "the rebuilt network is another one"
        del model
        try:
            to_onnx(twin, Path(folder) / "model.onnx", input_size=size)
        except DsimgError as error:
            return {**result, "export_refusal": str(error)}
        result["parity"] = vars(parity(twin, Path(folder) / "model.onnx", images))
    return result


def _chosen(model: nn.Module, found: Found, side: int) -> tuple[int, Any]:
    """Return the largest --round_to that reaches the goal, or that comes nearest, and the choice."""
    yardstick = Counted(model, what="macs", side=side)
    best = None
    for round_to in ROUND_TO:
        choice = choose(
            model,
            found,
            yardstick=yardstick,
            goal=GOAL,
            importance="group_norm",
            round_to=round_to,
            max_ratio=MAX_RATIO,
            gradients=None,
            seed=0,
        )
        if best is None or abs(choice.share - GOAL) < abs(best[1].share - GOAL):
            best = round_to, choice
        if choice.shortfall is None:
            break
    assert best is not None
    return best


def noise(count: int, size: tuple[int, int, int]) -> Tensor:
    """Return (count, *size) noise, of each image with a colour and a contrast of its own, so that logits differ."""
    colour, contrast = torch.randn(count, 3, 1, 1), torch.rand(count, 1, 1, 1) + 0.5
    return colour + contrast * torch.randn(count, *size)


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Make all that begins at zero, at one or next to nothing (heads, biases, scales) count, as training does."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() == 1:
            parameter.normal_(std=0.1)
        elif "layer_scale" in name:
            parameter.uniform_(0.1, 0.5)
        elif not parameter.any():
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


# --- The table ----------------------------------------------------------------------------------------------

HEADER = "| network | MACs | left | round_to | narrowest | units | plan, s | rebuilt | parity, relative | same Top-1 |"


def row(result: dict[str, Any]) -> str:
    """Return a network's line of the table in Markdown."""
    name = result["name"]
    if "share" not in result:
        said = f"refused: {result['refusal']}" if "refusal" in result else f"**FAILED**: {result['failure']}"
        return f"| {name} | {said} |"
    left = f"{result['share']:.3f}"
    if abs(result["share"] - GOAL) > GOAL * TOLERANCE:
        left += f": {result['shortfall']}"
    cells = [
        name,
        f"{count_text(result['macs'])} -> {count_text(result['macs'] * result['share'])}",
        left,
        str(result["round_to"]),
        f"{result['narrowest']:.2f}",
        str(result["units"]),
        f"{result['find_seconds']:.1f} + {result['choose_seconds']:.1f}",
    ]
    if "equal" in result:
        cells.append("to the bit" if result["equal"] else "**DIFFERS**")
    if "parity" in result:
        one = result["parity"]
        vacuous = " **vacuous**" if one["vacuous"] else ""
        cells += [f"{one['relative_error']:.1e}{vacuous}", f"{one['same_top1']:.0%}"]
    elif "export_refusal" in result:
        cells.append(result["export_refusal"])
    return f"| {' | '.join(cells)} |"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown, and what it adds up to."""
    lines = [f"\ntorch {torch.__version__}, one thread; target: {GOAL} of the MACs within {TOLERANCE:.0%}\n", HEADER]
    lines += ["|---" * HEADER.count("| ") + "|", *map(row, results)]
    shares = [result["share"] for result in results if "share" in result]
    reached = sum(abs(share - GOAL) <= GOAL * TOLERANCE for share in shares)
    failed = [result["name"] for result in results if "failure" in result or result.get("equal") is False]
    errors = [result["parity"]["relative_error"] for result in results if "parity" in result]
    worst = f", the worst parity {np.max(errors):.1e}" if errors else ""
    lines.append(
        f"\n{len(results)} networks: {reached} reached the target, {len(shares) - reached} came as near as said, "
        f"{sum('refusal' in result for result in results)} refused, {len(failed)} failed{worst}."
    )
    return "\n".join(lines)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


if __name__ == "__main__":
    main()
