"""Pictures as PNG: of a bench, of a search. On this side matplotlib, which hosts that serve need not have, is loaded
here alone; on torch's, `scan` loads it too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dsimg.errors import RunError
from dsimg.run import replacing
from dsimg_export.page import log_ticks

WIDTH = 0.7  # of a group of points, between two of which lies 1


def draw_bench(path: Path, report: Mapping[str, Any]) -> None:
    """Draw what bench.json holds to a PNG: latencies, and ratios with their intervals."""
    names = [run["run"] for run in report["runs"]]
    settings = list(dict.fromkeys((row["threads"], row["batch_size"]) for row in report["measurements"]))
    table = {(row["run"], row["threads"], row["batch_size"]): row for row in report["measurements"]}
    figure = Figure(figsize=(max(9.0, 1.5 + 0.35 * len(names) * len(settings) * 2), 4.8), layout="constrained")
    panels = figure.subplots(1, 2 if len(names) > 1 else 1, squeeze=False)[0]
    centres = np.arange(len(settings))
    for number, name in enumerate(names):
        rows = [table[name, *setting] for setting in settings]
        look: dict[str, Any] = {"fmt": "o", "color": f"C{number % 10}", "capsize": 3, "label": _plain(name)}
        places = centres + ((number + 0.5) / len(names) - 0.5) * WIDTH
        p50, p99 = (np.array([row[key] for row in rows]) for key in ("p50_ms", "p99_ms"))
        panels[0].errorbar(places, p50, [0 * p50, p99 - p50], **look)
        if len(names) > 1:
            ratio = np.array([row["speedup"] for row in rows])
            low, high = np.array([row["interval"] for row in rows]).T
            panels[1].errorbar(places, ratio, np.clip([ratio - low, high - ratio], 0, None), **look)
    panels[0].set(yscale="log", ylabel="ms a call: median, whisker up to p99", title="Latency")
    panels[0].yaxis.set_major_formatter("{x:g}")
    if len(names) > 1:
        panels[1].set(ylabel=f"times as fast as {_plain(names[0])}", title="Ratio of medians, 95 % interval")
        panels[1].axhline(1, color="0.6", linewidth=1, zorder=0)
        panels[1].set_ylim(bottom=0)
    for axes in panels:
        axes.set_xticks(centres, [_setting(*setting) for setting in settings])
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    machine = report["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['processor']}, ONNX Runtime {report['onnxruntime']}", fontsize="medium"
    )
    save(figure, path)


def draw_search(path: Path, report: Mapping[str, Any]) -> None:
    """Draw what report.json holds to a PNG: accuracy against latency."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    limit = report["wanted"]["limit_ms"]
    times = [row["p50_ms"] for row in report["candidates"]] + ([] if limit is None else [limit])
    low_ms, high_ms = min(times) / 1.15, max(times) * 1.5  # names stand to the right of their points
    ticks = log_ticks(low_ms, high_ms, most=10)
    axes.set_xlim(low_ms, high_ms)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    for precision, colour, marker in (("fp32", "C0", "o"), ("int8", "C1", "s")):
        rows = [row for row in report["candidates"] if row["precision"] == precision]
        if not rows:
            continue
        right = np.array([row["top1"] for row in rows])
        low, high = np.array([row["interval"] for row in rows]).T
        axes.errorbar(
            [row["p50_ms"] for row in rows],
            100 * right,
            yerr=100 * np.stack([right - low, high - right]),
            fmt=marker,
            color=colour,
            elinewidth=1,
            capsize=2,
            label=precision,
        )
        for row in rows:
            name = f"{row['name'].removesuffix(f'_{precision}')}{' (winner)' if row['winner'] else ''}"
            axes.annotate(
                name, (row["p50_ms"], 100 * row["top1"]), (6, 5), textcoords="offset points", fontsize="small"
            )
    front = [row for row in report["candidates"] if row["front"]]
    axes.step([row["p50_ms"] for row in front], [100 * row["top1"] for row in front], where="post", color="0.6", lw=1)
    axes.axhline(100 * report["wanted"]["floor"], color="C2", linestyle="--", linewidth=1, label="good enough above")
    if limit is not None:
        axes.axvline(limit, color="C3", linestyle="--", linewidth=1, label="fast enough before")
    on = report["measured_on"]
    threads = f"{on['threads']} thread{'s' * (on['threads'] > 1)}"
    axes.set(xlabel=f"ms a run (median, batch {on['batch_size']}, {threads})")
    axes.set_ylabel(f"Top-1 on {on['images']:,} images (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, atomically, without a display or global state. Raises RunError where the disk refuses."""
    FigureCanvasAgg(figure)
    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}. Free some space or choose another --out.") from error


def _plain(name: str) -> str:
    return name.replace("$", r"\$")  # which would start a formula


def _setting(threads: int, batch: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}\n{batch} image{'s' * (batch > 1)}"
