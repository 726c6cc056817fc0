"""What a person sees of a run: a live table by layer and node, failures as cause and remedy, a stage table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput.progress import Layer, NodeState, Run
from goodput.runner import Outcome

_MARKS = {
    "waiting": ("·", "dim"),
    "running": ("●", "yellow"),
    "ok": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "bold red"),
    "unreachable": ("✗", "bold red"),
}


def clock(seconds: float) -> str:
    """``75`` -> ``1:15``."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _node_cell(node: NodeState | None) -> Text:
    if node is None:
        return Text("")
    mark, style = _MARKS[node.status]
    parts = []
    if node.status in ("unreachable", "stopped"):
        parts.append(node.status)
    elif node.failed:
        parts.append("failed")
    elif node.changed:
        parts.append(f"{node.changed} changed")
    elif node.status == "ok":
        parts.append("ok" if node.ok else "skipped")
    return Text(" ".join((mark, *parts)), style=style)


def layer_table(run: Run, expected: Mapping[str, float], *, running_s: float = 0.0) -> Table:
    """One row per layer: what each node did, seconds, and the seconds of the last successful run.

    ``running_s``: seconds since the current task began, not yet in its layer's sum.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for host in run.hosts:
        table.add_column(host, no_wrap=True, min_width=11)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("last run", justify="right", no_wrap=True, style="dim")
    for name in dict.fromkeys((*run.layers, *expected)):
        layer = run.layers.get(name)
        usual = clock(expected[name]) if name in expected else ""
        if layer is None:
            table.add_row(Text(f"· {name}", style="dim"), *("" for _ in run.hosts), "", usual)
            continue
        current = run.task is not None and run.layer is layer
        mark, style = _MARKS["running" if current and layer.status == "ok" else layer.status]
        seconds = layer.seconds + (running_s if current else 0.0)
        cells = [_node_cell(layer.nodes.get(host)) for host in run.hosts]
        table.add_row(Text.assemble((mark, style), f" {name}"), *cells, clock(seconds), usual)
    return table


def stage_table(run: Run) -> Table:
    """Seconds, tasks and changes by layer, and their sum."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    figures = run.figures()
    rows = []
    for layer in run.layers.values():
        tasks = [task for task in run.tasks if task.layer == layer.name]
        ran = sum(any(host["status"] != "skipped" for host in task.hosts.values()) for task in tasks)
        rows.append((layer.name, layer.seconds, ran, sum(node.changed for node in layer.nodes.values())))
    table.add_column("stage", footer="all")
    table.add_column("seconds", footer=f"{run.seconds:.1f}", justify="right")
    table.add_column("tasks", footer=str(int(figures["tasks"])), justify="right")
    table.add_column("changed", footer=str(sum(row[3] for row in rows)), justify="right")
    for name, seconds, ran, changed in rows:
        table.add_row(name, f"{seconds:.1f}", str(ran), str(changed))
    return table


def guest_table(guests: Mapping[str, Mapping[str, Any]]) -> Table:
    """The virtual pair's guests: running or not, and the loopback ports that lead to them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("guest", "state", "pid", "ssh port", "http port", "address"):
        table.add_column(column)
    for name, guest in guests.items():
        running = bool(guest.get("running"))
        state = Text("running", style="green") if running else Text("off", style="dim")
        values = [guest.get(key) for key in ("pid", "ssh", "http", "management_address")]
        table.add_row(name, state, *("" if value is None else str(value) for value in values))
    return table


def _paint(line: str) -> Text:
    """A message line; the labels that our refusals use are coloured."""
    label, colon, rest = line.partition(":")
    if colon and label.strip().lower() in ("found", "required", "how to fix", "fix", "remedy", "cause"):
        return Text.assemble((f"  {label}:", "cyan"), rest)
    return Text(f"  {line}")


def failures(run: Run) -> RenderableType:
    """Every host that ended failed: where, and the message; one block for hosts that failed alike."""
    blocks: list[RenderableType] = []
    alike: dict[tuple[str, str, tuple[str, ...], bool], list[str]] = {}
    paths: dict[tuple[str, str], str] = {}
    for failure in run.failures:
        alike.setdefault((failure.layer, failure.task, failure.lines, failure.unreachable), []).append(failure.host)
        paths[failure.layer, failure.task] = failure.path
    for (layer, task, lines, unreachable), hosts in alike.items():
        word = "UNREACHABLE" if unreachable else "FAILED"
        blocks.append(Text.assemble((word, "bold red"), f"  {', '.join(hosts)}  {layer}  ", (task, "bold")))
        blocks += [_paint(line) for line in lines]
        if unreachable:
            blocks.append(
                _paint(f"remedy: ansible -m ping {hosts[0]} must answer; check power, cable, address and key")
            )
        before = [earlier for host in hosts for earlier in run.earlier(host)]
        if before:
            blocks.append(Text(f"  before it: {before[0].task}: {before[0].lines[0]}", style="dim"))
        if paths[layer, task]:
            blocks.append(Text(f"  task at {paths[layer, task]}", style="dim"))
        blocks.append(Text(""))
    return Group(*blocks)


def verbatim(text: str, style: str = "") -> Text:
    """A line to copy: never broken."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def headline(title: str, outcome: Outcome, resume: str) -> RenderableType:
    """The last lines: how it ended, what to do next, where the log is."""
    run, took = outcome.run, clock(outcome.seconds)
    log = verbatim(f"log: {outcome.log}", "dim")
    if outcome.ok:
        changes = ", ".join(f"{host} {count}" for host, count in run.changed.items())
        return Group(Text(f"OK: {title} in {took}; changed: {changes or 'nothing'}", style="bold green"), log)
    where = f" in layer {run.layer.name}" if run.layer is not None else ""
    go_on = verbatim(f"  {resume}")
    again = Text("To go on (finished steps find nothing to do):")
    if outcome.exit_code == 130:
        at = f" ({run.tasks[-1].name})" if run.tasks else ""
        stopped = f"INTERRUPTED: {title} after {took}{where}{at}. Nothing was undone."
        return Group(Text(stopped, style="bold yellow"), again, go_on, log)
    if outcome.exit_code == 2:
        text = f"COULD NOT RUN: {title}: {outcome.reason}"
        return Group(Text(text, style="bold red"), Text("To try again:"), go_on, log)
    said = Text(f"NOT OK: {title} stopped{where} after {took}", style="bold red")
    reason = [] if run.failures else [Text(f"  {outcome.reason}")]
    return Group(said, *reason, Text("After the remedy, go on with (finished steps find nothing to do):"), go_on, log)


