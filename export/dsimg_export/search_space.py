"""The networks that `dsimg compress` may try, what each costs to try, and when one can no longer win."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsimg.console import ms_text

Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")

# Of each family the largest first: what comes after a network is a student for it.
FAMILIES = (
    ("cifar_resnet110", "cifar_resnet56", "cifar_resnet44", "cifar_resnet32", "cifar_resnet20"),
    ("wide_resnet101_2", "wide_resnet50_2", "resnet152", "resnet101", "resnet50", "resnet34", "resnet18"),
    ("resnext101_64x4d", "resnext101_32x8d", "resnext50_32x4d", "resnet50", "resnet34", "resnet18"),
    ("mobilenet_v3_large", "mobilenet_v3_small"),
    ("mobilenet_v2", "mobilenet_v3_small"),
    tuple(f"efficientnet_b{size}" for size in range(7, -1, -1)),
    ("efficientnet_v2_l", "efficientnet_v2_m", "efficientnet_v2_s", "efficientnet_b0"),
    ("convnext_large", "convnext_base", "convnext_small", "convnext_tiny"),
    ("densenet161", "densenet201", "densenet169", "densenet121"),
    ("vgg19_bn", "vgg16_bn", "vgg13_bn", "vgg11_bn"),
    ("vgg19", "vgg16", "vgg13", "vgg11"),
    ("vit_h_14", "vit_l_16", "vit_b_16", "vit_b_32"),
    ("swin_b", "swin_s", "swin_t"),
    ("swin_v2_b", "swin_v2_s", "swin_v2_t"),
    tuple(f"regnet_y_{size}" for size in ("32gf", "16gf", "8gf", "3_2gf", "1_6gf", "800mf", "400mf")),
    tuple(f"regnet_x_{size}" for size in ("32gf", "16gf", "8gf", "3_2gf", "1_6gf", "800mf", "400mf")),
    tuple(f"shufflenet_v2_x{size}" for size in ("2_0", "1_5", "1_0", "0_5")),
    tuple(f"mnasnet{size}" for size in ("1_3", "1_0", "0_75", "0_5")),
)
STUDENTS = 3  # by default: the smallest of the family, which are the cheapest to try

# A candidate may be this much slower in the probe than asked: fine-tuned widths differ, and so do two measurements.
PROBE_SLACK = 1.1
# Below this, two latencies are the same: training for hours must have more to win.
WORTH = 0.97


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network and the precision of its file."""

    arch: str
    ratio: float  # of its multiply-adds that are left
    precision: Precision

    @property
    def network(self) -> str:
        """The name of the trained network's run folder."""
        return network_name(self.arch, self.ratio)

    @property
    def name(self) -> str:
        """The name of the file's run folder."""
        return f"{self.network}_{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What is known of a network before it is trained."""

    macs: int
    parameters: int
    seconds: Mapping[Precision, float]  # of one run of a session
    error: str | None = None  # why there is no such network; then the rest is empty


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a finished candidate: shares of the validation images, 0..1."""

    accuracy: float
    low: float  # 95 % interval
    high: float


def network_name(arch: str, ratio: float) -> str:
    """Return the folder's name for a network: cifar_resnet20, or cifar_resnet20_0.5 with half of its multiply-adds."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", arch)
    return plain if ratio == 1 else f"{plain}_{ratio:g}"


def default_students(arch: str) -> tuple[str, ...]:
    """Return smaller architectures of the same family, the smallest first; none where the family is not known."""
    family = next((names for names in FAMILIES if arch in names[:-1]), ())
    return tuple(reversed(family[family.index(arch) + 1 :]))[:STUDENTS] if family else ()


def in_order(
    own: str, students: Sequence[str], ratios: Sequence[float], probed: Mapping[tuple[str, float], Probed]
) -> list[Candidate]:
    """Return the candidates, the cheapest to try first, and fp32 before int8, which is made of it.

    The cost is that of training, in multiply-adds an image: three passes of each network that learns, one of the
    source that teaches it. A pruned student has to be trained whole first.
    """

    def cost(arch: str, ratio: float) -> int:
        whole, cut, source = probed[arch, 1.0], probed[arch, ratio], probed[own, 1.0]
        distilled = 0 if arch == own else 3 * whole.macs + source.macs
        return distilled + (0 if ratio == 1 else 3 * cut.macs + source.macs)

    networks = [(arch, ratio) for arch in (own, *students) for ratio in ratios]
    networks.sort(key=lambda network: cost(*network))
    return [
        Candidate(arch=arch, ratio=ratio, precision=precision) for arch, ratio in networks for precision in PRECISIONS
    ]


