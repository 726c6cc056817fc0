"""The picture of a soak: time to first token, throughput and memory over time. Needs matplotlib, which is optional."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goodput.soak import MIB, Request, Sample, growth, percentile

# Okabe and Ito's colours: distinct for everybody.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


class NoMatplotlib(Exception):
    """The picture can not be drawn; the message says why."""


def bins(requests: Sequence[Request], seconds: float, wanted: int = 60) -> tuple[float, list[list[Request]]]:
    """(width in seconds, good requests by the bin in which they ended); at most ``wanted`` bins of a second or more."""
    count = max(1, min(wanted, round(seconds)))
    width = max(seconds, 1e-9) / count
    found: list[list[Request]] = [[] for _ in range(count)]
    for each in requests:
        if each["state"] == "ok":
            found[min(len(found) - 1, int((each["start_seconds"] + each["seconds"]) / width))].append(each)
    return width, found


def draw(
    path: Path,
    title: str,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    workers: Mapping[str, str],
    seconds: float,
    warm_up_seconds: float,
) -> None:
    """Write the PNG. Raises NoMatplotlib."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise NoMatplotlib(f"no picture: {error}; `pip install matplotlib`, the CSV files are complete") from None
    # Without pyplot: no display, no state.
    figure: Any = figure_module.Figure(figsize=(11, 10), layout="constrained")
    waits, rates, memory = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 3))
    figure.suptitle(title)
    _waits(waits, requests, workers, seconds)
    _rates(rates, requests, seconds)
    _memory(memory, samples, warm_up_seconds)
    memory.set_xlabel("seconds since the first request")
    memory.set_xlim(0, max([1.0, seconds, *(each.seconds for each in samples)]))
    for axes in (waits, rates, memory):
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _waits(axes: Any, requests: Sequence[Request], workers: Mapping[str, str], seconds: float) -> None:
    good = [each for each in requests if each["state"] == "ok" and each["ttft_seconds"] is not None]
    names = sorted({workers.get(each["worker"], each["worker"]) for each in good})
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        own = [each for each in good if workers.get(each["worker"], each["worker"]) == name]
        x = [each["start_seconds"] + each["ttft_seconds"] for each in own]
        y = [each["ttft_seconds"] for each in own]
        axes.scatter(x, y, s=8, alpha=0.5, color=colour, label=f"{name} ({len(own):,} requests)", linewidths=0)
    width, found = bins(good, seconds)
    middles = [(index + 0.5) * width for index in range(len(found))]
    for percent, style in ((50, "-"), (90, "--")):
        line = [percentile([each["ttft_seconds"] for each in part], percent) for part in found]
        y = [float("nan") if value is None else value for value in line]
        axes.plot(middles, y, style, color="black", linewidth=1.2, label=f"p{percent} in {width:.0f} s")
    failed = [each["start_seconds"] + each["seconds"] for each in requests if each["state"] != "ok"]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), marker="x", color="red", label=f"{len(failed)} errors", zorder=3)
    axes.set_ylabel("time to first token, s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize="small", ncols=2)


def _rates(axes: Any, requests: Sequence[Request], seconds: float) -> None:
    width, found = bins(requests, seconds)
    x = [index * width for index in range(len(found) + 1)]
    output = [sum(each["completion_tokens"] or 0 for each in part) / width for part in found]
    prompts = [sum(each["prompt_tokens"] or 0 for each in part) for part in found]
    cached = [sum(each["cached_tokens"] or 0 for each in part) for part in found]
    share = [100 * part / whole if whole else float("nan") for part, whole in zip(cached, prompts, strict=True)]
    axes.step(x, [*output, output[-1]], where="post", color=COLOURS[2], label="output tokens/s (left)")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.step(x, [*share, share[-1]], where="post", color=COLOURS[4], label="cached prompt tokens, % (right)")
    other.set_ylabel("cached, %")
    other.set_ylim(0, 105)
    other.spines["top"].set_visible(False)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="lower right", fontsize="small", ncols=2)


def _memory(axes: Any, samples: Sequence[Sample], warm_up_seconds: float) -> None:
    seen: dict[tuple[str, str, int], list[Sample]] = {}
    for each in samples:
        seen.setdefault((each.node, each.unit, each.pid), []).append(each)
    # A helper that came and went between two samples is no line.
    series = {process: found for process, found in seen.items() if len(found) > 1}
    grown = {(row.node, row.unit, row.pid): row.growth_bytes for row in growth(samples, warm_up_seconds)}
    units = list(dict.fromkeys(unit for _node, unit, _pid in series))
    nodes = list(dict.fromkeys(node for node, _unit, _pid in series))
    for (node, unit, pid), found in series.items():
        colour = COLOURS[units.index(unit) % len(COLOURS)]
        style = ("-", "--", ":", "-.")[nodes.index(node) % 4]
        label = f"{unit.removeprefix('goodput-')} on {node} ({grown[node, unit, pid] / MIB:+.1f} MiB)"
        y = [each.rss_bytes / MIB for each in found]
        axes.plot([each.seconds for each in found], y, style, color=colour, marker=".", markersize=4, label=label)
    axes.axvline(warm_up_seconds, color="grey", linewidth=0.8)
    axes.annotate(
        " growth counts from here",
        (warm_up_seconds, 1.0),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize="small",
    )
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    if series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize="small")