class Progress:
    """Shows a run while it goes: a live table on a terminal, one line per finished layer elsewhere."""

    def __init__(self, console: Console, title: str, run: Run, expected: Mapping[str, float]) -> None:
        self.console, self.title, self.run, self.expected = console, title, run, expected
        self.started = time.time()
        self.interrupting = False
        self._told: list[str] = []
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=2, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        else:
            usual = sum(self.expected.values())
            self.console.print(self.title + (f"   about {clock(usual)}" if usual else ""))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()
        else:
            self._tell(final=True)

    def event(self) -> None:
        if not self.console.is_terminal:
            self._tell()

    def interrupt(self) -> None:
        self.interrupting = True
        if not self.console.is_terminal:
            self.console.print("stopping: waiting for running tasks to end (once more to kill them)")

    def _title(self) -> Text:
        elapsed, usual = clock(time.time() - self.started), sum(self.expected.values())
        about = f" of about {clock(usual)}" if usual else ""
        return Text.assemble((self.title, "bold"), f"   {elapsed}{about}")

    def _tell(self, *, final: bool = False) -> None:
        for layer in self.run.layers.values():
            if layer.name in self._told or (layer is self.run.layer and not final and not self.run.ended):
                continue
            self._told.append(layer.name)
            self.console.print(self._line(layer), soft_wrap=True)

    def _line(self, layer: Layer) -> str:
        nodes = "  ".join(f"{name} {_node_cell(node).plain}" for name, node in layer.nodes.items())
        last = f" (last run {clock(self.expected[layer.name])})" if layer.name in self.expected else ""
        return f"{layer.name:<16} {clock(layer.seconds):>6}{last}  {nodes}"

    def _render(self) -> RenderableType:
        task = self.run.task
        running_s = time.time() - task.started if task is not None else 0.0
        parts: list[RenderableType] = [self._title()]
        if self.run.layers or self.expected:
            parts.append(layer_table(self.run, self.expected, running_s=running_s))
        if self.interrupting:
            parts.append(Text("stopping: waiting for running tasks to end (Ctrl-C again kills them)", style="yellow"))
        elif task is not None:
            parts.append(Text(f"{task.layer}: {task.name}  {clock(running_s)}", style="dim"))
        else:
            parts.append(Text("ending" if self.run.ended else "starting Ansible", style="dim"))
        return Group(*parts)


def comparison(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """Figures of several runs side by side; the last column is the ratio to the last row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "seconds", "tasks", "s per task", "s per task and host", "ratio"):
        table.add_column(column, justify="left" if column == "run" else "right")
    base = rows[-1][1]["seconds_per_task_and_host"] if rows else 0.0
    for name, figures in rows:
        each = figures["seconds_per_task_and_host"]
        table.add_row(
            name,
            f"{figures['seconds']:.1f}",
            f"{figures['tasks']:.0f}",
            f"{figures['seconds_per_task']:.2f}",
            f"{each:.2f}",
            f"{each / base:.2f}" if base else "-",
        )
    return table
