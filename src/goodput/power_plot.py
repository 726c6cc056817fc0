"""Clock, power and temperature of the nodes over time: a CSV, and one HTML file drawn without a library."""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import Sample, reason_names

CSV_COLUMNS = (
    "node", "seconds", "utilization_percent", "sm_mhz", "power_watts", "gpu_c", "soc_c", "pstate", "reasons"
)  # fmt: skip
# Okabe and Ito's colours: distinct for everybody.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH, LEFT, RIGHT, TOP, PANEL, GAP = 960, 70, 190, 24, 170, 58


def write_csv(path: Path, samples: Mapping[str, Sequence[Sample]]) -> None:
    """One line a sample, in the order of time; an empty cell where there was no reading."""
    rows = sorted(
        ((sample.seconds, node, sample) for node, taken in samples.items() for sample in taken), key=lambda row: row[:2]
    )
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(CSV_COLUMNS)
        for seconds, node, sample in rows:
            writer.writerow(
                [
                    node,
                    f"{seconds:.2f}",
                    sample.utilization_percent,
                    sample.sm_mhz,
                    sample.power_watts,
                    sample.temperature_c,
                    sample.soc_c,
                    sample.pstate,
                    "+".join(reason_names(sample.reasons or 0)),
                ]
            )


def steps(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values from at or below ``low`` to at or above ``high``, about ``wanted`` of them."""
    span = max(high - low, 1e-9)
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.floor(low / step)
    return [index * step for index in range(first, math.ceil(high / step) + 1)]


def _text(x: float, y: float, text: str, **attributes: Any) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, **attributes: Any) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{extra}/>'


def _panel(
    top: float,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    duration: float,
    marks: Mapping[str, float],
    last: bool,
) -> list[str]:
    """One panel: grid, the nodes' lines, and named levels as dashed lines."""
    right, bottom = WIDTH - RIGHT, top + PANEL
    values = [value for points in series.values() for _at, value in points]
    parts = [_text(LEFT, top - 8, title, font_weight="bold")]
    if not values:
        return [*parts, _text(LEFT + 12, top + PANEL / 2, "no reading: the nodes have none", fill="#666")]
    ticks = steps(0, max([*values, *marks.values(), 1]))

    def x(at: float) -> float:
        return LEFT + (right - LEFT) * at / duration

    def y(value: float) -> float:
        return bottom - PANEL * (value - ticks[0]) / (ticks[-1] - ticks[0])

    for tick in ticks:
        parts.append(_line(LEFT, y(tick), right, y(tick), "#ddd"))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", text_anchor="end"))
    for tick in steps(0, duration, 6):
        if tick <= duration * 1.001:
            parts.append(_line(x(tick), bottom, x(tick), bottom + 5, "#444"))
            parts.append(_text(x(tick), bottom + 18, f"{tick:g} s" if last else f"{tick:g}", text_anchor="middle"))
    parts.append(_line(LEFT, bottom, right, bottom, "#444"))
    used: list[float] = []
    for name, level in sorted(marks.items(), key=lambda item: -item[1]):
        parts.append(_line(LEFT, y(level), right, y(level), "#666", stroke_dasharray="6 4"))
        # Two levels close to each other must not be written over each other.
        place = y(level) + 4
        while any(abs(place - other) < 14 for other in used):
            place += 14
        used.append(place)
        parts.append(_text(right + 8, place, f"{name} {level:.0f}", fill="#444"))
    for index, points in enumerate(series.values()):
        if points:
            path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
            colour = COLOURS[index % len(COLOURS)]
            dash = ' stroke-dasharray="9 3"' if index % 2 else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    return parts


def _points(samples: Iterable[Sample], field: str) -> list[tuple[float, float]]:
    return [(sample.seconds, value) for sample in samples if (value := getattr(sample, field)) is not None]


def drawing(samples: Mapping[str, Sequence[Sample]], marks: Mapping[str, Mapping[str, float]]) -> str:
    """The SVG: clock, power, hottest zone (the GPU's sensor where there are no zones). ``marks``: levels by panel."""
    duration = max([sample.seconds for taken in samples.values() for sample in taken] or [1.0]) or 1.0
    zones = any(sample.soc_c is not None for taken in samples.values() for sample in taken)
    panels = [
        ("clock", "SM clock in MHz", "sm_mhz"),
        ("power", "GPU power in W (not the whole machine)", "power_watts"),
        ("heat", "hottest thermal zone in °C", "soc_c")
        if zones
        else ("heat", "GPU temperature in °C (no thermal zones)", "temperature_c"),
        ("use", "utilisation in %", "utilization_percent"),
    ]
    height = TOP + len(panels) * (PANEL + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, node in enumerate(samples):
        colour = COLOURS[index % len(COLOURS)]
        level = TOP + 12 + 18 * index
        dash = {"stroke_dasharray": "9 3"} if index % 2 else {}
        parts.append(_line(WIDTH - RIGHT + 90, level, WIDTH - RIGHT + 114, level, colour, stroke_width=3, **dash))
        parts.append(_text(WIDTH - RIGHT + 120, level + 4, node, font_weight="bold"))
    for index, (key, title, field) in enumerate(panels):
        series = {node: _points(taken, field) for node, taken in samples.items()}
        top = TOP + index * (PANEL + GAP)
        # The stop is the hottest zone's; the GPU's own sensor reads 10 to 19 °C less.
        named = {} if key == "heat" and not zones else marks.get(key, {})
        parts += _panel(top, title, series, duration, named, index == len(panels) - 1)
    return "\n".join([*parts, "</svg>"])


def levels(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Lock and thresholds of the verdicts, as named levels of the panels."""
    marks: dict[str, dict[str, float]] = {"clock": {}, "power": {}, "heat": {}}
    for result in results:
        evidence = result.get("evidence") or {}
        limits = evidence.get("thresholds") or {}
        if result.get("applied_mhz"):
            marks["clock"]["lock"] = float(result["applied_mhz"])
        if evidence.get("latch_below_mhz") and evidence.get("cap_mhz"):
            marks["clock"]["latched below"] = float(evidence["latch_below_mhz"])
        if limits.get("latch_watts"):
            marks["power"]["latched below"] = float(limits["latch_watts"])
        if limits.get("soc_stop_c"):
            marks["heat"]["too hot"] = float(limits["soc_stop_c"])
    return marks


def page(samples: Mapping[str, Sequence[Sample]], results: Mapping[str, Mapping[str, Any]], when: str) -> str:
    """The HTML file: the verdict of each node in words, then the drawing."""
    rows = "".join(
        f"<tr><th>{html.escape(node)}</th><td><b>{html.escape(str(result.get('state', '')))}</b></td>"
        f"<td>{html.escape(str(result.get('reason', '')))}</td></tr>"
        for node, result in results.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>goodput power</title>\n'
        "<style>body{font:14px sans-serif;margin:2em;max-width:960px}td,th{text-align:left;vertical-align:top;"
        "padding:.2em .8em .2em 0}</style>\n"
        f"<h1>Clock, power and temperature of {len(samples)} node{'' if len(samples) == 1 else 's'}</h1>\n"
        f"<p>{html.escape(when)}. A latched node stays below both dashed lines marked "
        "“latched below” while it is busy.</p>\n"
        f"<table>{rows}</table>\n{drawing(samples, levels(results.values()))}\n</html>\n"
    )