def why_not(
    candidate: Candidate,
    *,
    probed: Mapping[tuple[str, float], Probed],
    measured: Mapping[Candidate, Measured],
    trained: Mapping[tuple[str, float], Measured],
    failed: Collection[Candidate],
    floor: float,
    target: float | None,
) -> str | None:
    """Return why a candidate cannot win, as far as is known, or None.

    measured: the finished candidates. trained: what training said of networks, by architecture and ratio. failed:
    those that there will not be. floor: the least accuracy that is good enough. target: seconds of one run, or None. A
    network counts as not good enough only where its whole interval lies below the floor.
    """
    known = probed[candidate.arch, candidate.ratio]
    if known.error is not None:
        return known.error
    seconds = known.seconds[candidate.precision]
    if target is not None and seconds > PROBE_SLACK * target:
        return f"too slow: {ms_text(seconds)} before training, and {ms_text(target)} is asked for"

    def no_faster_than(other: float) -> bool:
        fits_alone = target is not None and seconds <= target < other
        return seconds > WORTH * other and not fits_alone

    good = [one for one, found in measured.items() if found.accuracy >= floor]
    best = min(good, key=lambda one: seconds_of(one, probed), default=None)
    if best is not None and no_faster_than(seconds_of(best, probed)):
        times = f"{ms_text(seconds)} and {ms_text(seconds_of(best, probed))}"
        return f"not {1 - WORTH:.0%} faster than {best.name}, which is good enough: {times}"
    for larger in _larger(candidate, probed):
        other = seconds_of(larger, probed)
        if larger not in failed and no_faster_than(other):
            times = f"{ms_text(seconds)} and {ms_text(other)}"
            return f"not {1 - WORTH:.0%} faster than {larger.name}, which loses less: {times}"
    known_of = {(one.arch, one.ratio): found for one, found in measured.items() if one.precision == "fp32"}
    for (arch, ratio), found in {**trained, **known_of}.items():
        if arch != candidate.arch or found.high >= floor:
            continue
        said = f"{network_name(arch, ratio)} is not good enough ({found.accuracy:.2%})"
        if ratio > candidate.ratio:
            return f"{said}, and it is the wider one"
        if ratio == candidate.ratio and candidate.precision == "int8":
            return f"{said}, and int8 would have to be better"
    return None


def _larger(candidate: Candidate, probed: Mapping[tuple[str, float], Probed]) -> list[Candidate]:
    """Return what a candidate can only be less accurate than: wider, or in fp32."""
    found = [
        Candidate(arch=arch, ratio=ratio, precision=candidate.precision)
        for (arch, ratio), known in probed.items()
        if arch == candidate.arch and ratio > candidate.ratio and known.error is None
    ]
    if candidate.precision == "int8":
        found.append(Candidate(arch=candidate.arch, ratio=candidate.ratio, precision="fp32"))
    return found


def seconds_of(candidate: Candidate, probed: Mapping[tuple[str, float], Probed]) -> float:
    """Return what the probe measured for a candidate."""
    return probed[candidate.arch, candidate.ratio].seconds[candidate.precision]


def read_probe(content: Mapping[str, Any]) -> dict[tuple[str, float], Probed]:
    """Return what `python -m dsimg.probe` found, by architecture and ratio."""
    return {
        (entry["model"], float(entry["ratio"])): Probed(
            macs=entry.get("macs", 0),
            parameters=entry.get("parameters", 0),
            seconds=entry["seconds"],
            error=entry["error"],
        )
        for entry in content["networks"]
    }


def pareto(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names of those points (latency, accuracy) that no other beats in one without losing in the other."""
    return {
        name
        for name, (slow, right) in points.items()
        if not any(
            other_slow <= slow and other_right >= right and (other_slow, other_right) != (slow, right)
            for other_slow, other_right in points.values()
        )
    }
