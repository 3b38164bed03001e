"""What a search found, as data, as rows for the terminal, and as files: report.json, report.html, report.png."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dsimg
from dsimg.console import ms_number, ms_text
from dsimg.evaluation import read_predictions
from dsimg.metrics import mcnemar, points_text
from dsimg.run import read_json, write_atomically, write_json
from dsimg_export.page import page
from dsimg_export.search_space import WORTH, Candidate, Probed, pareto, seconds_of

EQUAL = 1e-9  # accuracies are counts over counts


def build_report(
    *,
    out: Path,
    wanted: Mapping[str, Any],
    finished: Mapping[Candidate, Sequence[str]],
    dropped: Mapping[Candidate, str],
    probed: Mapping[tuple[str, float], Probed],
    bench: Mapping[str, Any],
    evaluation: Path,
    target: tuple[float, bool] | None,
) -> dict[str, Any]:
    """Return everything that is known of a search, as report.json holds it.

    finished: the candidates whose runs lie in `out`, by name, with the commands that made them; the first is the source
    in fp32, which the others are compared with. `evaluation`: where in a run its evaluation lies. bench: what `dsimg
    bench` measured of them. target: a latency in seconds, or a share of the source's (then False), or None.
    """
    reference = next(iter(finished))
    times = {row["run"]: row for row in bench["measurements"]}
    sizes = {row["run"]: row["bytes"] for row in bench["runs"]}
    reports = {one: read_json(out / one.name / evaluation / "evaluation.json") for one in finished}
    right = {one: _right(out / one.name / evaluation / "predictions.csv") for one in finished}
    floor = reports[reference]["top1"]["value"] - wanted["max_drop"]
    rows = []
    for one, commands in finished.items():
        top1, time = reports[one]["top1"], times[one.name]
        limit = (
            None if target is None else 1000 * target[0] if target[1] else target[0] * times[reference.name]["p50_ms"]
        )
        test = _compare(right[one], right[reference])
        rows.append(
            {
                **_identity(one, probed),
                "run": str(out / one.name),
                "source": one == reference,
                "commands": list(commands),
                "images": reports[one]["images"],
                "top1": top1["value"],
                "interval": top1["interval"],
                "difference": top1["value"] - reports[reference]["top1"]["value"],
                "against_source": test if one != reference else None,
                **{key: time[key] for key in ("p50_ms", "p99_ms", "speedup")},
                "speedup_interval": time["interval"],
                "bytes": sizes[one.name],
                "good_enough": top1["value"] >= floor - EQUAL,
                "fast_enough": limit is None or time["p50_ms"] <= limit,
                "front": False,
                "winner": False,
            }
        )
    front = pareto({row["name"]: (row["p50_ms"], row["top1"]) for row in rows})
    fit = [row for row in rows if row["good_enough"] and row["fast_enough"]]
    fastest = min((row["p50_ms"] for row in fit), default=0.0)
    # Two measurements of one file differ by as much: of those, the one that is right most often.
    level = [row for row in fit if fastest >= WORTH * row["p50_ms"]]
    winner = max(level, key=lambda row: (row["top1"], -row["p50_ms"]), default=None)
    for row in rows:
        row["front"], row["winner"] = row["name"] in front, row is winner
    session = bench["measurements"][0]
    return {
        "dsimg": dsimg.__version__,
        "created": bench["created"],
        "wanted": {**wanted, "floor": floor, "limit_ms": limit},
        "measured_on": {
            "machine": bench["machine"],
            "onnxruntime": bench["onnxruntime"],
            "provider": bench["provider"],
            "threads": session["threads"],
            "batch_size": session["batch_size"],
            "images": rows[0]["images"],
            "waited": max((row["waited"] for row in bench["measurements"] if row["waited"] is not None), default=None),
        },
        "conclusion": _conclusion(rows, winner, limit=limit, max_drop=wanted["max_drop"]),
        "candidates": sorted(rows, key=lambda row: row["p50_ms"]),
        "dropped": [{**_identity(one, probed), "reason": reason} for one, reason in dropped.items()],
    }


def shown_rows(report: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the terminal's table, the fastest first; * stands on the Pareto front."""
    header = ("", "candidate", "Top-1", "95 %", "points", "ms", "speed")
    rows: list[tuple[str, ...]] = []
    for row in report["candidates"]:
        low, high = row["interval"]
        rows.append(
            (
                "winner" if row["winner"] else "*" if row["front"] else "",
                row["name"],
                f"{row['top1']:.2%}",
                f"{100 * low:.1f} to {100 * high:.1f}",
                "source" if row["source"] else f"{100 * row['difference']:+.2f}",
                ms_number(row["p50_ms"] / 1000),
                f"{row['speedup']:.2f}x",
            )
        )
    return header, rows


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, report.html, and report.png where there is matplotlib. Raises RunError."""
    write_json(folder / "report.json", report)
    write_atomically(folder / "report.html", page(report).encode("utf-8", "backslashreplace"))
    if importlib.util.find_spec("matplotlib") is not None:
        from dsimg_export.plots import draw_search

        draw_search(folder / "report.png", report)


def _identity(one: Candidate, probed: Mapping[tuple[str, float], Probed]) -> dict[str, Any]:
    known = probed[one.arch, one.ratio]
    return {
        "name": one.name,
        "arch": one.arch,
        "ratio": one.ratio,
        "precision": one.precision,
        "macs": known.macs or None,
        "parameters": known.parameters or None,
        "probe_ms": None if known.error is not None else 1000 * seconds_of(one, probed),
    }


def _right(predictions: Path) -> dict[str, bool]:
    """Return whether each image of a predictions.csv was classified rightly."""
    return {file: row["correct"] == "1" for file, row in read_predictions(predictions).items()}


def _compare(ours: Mapping[str, bool], theirs: Mapping[str, bool]) -> dict[str, Any] | None:
    """Return McNemar's test of two files on the same images, or None where they were not the same."""
    if ours.keys() != theirs.keys():
        return None
    names = list(ours)
    return mcnemar(np.array([ours[name] for name in names]), np.array([theirs[name] for name in names]))


