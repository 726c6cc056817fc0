"""``goodput power``: what state power and clocks of each node are in, and why, in about 20 s.

Exit 0: every node is ok. 1: a node is not. 2: a node could not be judged, or not be reached.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

# Before Ansible's own finder of collections is loaded, which the inventory brings.
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import Sample, Thresholds, reason_names
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput import power_plot

if TYPE_CHECKING:
    from goodput.inventory import Node

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ansible_collections/goodput/spark/plugins/module_utils"
MODULES = ("power_sampling", "power_verdict", "power_load", "power_clocks", "node_facts")
MAIN = (
    "from ansible_collections.goodput.spark.plugins.module_utils.power_sampling import main\nraise SystemExit(main())\n"
)
# Connecting, CUDA's start and one hung call of nvidia-smi.
SPARE_SECONDS = 240.0
UNREACHABLE = "unreachable"
STYLES = {"ok": "bold green", "inconclusive": "yellow", UNREACHABLE: "yellow", "sampling": "cyan"}


def bundle() -> bytes:
    """The sampler and what it imports as one zip file that Python runs; nothing is installed on the node."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        parts = PACKAGE.split("/")
        for depth in range(1, len(parts) + 1):
            archive.writestr("/".join([*parts[:depth], "__init__.py"]), "")
        for name in MODULES:
            archive.write(ROOT / f"plugins/module_utils/{name}.py", f"{PACKAGE}/{name}.py")
        archive.writestr("__main__.py", MAIN)
    return buffer.getvalue()


def arguments(variables: Mapping[str, Any], mode: str, seconds: float, interval_ms: int) -> list[str]:
    """The sampler's command line; programs, directories and thresholds as the inventory sets them for the role."""
    words = ["--stream", "--mode", mode, "--seconds", f"{seconds:g}", "--interval-ms", str(interval_ms)]
    for option, name in (("--smi", "power_smi"), ("--smi-timeout", "power_smi_timeout_seconds")):
        words += [f"{option}={variables[name]}"] if name in variables else []
    for option, name in (
        ("--load-command", "power_load_command"),
        ("--library-directory", "power_library_directories"),
    ):
        words += [f"{option}={word}" for word in variables.get(name, [])]
    names = [name for name in Thresholds.__dataclass_fields__ if f"power_{name}" in variables]
    limits = {name: variables[f"power_{name}"] for name in names}
    return [*words, "--thresholds", json.dumps(limits)]


def remote(words: Sequence[str], size: int, python: str, as_root: bool, password: bool) -> str:
    """The shell script of a node: take ``size`` bytes of program from stdin, run it as root if that is possible."""
    run = f'{python} "$d/power.pyz" {shlex.join(words)}'
    lines = ["set -e; umask 077; d=$(mktemp -d); trap 'rm -rf \"$d\"' EXIT", f'head -c {size} >"$d/power.pyz"']
    # Without root all but the owners of root's own cron tables can be read.
    sudo = f"elif sudo -n true 2>/dev/null; then sudo -n {run}; " if as_root else ""
    asked = f"else sudo -S -p '' {run}; fi" if as_root and password else f"else {run}; fi"
    lines.append(f'if [ "$(id -u)" = 0 ]; then {run}; {sudo}{asked}')
    return "\n".join(lines)


