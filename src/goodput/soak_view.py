"""The report of a soak on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from goodput.soak import MIB


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def report(summary: Mapping[str, Any], folder: str) -> RenderableType:
    share = summary["cached_share"]
    latency = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("seconds", "p50", "p90", "p99", "max"):
        latency.add_column(name, justify="left" if name == "seconds" else "right")
    for name, key in (("time to first token", "ttft_seconds"), ("whole request", "request_seconds")):
        latency.add_row(name, *(_seconds(summary[key][column]) for column in ("p50", "p90", "p99", "max")))
    memory = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("memory, MiB", "node", "program", "start", "warm", "end", "growth"):
        memory.add_column(name, justify="left" if name in ("memory, MiB", "node", "program") else "right")
    allowed = summary["options"]["max_growth_mib"]
    for row in summary["memory"]:
        if not row["lasted"] and row["start_bytes"] == row["end_bytes"]:
            # A helper that was seen once.
            continue
        grown = row["growth_bytes"] / MIB
        style = "dim" if not row["lasted"] else "bold red" if grown > allowed else ""
        sizes = (f"{row[key] / MIB:.1f}" for key in ("start_bytes", "warm_bytes", "end_bytes"))
        memory.add_row(row["unit"], row["node"], row["program"], *sizes, Text(f"{grown:+.1f}", style=style))
    served = ", ".join(f"{name} {count:,}" for name, count in summary["requests_by_worker"].items())
    counted = ", ".join(
        f"{name} {'-' if count is None else f'{count:,.0f}'}"
        for name, count in summary["requests_counted_by_worker"].items()
    )
    lines = [
        f"requests   {summary['requests']:,} in {summary['seconds']:g} s, {summary['errors']} errors,"
        f" {summary['sessions']} sessions",
        f"throughput {summary['requests_per_second']:g} requests/s, {summary['output_tokens_per_second']:,g} output and"
        f" {summary['prompt_tokens_per_second']:,g} prompt tokens/s",
        f"cached     {'-' if share is None else f'{100 * share:.1f} %'} of {summary['prompt_tokens']:,} prompt tokens,"
        f" longest prompt {summary['longest_prompt_tokens']:,}",
        f"workers    {served or '-'}   (counted by the workers: {counted or '-'})",
    ]
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts += [latency, memory, Text(f"growth: from the warm-up's end ({summary['options']['warm_up_seconds']:g} s)")]
    if summary["findings"]:
        parts += [Text(f"NOT OK: {len(summary['findings'])} findings", style="bold red")]
        parts += [Text(f"  {finding}", style="red") for finding in summary["findings"]]
    else:
        parts.append(Text(f"OK: no error; no process grew by more than {allowed:g} MiB", style="bold green"))
    parts.append(Text(f"files: {folder}", style="dim", no_wrap=True, overflow="ignore"))
    return Group(*parts)
