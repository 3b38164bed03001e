"""report.html of a search: one file without scripts or anything from elsewhere, in light and dark."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from dsimg.console import busy_text, bytes_text, count_text, ms_number, ms_text

STYLE = """
:root { color-scheme: light dark; --back: #f6f6f4; --card: #fff; --line: #e2e2dd; --text: #1d2025; --faint: #676c75;
  --fp32: #2563c9; --int8: #c2570c; --good: #2b7a3d; --limit: #b3261e; --mark: #eef4ec; }
@media (prefers-color-scheme: dark) { :root { --back: #131519; --card: #1b1e24; --line: #30343c; --text: #e7e9ec;
  --faint: #9aa1ac; --fp32: #78aaff; --int8: #ffa65c; --good: #7bd08e; --limit: #ff8a80; --mark: #1f2a22; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 0 0 14px; overflow-wrap: anywhere; }
.faint, small, figcaption { color: var(--faint); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 600; line-height: 1.3; }
section { margin: 0 0 16px; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg.narrow { display: none; }
svg text { fill: var(--faint); }
svg .name { fill: var(--text); font-weight: 600; }
svg .grid { stroke: var(--line); }
svg .fp32 { fill: var(--fp32); stroke: var(--fp32); }
svg .int8 { fill: var(--int8); stroke: var(--int8); }
svg .ring { fill: none; stroke: var(--good); stroke-width: 2; }
svg .front { fill: none; stroke: var(--faint); stroke-width: 1.2; }
svg .floor { stroke: var(--good); stroke-dasharray: 5 4; }
svg .limit { stroke: var(--limit); stroke-dasharray: 5 4; }
svg text.good { fill: var(--good); }
svg text.bad { fill: var(--limit); }
.key { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 0; border-radius: 5px;
  background: var(--fp32); }
.key.int8 { background: var(--int8); border-radius: 1px; margin-left: 14px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--faint); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 10px 2px 0; vertical-align: top; white-space: nowrap; }
td small { display: block; line-height: 1.3; }
tbody.candidate { border-top: 1px solid var(--line); }
tbody.winner { background: var(--mark); }
th:first-child, td:first-child { padding-left: 8px; }
.number { text-align: right; }
.tag { color: var(--good); font-size: 12px; font-weight: 600; margin-left: 6px; }
td.commands { padding: 0 0 8px; white-space: normal; }
details { max-width: 1000px; }
summary { cursor: pointer; color: var(--faint); font-size: 13px; }
code, pre { font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { margin: 6px 0 0; }
ul { margin: 0; padding-left: 18px; }
li { margin-bottom: 6px; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 18px 12px 32px; }
  svg.broad { display: none; }
  svg.narrow { display: block; }
  .tile b { font-size: 19px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  section, .tile { padding: 12px; }
  .second { display: none; }
  th, td { padding-right: 8px; }
  th:first-child, td:first-child { padding-left: 2px; }
  table { font-size: 13.5px; }
  td.name { white-space: normal; }
  .tag { display: block; margin: 0; }
}
"""


def page(report: Mapping[str, Any]) -> str:
    """Return the page for what `report.build_report` returns."""
    rows = report["candidates"]
    winner = next((row for row in rows if row["winner"]), None)
    source = next(row for row in rows if row["source"])
    title = f"{source['arch']}, compressed" if winner is not None else f"{source['arch']}: nothing fits"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(report["wanted"]["source"])}, {escape(report["created"][:10])}. Wanted: '
        f"{escape(report['wanted']['text'])}.</p>",
        f"<p>{escape(_sentence(report['conclusion']))}</p>",
        _tiles(winner, source) if winner is not None else "",
        f"<section><h2>Accuracy against latency</h2><figure>{_plot(report, 1000, 430, 'broad')}"
        f"{_plot(report, 380, 330, 'narrow')}<figcaption>{_caption(report)}</figcaption></figure></section>",
        _table(rows),
        _dropped(report["dropped"]),
        f'<p class="faint">{escape(_measured(report))}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _sentence(text: str) -> str:
    return text if text[:1].isupper() or "_" in text.split(" ")[0] else text[:1].upper() + text[1:]


def _tiles(winner: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    low, high = winner["interval"]
    slow, fast = winner["speedup_interval"]
    found = [
        ("Top-1", f"{winner['top1']:.2%}", f"{100 * low:.1f} to {high:.1%} (95 %)"),
        ("against the source", f"{100 * winner['difference']:+.2f} points", f"which has {source['top1']:.2%}"),
        ("latency", ms_text(winner["p50_ms"] / 1000), f"source {ms_text(source['p50_ms'] / 1000)}"),
        ("speed", f"{winner['speedup']:.2f}x", f"{slow:.2f} to {fast:.2f}x (95 %)"),
        ("file", bytes_text(winner["bytes"]), f"source {bytes_text(source['bytes'])}"),
    ]
    tiles = (
        f'<div class="tile"><small>{escape(name)}</small><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in found
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _plot(report: Mapping[str, Any], width: int, height: int, name: str) -> str:
    """Return the picture: a point a candidate, numbered as in the table, with the accuracy's interval."""
    rows, wanted = report["candidates"], report["wanted"]
    left, right, top, bottom = 52, 18, 18, 44
    limit = [] if wanted["limit_ms"] is None else [wanted["limit_ms"]]
    xs: list[float] = [row["p50_ms"] for row in rows] + limit
    ys: list[float] = [end for row in rows for end in row["interval"]] + [wanted["floor"]]
    x_low, x_high = math.log(min(xs) / 1.15), math.log(max(xs) * 1.15)
    margin = 0.06 * (max(ys) - min(ys)) or 0.01
    y_low, y_high = max(min(ys) - margin, 0.0), min(max(ys) + margin, 1.0)

    def x(ms: float) -> float:
        return left + (width - left - right) * (math.log(ms) - x_low) / (x_high - x_low)

    def y(share: float) -> float:
        return top + (height - top - bottom) * (y_high - share) / (y_high - y_low)

    parts = []
    base = height - bottom
    for value in linear_ticks(100 * y_low, 100 * y_high):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(value / 100):.1f}" y2="{y(value / 100):.1f}"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y(value / 100) + 4:.1f}" text-anchor="end">{value:g}%</text>')
    for value in log_ticks(math.exp(x_low), math.exp(x_high), most=10 if width > 600 else 5):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{base}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{base + 18}" text-anchor="middle">{value:g}</text>')
    middle = (left + width - right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{height - 6}" text-anchor="middle">ms a run, on a logarithmic scale</text>'
    )
    floor = y(wanted["floor"])
    parts.append(f'<line class="floor" x1="{left}" x2="{width - right}" y1="{floor:.1f}" y2="{floor:.1f}"/>')
    parts.append(
        f'<text class="good" x="{width - right - 4}" y="{floor + 15:.1f}" text-anchor="end">good enough above</text>'
    )
    if limit:
        edge = x(limit[0])
        parts.append(f'<line class="limit" x1="{edge:.1f}" x2="{edge:.1f}" y1="{top}" y2="{base}"/>')
        parts.append(f'<text class="bad" x="{edge - 5:.1f}" y="{base - 7}" text-anchor="end">fast enough</text>')
    front = [row for row in rows if row["front"]]
    path = ""
    for before, row in zip([None, *front], front, strict=False):
        across = "" if before is None else f"L{x(row['p50_ms']):.1f} {y(before['top1']):.1f}"
        path += f"{across}{'M' if before is None else 'L'}{x(row['p50_ms']):.1f} {y(row['top1']):.1f}"
    parts.append(f'<path class="front" d="{path}"/>')
    parts += [_point(number, row, x(row["p50_ms"]), y) for number, row in enumerate(rows, start=1)]
    label = f"Top-1 against latency of {len(rows)} candidates; the table below has the figures"
    return f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _point(number: int, row: Mapping[str, Any], at: float, y: Callable[[float], float]) -> str:
    low, high = row["interval"]
    here, precision = y(row["top1"]), row["precision"]
    shape = (
        f'<circle class="fp32" cx="{at:.1f}" cy="{here:.1f}" r="4.5"/>'
        if precision == "fp32"
        else f'<rect class="int8" x="{at - 4:.1f}" y="{here - 4:.1f}" width="8" height="8"/>'
    )
    ring = f'<circle class="ring" cx="{at:.1f}" cy="{here:.1f}" r="10"/>' if row["winner"] else ""
    name = f"{row['name']}: {row['top1']:.2%}, {ms_text(row['p50_ms'] / 1000)}"
    return (
        f"<g><title>{escape(name)}</title>"
        f'<line class="{precision}" x1="{at:.1f}" x2="{at:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" opacity="0.45"/>'
        f'{shape}{ring}<text class="name" x="{at + 9:.1f}" y="{here - 8:.1f}">{number}</text></g>'
    )


def _caption(report: Mapping[str, Any]) -> str:
    on = report["measured_on"]
    return (
        '<span class="key"></span>fp32<span class="key int8"></span>int8. Numbers are those of the table; bars are '
        f"95 % intervals over {on['images']:,} validation images; the line joins those that none beats in both."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        '<thead><tr><th>#</th><th>candidate</th><th class="number">Top-1</th><th class="number">points</th>'
        '<th class="number">ms</th><th class="number">speed</th><th class="number second">file</th></tr></thead>'
    )
    return (
        '<section><h2>Candidates, the fastest first</h2><div class="wide"><table>'
        + head
        + "".join(_candidate(number, row) for number, row in enumerate(rows, start=1))
        + "</table></div></section>"
    )


def _candidate(number: int, row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    slow, fast = row["speedup_interval"]
    test = row["against_source"]
    tag = '<span class="tag">winner</span>' if row["winner"] else ""
    size = f"{count_text(row['parameters'])} parameters, {count_text(row['macs'])} MACs"
    chance = "" if test is None else f"p = {test['p_value']:.2g}"
    cells = [
        f"<td>{number}</td>",
        f'<td class="name">{escape(row["name"]).replace("_", "_<wbr>")}{tag}<small class="second">{size}</small></td>',
        _cell(f"{row['top1']:.2%}", f"{low:.1%} to {high:.1%}"),
        _cell(f"{100 * row['difference']:+.2f}", chance),
        _cell(ms_number(row["p50_ms"] / 1000), f"p99 {ms_number(row['p99_ms'] / 1000)}"),
        _cell(f"{row['speedup']:.2f}x", f"{slow:.2f} to {fast:.2f}"),
        f'<td class="number second">{bytes_text(row["bytes"])}</td>',
    ]
    commands = [escape(line) for line in row["commands"]]
    shown = re.sub(r"^((?:\S+ ){1,2}).*", r"\1…", commands[-1])
    count = f"{len(commands)} command{'s' * (len(commands) > 1)}: " if commands else ""
    return (
        f'<tbody class="candidate{" winner" * row["winner"]}"><tr>{"".join(cells)}</tr>'
        f'<tr><td></td><td class="commands" colspan="6"><details{" open" * row["winner"]}>'
        f"<summary>{count}<code>{shown}</code></summary><pre>{chr(10).join(commands)}</pre></details></td></tr></tbody>"
    )


def _cell(value: str, more: str) -> str:
    return f'<td class="number">{escape(value)}<small class="second">{escape(more)}</small></td>'


def _dropped(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = "".join(f"<li><b>{escape(row['name'])}</b>: {escape(row['reason'])}</li>" for row in rows)
    return f"<section><h2>Not tried to the end</h2><ul>{lines}</ul></section>"


def _measured(report: Mapping[str, Any]) -> str:
    on = report["measured_on"]
    machine = on["machine"]
    busy = busy_text(on["waited"])
    more = "" if busy is None else f" {_sentence(busy)}"
    return (
        f"Latencies: median of a run with {on['batch_size']} image{'s' * (on['batch_size'] > 1)} on {on['threads']} "
        f"thread{'s' * (on['threads'] > 1)}, all files in turn in one measurement, on {machine['processor']}; ONNX "
        f"Runtime {on['onnxruntime']}, {on['provider']}. Speed: times as fast as the source in fp32. Points: against "
        f"the source on the same images; p is McNemar's. dsimg {report['dsimg']}.{more}"
    )


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 6)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, *, most: int) -> list[float]:
    """Return round numbers between two, evenly spread over their logarithm, at most so many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [round(digit * 10.0**exponent, 12) for exponent in exponents for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) <= most:
            return found
    return found