def _conclusion(
    rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None, *, limit: float | None, max_drop: float
) -> str:
    if winner is not None:
        if winner["source"]:
            return (
                f"nothing that is within {points_text(max_drop)} of the source is {1 - WORTH:.0%} faster than it: "
                "serve it as it is."
            )
        faster = min((row for row in rows if row["good_enough"]), key=lambda row: row["p50_ms"])
        which = (
            "the fastest"
            if faster is winner
            else f"as fast as {faster['name']}, by less than {1 - WORTH:.0%}, and the best"
        )
        return (
            f"{winner['name']} is {which} within {points_text(max_drop)} of the source: {winner['top1']:.2%}, "
            f"{100 * winner['difference']:+.2f} points, {ms_text(winner['p50_ms'] / 1000)}, "
            f"{winner['speedup']:.2f}x as fast."
        )
    assert limit is not None  # the source is within any drop of itself
    near = [
        f"{row['name']} {said} ({ms_text(row['p50_ms'] / 1000)}, {100 * row['difference']:+.2f} points)"
        for row, said in (
            (min((row for row in rows if row["good_enough"]), key=lambda row: row["p50_ms"]), "is good enough"),
            (
                max((row for row in rows if row["fast_enough"]), key=lambda row: row["top1"], default=None),
                "is fast enough",
            ),
        )
        if row is not None
    ]
    return (
        f"nothing that was tried is within {points_text(max_drop)} of the source and takes at most "
        f"{ms_text(limit / 1000)}; nearest: {'; '.join(near)}. Give more --epochs, other --students or --ratios, or "
        "ask for less."
    )