@dataclass
class Watched:
    """One node while it is looked at, and what it said in the end."""

    node: Node
    samples: list[Sample] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    said: str = ""

    @property
    def state(self) -> str:
        return str(self.result.get("state", "sampling" if self.samples else "starting"))

    def start(self, words: Sequence[str], program: bytes, events: queue.Queue[Watched]) -> None:
        python = str(self.node.variables.get("ansible_python_interpreter", "python3"))
        password = self.node.become_password
        script = remote(
            words, len(program), python if python.startswith("/") else "python3", self.node.become, password is not None
        )
        argv = [*self.node.command, script] if self.node.command else ["sh", "-c", script]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.node.environment},
            start_new_session=True,
        )
        data = program + (f"{password}\n".encode() if password is not None else b"")
        threading.Thread(target=self._follow, args=(data, events), daemon=True).start()

    def _follow(self, data: bytes, events: queue.Queue[Watched]) -> None:

        process = self.process
        assert process is not None and process.stdin and process.stdout and process.stderr
        complaints: list[bytes] = []
        stderr = process.stderr
        reader = threading.Thread(target=lambda: complaints.append(stderr.read()), daemon=True)
        reader.start()
        try:
            process.stdin.write(data)
            process.stdin.close()
        except OSError:
            pass
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                self.said = line.decode(errors="replace").strip()
                continue
            if "sample" in message:
                self.samples.append(Sample(**message["sample"]))
            elif "result" in message:
                self.result = message["result"]
            events.put(self)
        process.wait()
        reader.join(timeout=5)
        if not self.result:
            text = b"".join(complaints).decode(errors="replace").strip().splitlines()
            self.fail(text[-1] if text else self.said or f"the look ended with exit {process.returncode}")
        events.put(self)

    def fail(self, reason: str) -> None:
        self.result = {
            "state": UNREACHABLE,
            "reason": reason,
            "remedy": f"check that `ansible -m ping {self.node.name}` answers, with `-b` too",
        }

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def table(nodes: Sequence[Watched]) -> Table:
    """One row a node: the last reading while it samples, then the verdict over the figures of its busy samples."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("node", "left"), ("state", "left"), ("busy %", "right"), ("MHz", "right"), ("W", "right")):
        view.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    view.add_column("SoC °C", justify="right", no_wrap=True)
    view.add_column("mask in words", no_wrap=True)
    view.add_column("lock", no_wrap=True)
    for watched in nodes:
        evidence = watched.result.get("evidence") or {}
        state = Text(watched.state, style=STYLES.get(watched.state, "bold red" if watched.result else "dim"))
        last = watched.samples[-1] if watched.samples else None
        if evidence.get("sm_mhz"):
            clock, watts = evidence["sm_mhz"], evidence["power_watts"]
            cells = [f"{evidence['utilization_percent']['median']:g}", _range(clock), _range(watts)]
            cells += [shown((evidence.get("soc_c") or {}).get("max")), ", ".join(evidence["reasons"]) or "none"]
        elif last is not None:
            cells = [shown(last.utilization_percent), shown(last.sm_mhz), shown(last.power_watts), shown(last.soc_c)]
            cells.append(", ".join(reason_names(last.reasons or 0)) or "none")
        else:
            cells = ["-"] * 5
        applied = watched.result.get("applied_mhz")
        lock = "none of ours" if watched.result and applied is None else f"{applied:g}" if applied else ""
        if applied is not None:
            lock += f" {str(watched.result.get('lock', '')).replace('_', ' ')}"
        view.add_row(watched.node.name, state, *cells, lock)
    return view


def _range(values: Mapping[str, float]) -> str:
    low, high = values["min"], values["max"]
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def exit_code(results: Sequence[Mapping[str, Any]]) -> int:
    """0 all ok, 1 one is not, 2 one could not be judged."""
    states = [str(result["state"]) for result in results]
    wrong = any(state not in ("ok", "inconclusive", UNREACHABLE) for state in states)
    if wrong or any(result.get("lock") == "exceeded" for result in results):
        return 1
    return 0 if all(state == "ok" for state in states) else 2


def report(nodes: Sequence[Watched]) -> RenderableType:
    """The table, then the reason of each node and what to do."""
    parts: list[RenderableType] = [table(nodes)]
    for watched in nodes:
        result = watched.result
        style = STYLES.get(watched.state, "bold red")
        parts.append(Text.assemble((f"{watched.node.name}: {watched.state}", style), f"  {result.get('reason', '')}"))
        if result.get("lock") == "exceeded":
            parts.append(Text(f"  lock: a clock above the {result['applied_mhz']:g} MHz that the driver said it took"))
        if result.get("unclean_boot"):
            parts.append(Text("  the boot before this one ended without a shutdown"))
        if (result.get("load") or {}).get("stand_in"):
            parts.append(Text("  the load was a stand-in: no GPU computed here", style="dim"))
        parts += [
            Text(f"  found   lock of {lock['name']} ({lock['path']})") for lock in result.get("foreign_locks") or []
        ]
        if result.get("remedy"):
            parts.append(Text(f"  remedy  {result['remedy']}"))
    return Group(*parts)


def follow(nodes: Sequence[Watched], events: queue.Queue[Watched], deadline: float, console: Console) -> None:
    """Until every node has a result; the table lives on a terminal."""
    with Live(table(nodes), console=console, refresh_per_second=4, transient=True) as live:
        while any(not watched.result for watched in nodes):
            left = deadline - time.monotonic()
            if left <= 0:
                for watched in nodes:
                    if not watched.result:
                        watched.end()
                        watched.fail("no result in the time allowed")
                return
            try:
                events.get(timeout=min(left, 0.5))
            except queue.Empty:
                continue
            live.update(table(nodes))


def power(
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i", "--inventory", help="Inventory; default inventory/virtual if it exists, else inventory/pair."
        ),
    ] = None,
    limit: Annotated[str | None, typer.Option("--limit", help="Only these nodes.")] = None,
    mode: Annotated[
        str, typer.Option(help="auto loads an idle GPU, passive only watches, load insists (never beside a program).")
    ] = "auto",
    seconds: Annotated[float, typer.Option(min=10, help="How long to sample.")] = 14.0,
    watch: Annotated[
        float | None, typer.Option("--watch", min=10, help="Watch a run for SECONDS; writes samples.csv and plot.html.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for --watch; default .goodput/power/TIME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """State of power and clocks of each node: ok, latched, thermal, capped by a lock, slow memory, and why."""
    from goodput.cli import could_not_run, find_inventory, terminal
    from goodput.inventory import InventoryError, load

    if mode not in ("auto", "passive", "load"):
        could_not_run(f"found --mode {mode}, required auto, passive or load", as_json=as_json)
    path = find_inventory(inventory, as_json=as_json)
    try:
        nodes = [Watched(node) for node in load(path, limit=limit, basedir=ROOT)]
    except InventoryError as error:
        could_not_run(str(error), as_json=as_json)
    duration = watch if watch is not None else seconds
    if watch is not None and mode == "auto":
        # A run is watched, not disturbed.
        mode = "passive"
    interval_ms = 500 if duration <= 120 else 1000
    console = terminal(quiet=as_json)
    events: queue.Queue[Watched] = queue.Queue()
    program = bundle()
    started = datetime.now().astimezone()
    try:
        for watched in nodes:
            watched.start(arguments(watched.node.variables, mode, duration, interval_ms), program, events)
        follow(nodes, events, time.monotonic() + duration + SPARE_SECONDS, console)
    except KeyboardInterrupt:
        console.print("interrupted: what was sampled so far is kept")
        for watched in nodes:
            if not watched.result:
                watched.fail("interrupted")
    finally:
        for watched in nodes:
            watched.end()
    results = {watched.node.name: watched.result for watched in nodes}
    code = exit_code(list(results.values()))
    files: dict[str, str] = {}
    if watch is not None:
        state = Path(os.environ.get("GOODPUT_STATE", ROOT / ".goodput"))
        folder = output or state / "power" / f"{started:%Y%m%d-%H%M%S}"
        files = write(folder, nodes, results, f"{started:%Y-%m-%d %H:%M %Z}, {duration:g} s, {mode}")
    if as_json:
        print(json.dumps({"ok": code == 0, "exit": code, "mode": mode, "nodes": results, "files": files}))
    else:
        console.print(report(nodes), crop=False)
        for name in files.values():
            console.print(Text(f"written {name}"))
    raise typer.Exit(code)


def write(folder: Path, nodes: Sequence[Watched], results: Mapping[str, Any], when: str) -> dict[str, str]:
    """samples.csv and plot.html; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = {watched.node.name: watched.samples for watched in nodes}
    power_plot.write_csv(folder / "samples.csv", samples)
    (folder / "plot.html").write_text(power_plot.page(samples, results, when), encoding="utf-8")
    return {name: str(folder / name) for name in ("samples.csv", "plot.html")}
