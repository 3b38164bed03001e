"""A search whose commands are played: they write the runs, evaluations and measurements that they are told to."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsimg.errors import StopRequested
from dsimg.folder import ImageFolder, Split, write_index
from dsimg.machine import processor_name
from dsimg.metrics import wilson_interval
from dsimg.run import Run, sha256, write_json
from dsimg_export.commands import Command
from tests.export.runs import MODEL

IMAGES = 1000
# Of each network: MACs, and milliseconds in fp32 and int8.
PROBED = {
    ("cifar_resnet56", 1.0): (100, 8.0, 4.0),
    ("cifar_resnet56", 0.5): (50, 5.0, 3.0),
    ("cifar_resnet20", 1.0): (30, 3.5, 1.5),
    ("cifar_resnet20", 0.5): (15, 2.5, 1.4),
}
SOURCE = "cifar_resnet56_fp32"


def write_source(path: Path, *, arch: str = "cifar_resnet56", images: bool = True) -> Run:
    """Write a trained run, with a file in the place of its weights; without `images` it keeps no list of them."""
    run, _ = Run.begin(path, stage="train", config={})
    (path / "weights.safetensors").write_bytes(b"weights")
    if images:
        none = Split(path.parent, (), np.empty(0, np.int64))
        write_index(ImageFolder(path.parent, tuple(MODEL["classes"]), none, none, ()), path / "index.jsonl.gz")
    run.finish(seed=0, model={**MODEL, "arch": arch}, metrics={})
    return Run.open(path)


def report_of(right: int) -> dict[str, Any]:
    """Return what a report says of its images."""
    top1 = {"value": right / IMAGES, "interval": list(wilson_interval(right, IMAGES))}
    return {"images": IMAGES, "top1": top1}


@dataclass
class Played:
    """Plays commands. `right`: images that a file has right, of IMAGES; those that are not named have 900."""

    right: Mapping[str, int] = field(default_factory=dict)
    trained: Mapping[str, int] = field(default_factory=dict)  # the same of networks after their training
    vanishes: str | None = None  # the name of the folder whose command ends well and leaves nothing
    wrong: Mapping[str, str] = field(default_factory=dict)  # why the probe finds no such network, by architecture
    others: str | None = None  # the name of the file that is measured on other images
    fails: Mapping[str, int] = field(default_factory=dict)  # by the name of the folder: exit code
    stops_at: str | None = None  # the name of the folder
    ms: Mapping[str, float] = field(default_factory=dict)  # in the final measurement; the probe's where not named
    ran: list[str] = field(default_factory=list)

    def __call__(self, command: Command) -> int:
        """Do what the command would."""
        flags = list(command.flags)
        out = Path(flags[flags.index("--out") + 1])
        name = out.parents[1].name if command.stage == "evaluate" else out.name
        self.ran.append(f"{command.stage.removeprefix('dsimg.')} {name}")
        if name == self.stops_at:
            raise StopRequested("stopped")
        if name == self.vanishes:
            return 0
        if name in self.fails:
            return self.fails[name]
        sources = flags[flags.index("--source") + 1 :]
        if command.stage == "dsimg.probe":
            self._probe(flags, out)
        elif command.stage == "evaluate":
            self._evaluate(out, self.right.get(name, 900), first=int(name == self.others))
        elif command.stage == "bench":
            self._bench([Path(one) for one in sources[: sources.index("--batch_sizes")]], out)
        else:
            run, _ = Run.begin(out, stage=command.stage, config={}, parents=[Run.open(Path(sources[0]))])
            right = self.trained.get(name)
            metrics = {} if right is None else {"validation": report_of(right)}
            run.finish(seed=0, model={**MODEL, "arch": name.split("_0.")[0]}, metrics=metrics)
        return 0

    def _probe(self, flags: list[str], out: Path) -> None:
        ratios = [float(one) for one in flags[flags.index("--ratios") + 1 : flags.index("--round_to")]]
        networks: list[dict[str, Any]] = []
        for (model, ratio), (macs, fp32, int8) in PROBED.items():
            if ratio in ratios and (model == "cifar_resnet56" or model in flags):
                entry: dict[str, Any] = {"model": model, "ratio": ratio, "error": self.wrong.get(model), "seconds": {}}
                if entry["error"] is None:
                    seconds = {"fp32": fp32 / 1000, "int8": int8 / 1000}
                    entry |= {"macs": macs, "parameters": 7, "seconds": seconds}
                networks.append(entry)
        write_json(out, {"networks": networks})

    def _evaluate(self, out: Path, right: int, *, first: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "evaluation.json", report_of(right))
        with (out / "predictions.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["file", "predicted", "correct"])
            writer.writerows([f"{first + number}.png", "ant", int(number < right)] for number in range(IMAGES))

    def _bench(self, runs: list[Path], out: Path) -> None:
        out.mkdir(exist_ok=True)
        times = {}
        for run in runs:
            network, _, precision = run.name.rpartition("_")
            arch, _, ratio = network.partition("_0.")
            probed = PROBED[arch, float(f"0.{ratio}") if ratio else 1.0]
            times[run.name] = self.ms.get(run.name, probed[1] if precision == "fp32" else probed[2])
        first = times[runs[0].name]
        rows = [
            {
                "run": name,
                "threads": 1,
                "batch_size": 1,
                "p50_ms": ms,
                "p99_ms": 2 * ms,
                "waited": 1.25,
                "speedup": first / ms,
                "interval": [0.9 * first / ms, 1.1 * first / ms],
            }
            for name, ms in times.items()
        ]
        described = [{"run": run.name, "sha256": sha256(run / "run.json"), "bytes": 2048} for run in runs]
        content = {
            "created": "2026-01-02T03:04:05+00:00",
            "machine": {"processor": processor_name()},
            "onnxruntime": "1.2",
            "provider": "cpu",
            "runs": described,
            "measurements": rows,
        }
        write_json(out / "bench.json", content)


def read_report(out: Path) -> dict[str, Any]:
    """Return report.json."""
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content
